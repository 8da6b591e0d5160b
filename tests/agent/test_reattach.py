"""Another server, the same numbers: what the last one granted is never reported to the next."""

from __future__ import annotations

from collections.abc import Callable

from e2e.known import KnownWorker, eventually, small_spec, step_of

from layerflow.agent.lanes import Job
from layerflow.agent.link import News
from layerflow.server import EmbeddedServer


def test_a_batch_is_reported_to_the_server_that_granted_it(embed: Callable[..., EmbeddedServer]) -> None:
    """Batches wait on a slow link while the agent loses the server and attaches again (its hang-up is forced)."""
    server = embed(pool__link_gbps=0.002, transfer={"max_transfer_bytes": "4KiB", "max_inflight_bytes": "64KiB"})
    with KnownWorker(server.endpoint, small_spec(4), context=server.context) as worker:
        inbox = worker.agent._inbox
        chain = worker.prompt(256)
        worker.serve(chain)
        jobs: list[Job] = []
        put = inbox._load_lane.put
        inbox._load_lane.put = lambda job: (jobs.append(job), put(job))[1]  # type: ignore[method-assign]
        run = worker.admit(chain)
        step = step_of(worker.agent.open_step([run.request()], 30))
        assert eventually(lambda: jobs)
        granted: News = jobs[-1].news
        attachments = worker.agent.statistics().attachments
        server.call(_hang_up, server)
        assert not step.wait_all().ready
        step.close(False)
        assert eventually(lambda: worker.agent.statistics().attachments > attachments)
        assert inbox.link is not None and inbox.link.news is not granted
        late = [job for job in jobs if job.news is granted]
        assert late
        # Whatever became of them: none is in what the new server hears.
        numbers = {job.batch.batch for job in late}
        heard = {*inbox.link.news.done, *(failure.batch for failure in inbox.link.news.failed)}
        assert not numbers & heard
        assert worker.agent.wait_idle(run.name, 10)
        worker.retire(run)
        assert worker.serve(chain).hit.tokens == 255
        assert server.server.metrics.summary().get("protocol_errors_total", {}) == {}


def _hang_up(server: EmbeddedServer) -> None:
    doorway = server.server._doorway
    assert doorway is not None
    for session in server.server.sessions:
        if session.memory:
            server.server._handlers.lose(session, "test")
            doorway.dismiss(session.token)
