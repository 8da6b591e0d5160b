"""Another server, the same numbers: what the last one granted is never reported to the next."""

from __future__ import annotations

from collections.abc import Callable

from e2e.known import KnownWorker, eventually, small_spec, step_of

from layerflow.agent.lanes.task import CopyTask
from layerflow.flow.events import BatchDone, BatchFailed, Event
from layerflow.server import EmbeddedServer
from layerflow.wire.messages import STRANGER


def test_a_batch_is_reported_to_the_server_that_granted_it(embed: Callable[..., EmbeddedServer]) -> None:
    """Saves are still passing a slow link when the agent loses its session and attaches again."""
    # All of them pass within 6.5 s: there is time to attach again meanwhile.
    server = embed(pool__link_gbps=0.00001, transfer={"max_transfer_bytes": "4KiB", "max_inflight_bytes": "128KiB"})
    told: list[Event] = []
    with KnownWorker(server.endpoint, small_spec(4), context=server.context) as worker:
        dispatcher = worker.agent._dispatcher
        jobs: list[CopyTask] = []
        put = dispatcher.lanes.save.put
        dispatcher.lanes.save.put = lambda job: (jobs.append(job), put(job))[1]  # type: ignore[method-assign]
        run = worker.admit(worker.prompt(256))
        step = step_of(worker.agent.open_step([run.request()]))
        worker.forward(step, [run])
        step.close()
        assert eventually(lambda: len(jobs) >= 8 and len(dispatcher.lanes.save._passing) > 4)
        attachments = worker.agent.statistics().attachments
        server.call(_hang_up, server, told)
        assert worker.agent.wait_idle(run.name, 10)
        assert eventually(lambda: worker.agent.statistics().attachments > attachments)
        assert dispatcher.lanes.save._passing, "every save had passed before the new session: nothing was shown"
        for job, _ in list(dispatcher.lanes.save._passing):
            job.arrives = 0.0  # and now they have
        dispatcher.lanes.save.wake()
        worker.retire(run)
        again = worker.serve(worker.prompt(20))
        worker.serve(again.chain)
        late = {job.batch.batch for job in jobs[: len(jobs) // 2]}
        ended = [event.batch for event in told if isinstance(event, BatchDone | BatchFailed)]
        assert ended, "the second session has moved nothing"
        assert not late & set(ended)
        # What the lost session's own socket was still saying as the server hung up is a stranger's.
        assert server.server.metrics.summary().get("protocol_errors_total", {}).keys() <= {STRANGER}


def _spy(server: EmbeddedServer, told: list[Event]) -> None:
    driver = server.server.driver
    handle = driver.handle

    def spied(*events: Event) -> None:
        events = tuple(events)
        told.extend(events)
        handle(*events)

    driver.handle = spied  # type: ignore[method-assign]


def _hang_up(server: EmbeddedServer, told: list[Event]) -> None:
    """Drop the session, and keep in `told` what the driver hears from then on."""
    fd_server = server.server._fd_server
    assert fd_server is not None
    for session in server.server.sessions:
        if session.memory:
            server.server._handlers.lose(session, "test")
            for connection, token in list(fd_server._connections.items()):
                if token == session.token:
                    fd_server._forget(connection)
    _spy(server, told)
