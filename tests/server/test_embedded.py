"""Embedded mode: the same server on a thread of the engine's process."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import pytest
from e2e.known import KnownWorker, eventually, layerflow_threads, open_fds, small_spec
from e2e.stopping import stop

from layerflow.agent import Control
from layerflow.config.settings import Settings
from layerflow.errors import DeadlineExceeded, LayerflowError
from layerflow.server import EmbeddedServer
from layerflow.server.tier import host
from layerflow.spec import Shard
from server.support import Embed, observe, worker_on


def test_saves_and_loads(embed: Embed) -> None:
    with worker_on(embed()) as worker:
        chain = worker.prompt(100)
        assert worker.serve(chain).hit.tokens == 0
        assert worker.serve(chain).hit.tokens == 99
        longer = worker.prompt(160, like=chain, shared=100)
        assert worker.serve(longer).hit.tokens == 100
        other = worker.prompt(160, like=chain, shared=50)
        assert worker.serve(other).hit.tokens == 48


def test_twenty_lives_leave_nothing_behind() -> None:
    def live() -> None:
        with EmbeddedServer(Settings(pool={"size": "4MiB"})) as server, worker_on(server, blocks=64) as worker:
            chain = worker.prompt(60)
            worker.serve(chain)
            assert worker.serve(chain).hit.tokens == 59

    live()
    gc.collect()
    threads, fds = Counter(layerflow_threads()), open_fds()
    for _ in range(20):
        live()
    gc.collect()
    # What earlier tests have left may end meanwhile.
    assert eventually(lambda: not Counter(layerflow_threads()) - threads), f"{layerflow_threads()}, before {threads}"
    assert eventually(lambda: not open_fds() - fds), f"{open_fds()} where there was {fds}"


def test_an_agent_may_come_before_its_server(embed: Embed) -> None:
    server = embed()
    endpoint, context = server.endpoint, server.context
    # No server yet at this name: the agent works, every lookup misses, nothing is saved.
    with KnownWorker(endpoint + "-later", context=context, wait_s=0) as worker:
        chain = worker.prompt(60)
        assert not worker.agent.attached
        assert worker.serve(chain).hit.tokens == 0
        assert worker.agent.lookup("nobody", chain).tokens == 0


@pytest.mark.parametrize("agent_first", [True, False])
def test_the_server_ends_before_its_agent(agent_first: bool) -> None:
    server = EmbeddedServer(Settings(pool={"size": "4MiB"}, server={"drain_timeout_s": 0.1}))
    worker = worker_on(server)
    chain = worker.prompt(60)
    worker.serve(chain)
    if agent_first:
        worker.agent.close()
        server.close()
        return
    server.close()
    assert eventually(lambda: not worker.agent.attached)
    assert worker.agent.lookup("late", chain).tokens == 0
    run = worker.admit(chain)
    with worker.agent.open_step([run.request()]) as step:
        assert worker.forward(step, [run]) == 0
    assert not worker.agent.busy(run.name)
    worker.agent.close()


def test_a_server_whose_host_sigkill_does_not_end_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an uninterruptible call of a disk's driver; the error says what still holds the arena's memory."""
    monkeypatch.setattr(host, "KILL_S", 0.1)
    monkeypatch.setattr(host, "DEATH_S", 0.1)
    disk = {"path": str(tmp_path), "capacity": "4MiB"}
    server = EmbeddedServer(Settings(pool={"size": "4MiB", "disk": disk}, server={"drain_timeout_s": 0.1}))
    tier = lambda: server.call(server.server.status)["tier"]  # type: ignore[index] # noqa: E731
    assert eventually(lambda: tier()["up"])
    stop(server.server.tier._host.state.pid)  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        patch.setattr("os.killpg", lambda group, number: None)
        server.close()
    assert isinstance(server._failure, DeadlineExceeded)
    assert "host process was killed and does not die" in str(server._failure)


def test_closing_an_agent_cuts_its_steps_off(embed: Embed) -> None:
    """Slow links, open steps: closing waits for neither, and the server takes everything back."""
    server = embed(pool__link_gbps=5e-7)  # 100 s for what is saved: it is under way whenever this thread goes on
    control = Control(server.endpoint, "observer", context=server.context)
    worker = worker_on(server)
    run = worker.admit(worker.prompt(200))
    step = worker.agent.open_step([run.request()], 600)
    assert worker.forward(step, [run]) == 0
    assert worker.agent.busy(run.name)
    worker.agent.close()
    assert not worker.agent.busy(run.name)
    step.close()
    worker.agent.close()

    def back() -> bool:
        status = control.status()
        return status["pool"]["half_written"] == 0 and status["flow"]["steps"] == 0

    assert eventually(back), control.status()
    control.close()


def test_two_ranks_make_one_hit(embed: Embed) -> None:
    """A lookup counts a chunk only when every tensor-parallel rank has stored its shard of it."""
    server = embed()
    ranks = [worker_on(server, spec=small_spec(shard=Shard(rank, 2))) for rank in range(2)]
    chain = ranks[0].prompt(60)
    assert ranks[0].serve(chain).hit.tokens == 0
    assert ranks[0].serve(chain).hit.tokens == 0, "a hit although rank 1 has stored nothing"
    assert ranks[1].agent.lookup("look", chain).tokens == 0
    assert ranks[1].serve(chain).hit.tokens == 0
    for rank in ranks:
        assert rank.serve(chain).hit.tokens == 59
        rank.agent.close()


def test_control_clients_say_goodbye(embed: Embed) -> None:
    """Whoever only asks for the status, again and again, leaves no session behind."""
    server = embed()
    first = observe(server)
    for _ in range(5):
        other = observe(server)
        other.status()
        other.close()
    assert eventually(lambda: len(first.status()["sessions"]) == 1)
    first.close()


def test_a_control_client_outlives_its_server() -> None:
    """Every call says so with a LayerflowError, or misses; none hangs, and closing works."""
    server = EmbeddedServer(Settings(pool={"size": "4MiB"}))
    control = Control(server.endpoint, "observer", small_spec(), context=server.context)
    with worker_on(server) as worker:
        chain = worker.prompt(20)
        assert control.lookup("before", chain).tokens == 0
    server.close()
    assert control.lookup("after", chain).tokens == 0
    control.drop_lease("after")
    with pytest.raises(LayerflowError):
        control.status(0.2)
    with pytest.raises(LayerflowError):
        control.purge(0.2)
    assert not control.connect(0.2)
    control.close()


def test_status_says_why_what_is_behind_the_arena_has_not_started(tmp_path: Path) -> None:
    nothing = {"cann_emulator": str(tmp_path / "nothing")}
    settings = Settings(pool={"size": "4MiB", "backend": "memcache", "memcache": nothing})
    with EmbeddedServer(settings, f"ipc://{tmp_path}/control") as server:

        def reason() -> str:
            return server.call(server.server.status)["tier"]["reason"]

        assert eventually(lambda: "has neither lib64/libascendcl.so nor build.sh" in reason()), reason()
