"""Processes that die, hang and are not there: what they carried fails, the rest goes on, nothing comes back wrong."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count

import pytest
from backends.served.house import (
    PATIENCE_S,
    Served,
    attempt,
    engine,
    objects_of,
    reload,
    save,
    skip_unless,
    trusting,
)
from e2e.children import tokens_of
from e2e.known import KnownWorker, Run, eventually, small_spec, step_of
from e2e.stopping import go_on, left_over

from layerflow.agent import Step
from layerflow.keys import Chain

LAYERS, CHUNK = 5, 16
TOKENS = 6 * CHUNK + 1
HIT = TOKENS - 1
KILL, STOP, GO_ON = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT


def whole(run: Run) -> dict[int, set[int]]:
    """All blocks of a run's hit, in a model of one group."""
    return {0: set(range(-(-run.hit.tokens // 4)))}


@contextmanager
def stopped(served: Served) -> Iterator[None]:
    """The host does nothing meanwhile, and goes on afterwards unless it is dead by then."""
    host = served.signal_host(STOP)
    yield
    go_on(host)


@pytest.fixture
def tiered(kind):
    skip_unless(kind.tiered, kind, "nothing is behind the arena")
    return kind


@pytest.fixture
def bare(make_kind):
    skip_unless(make_kind.of.tiered, make_kind.of, "nothing is behind the arena")
    return make_kind


def prompts(worker: KnownWorker, number: int, tokens: int = TOKENS) -> list[Chain]:
    return [worker.prompt(tokens) for _ in range(number)]


def near_and_far(served: Served, worker: KnownWorker) -> tuple[Chain, Chain]:
    """Two saved prompts: the arena has the first, the second is only behind it."""
    near, far = prompts(worker, 2)
    save(worker, near, far)
    served.empty_arena()
    reload(worker, [near])
    return near, far


# The host -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [KILL, STOP], ids=["killed", "hung"])
def test_a_host_that_is_lost_costs_what_it_carried(tiered, start, how):
    served = start(tiered)
    with engine(served, small_spec(LAYERS)) as worker:
        near, far = near_and_far(served, worker)
        runs = [worker.admit(near), trusting(worker, far, HIT)]
        served.signal_host(STOP)
        step = worker.agent.open_step([run.request(save=False) for run in runs])
        assert served.wait(lambda tier: tier["fetching_jobs"] == 1)
        if how == KILL:
            served.signal_host(KILL)  # else it is killed for not answering
        assert worker.forward(step, runs) == 0
        reasons = {failed.reason for failed in step.failed}
        step.close()
        assert not runs[0].failed and runs[1].failed == whole(runs[1])
        assert all("the host process is gone" in reason for reason in reasons), reasons
        for run in runs:
            assert worker.agent.wait_idle(run.name, PATIENCE_S)
            worker.retire(run)
        assert served.wait(lambda tier: tier["up"] and tier["restarts"] == 1)
        served.empty_arena()
        assert [run.hit.tokens for run in reload(worker, [near, far])] == [HIT, HIT]
        served.wait_quiet()


def test_a_host_that_is_slow_costs_a_step_its_deadline(tiered, start):
    served = start(tiered)
    with engine(served, small_spec(LAYERS)) as worker:
        near, far = near_and_far(served, worker)
        runs = [worker.admit(near), trusting(worker, far, HIT)]
        with stopped(served):
            reasons = attempt(worker, runs, timeout_s=0.4)
        assert not runs[0].failed and runs[1].failed == whole(runs[1])
        assert all("deadline" in reason for reason in reasons), reasons
        served.settle()
        served.wait_quiet()
        assert served.tier["restarts"] == 0
        assert reload(worker, [far])[0].hit.tokens == HIT


def caught(served: Served, worker: KnownWorker, chain: Chain) -> tuple[Step, Run]:
    """A step whose first layer is in place, and whose last is still behind its host, which is stopped now.

    That there is such a moment is what layer-wise loading is.
    """
    for _ in range(20):
        served.empty_arena()
        run = trusting(worker, chain, len(chain) - 1)
        step = step_of(worker.agent.open_step([run.request(save=False)]))
        outcome = step.wait_layer(0)
        served.signal_host(STOP)
        assert outcome.ready
        assert worker.wrong_bytes(run, 0, 0, run.hit.tokens) == 0
        if left_over(lambda: served.tier):
            return step, run
        served.signal_host(GO_ON)
        assert worker.forward(step, [run]) == 0 and not run.failed
        step.close()
        assert worker.agent.wait_idle(run.name, PATIENCE_S)
        worker.retire(run)
    raise AssertionError("every fetch had ended when its first layer was in place")


@pytest.mark.parametrize("how", ["goes on", "killed", "lease"])
def test_a_host_stopped_between_two_layers(bare, start, how):
    skip_unless(how != "lease" or bare.of.leases, bare.of, "reading takes no lease")
    lease_s = 0.5
    kind = bare(lease_ms=int(lease_s * 1e3)) if how == "lease" else bare()
    served = start(kind, pool__size="64MiB")
    with engine(served, small_spec(16, block_size=16, chunk_tokens=64, row=1024), blocks=128) as worker:
        chain, other = worker.prompt(641), worker.prompt(65)
        save(worker, chain, other)
        step, run = caught(served, worker, chain)
        if how == "lease":
            threading.Event().wait(2 * lease_s)  # what is tested is that this time has passed
        served.signal_host(KILL if how == "killed" else GO_ON)
        assert worker.forward(step, [run]) == 0
        reasons = {failed.reason for failed in step.failed}
        step.close()
        assert worker.agent.wait_idle(run.name, PATIENCE_S)
        worker.retire(run)
        if how == "goes on":
            assert not run.failed
        else:
            assert run.failed == {0: set(range(40))}
            expected = "the host process is gone" if how == "killed" else "lease"
            assert all(expected in reason for reason in reasons), reasons
        served.wait_up()
        served.settle()
        served.empty_arena()
        assert reload(worker, [other])[0].hit.tokens == 64, "others load as ever"
        if how == "lease":
            assert served.look(worker.spec, chain) == 0, "an object that could not be read is not offered again at once"
            save(worker, chain)  # until it was computed again
            served.empty_arena()
        assert reload(worker, [chain])[0].hit.tokens == 640
        served.wait_quiet()


def test_a_host_killed_under_saves(tiered, start):
    served = start(tiered)
    with engine(served, small_spec(LAYERS)) as worker:
        before, during, after = prompts(worker, 3)
        save(worker, before)
        served.settle()
        with stopped(served):
            save(worker, during)
            assert served.tier["writing_jobs"] == 1
            served.signal_host(KILL)
            # The arena has it all the same.
            assert reload(worker, [during])[0].hit.tokens == HIT
        tier = served.wait(lambda tier: tier["up"] and tier["restarts"] == 1)
        assert tier["failures"] == {"write_failed": objects_of(worker.spec, TOKENS)}
        assert tier["writing_jobs"] == tier["backlog_bytes"] == 0
        save(worker, after)
        served.empty_arena()
        hits = [run.hit.tokens for run in reload(worker, [before, during, after])]
        assert hits == [HIT, 0, HIT]
        served.wait_quiet()


def test_hosts_killed_under_load(tiered, start):
    """The short form; campaigns kill dozens."""
    served = start(tiered, pool__size="1MiB", pool__lease_ms=500)
    spec = small_spec(LAYERS, window=40)
    stop, steps, kills = threading.Event(), count(), 3
    done: list[int] = []
    reasons: set[str] = set()

    def work(number: int) -> None:
        with engine(served, spec, name=f"engine-{number}") as worker:
            chains = [worker.agent.chain(tokens_of(seed, 150)) for seed in range(12)]
            for at in count(number):
                if stop.is_set():
                    return
                runs = [worker.admit(chains[(at * step) % len(chains)]) for step in (1, 5)]
                reasons.update(attempt(worker, runs, save=True))
                for run in runs:
                    worker.retire(run)
                done.append(next(steps))

    with ThreadPoolExecutor() as threads:
        working = [threads.submit(work, number) for number in range(2)]
        try:
            for kill in range(kills):
                served.wait(lambda tier, kill=kill: tier["up"] and tier["restarts"] == kill)
                goal = len(done) + 15
                assert eventually(lambda goal=goal: len(done) >= goal or any(one.done() for one in working), PATIENCE_S)
                served.signal_host(KILL)
        finally:
            stop.set()
        for one in working:
            one.result()
    assert all("the host process is gone" in reason or "no longer in the pool" in reason for reason in reasons), reasons
    served.wait(lambda tier: tier["up"] and tier["restarts"] == kills)
    with engine(served, spec) as worker:
        chain = worker.prompt(150)
        save(worker, chain)
        served.empty_arena()
        assert reload(worker, [chain])[0].hit.tokens == 149
    served.wait_quiet()


# What is behind it --------------------------------------------------------------------------------


def test_what_is_not_there_at_the_start_is_used_once_it_appears(bare, start):
    kind = bare(absent=True)
    served = start(kind, wait=False)
    with engine(served, small_spec(LAYERS)) as worker:
        early, late = prompts(worker, 2)
        tier = served.wait(lambda tier: tier["host"]["state"] == "down")
        assert not tier["up"] and tier["reason"], tier
        save(worker, early)
        assert worker.serve(early).hit.tokens == HIT, "the arena serves"
        assert not served.tier["writing_jobs"]
        kind.mend()
        served.wait_up()
        assert eventually(lambda: attempt_to_save(served, worker, late), PATIENCE_S, 0.1)
        served.empty_arena()
        assert [run.hit.tokens for run in reload(worker, [early, late])] == [0, HIT]


def test_what_goes_away_and_comes_back(tiered, start):
    served = start(tiered)
    with engine(served, small_spec(LAYERS)) as worker:
        before, during, after = prompts(worker, 3)
        save(worker, before)
        served.settle()
        tiered.cut()
        assert served.wait(lambda tier: not tier["up"])["reason"]
        save(worker, during)
        assert [run.hit.tokens for run in reload(worker, [before, during])] == [HIT, HIT], "the arena serves"
        served.control.purge(PATIENCE_S)
        assert reload(worker, [before])[0].hit.tokens == 0
        tiered.mend()
        served.wait_up()
        assert eventually(lambda: attempt_to_save(served, worker, after), PATIENCE_S, 0.1)
        served.empty_arena()
        hits = [run.hit.tokens for run in reload(worker, [before, during, after])]
        assert hits[1:] == [0, HIT]
        assert hits[0] in {True: [HIT], False: [0], None: [0, HIT]}[tiered.keeps]
        served.wait_quiet()


def attempt_to_save(served: Served, worker: KnownWorker, chain: Chain) -> bool:
    """Save; whether it is in the tier. What gives it memory may come back later than what answers for it."""
    save(worker, chain)
    served.empty_arena()
    return served.look(worker.spec, chain) == len(chain) - 1


def test_loads_under_way_when_it_goes_away_end(tiered, start):
    served = start(tiered, pool__host_timeout_ms=1000)
    with engine(served, small_spec(LAYERS)) as worker:
        chain, other = prompts(worker, 2)
        save(worker, chain)
        served.empty_arena()
        tiered.cut()
        run = trusting(worker, chain, HIT)
        reasons = attempt(worker, [run], timeout_s=3)
        assert run.failed == whole(run) and reasons
        worker.retire(run)
        save(worker, other)
        assert reload(worker, [other])[0].hit.tokens == HIT
        served.settle()
        served.wait_quiet()


# The server ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cleanly", [True, False], ids=["stopped", "killed"])
def test_a_server_that_starts_again_finds_what_it_had(tiered, start, cleanly):
    served = start(tiered)
    with engine(served, small_spec(LAYERS, window=40)) as worker:
        chains = prompts(worker, 4)
        save(worker, *chains)
        if not cleanly:
            served.settle()
            served.process.kill()
        else:
            served.signal(signal.SIGTERM)  # waits for what is not written yet
            assert served.process.process.wait(PATIENCE_S) == 0
        assert eventually(lambda: not worker.agent.attached, PATIENCE_S)
        run = trusting(worker, chains[0], HIT)
        assert attempt(worker, [run]) and run.failed, "while nobody is there loads fail, at once"
        worker.retire(run)
        served.process.restart()
        assert worker.agent.wait_attached(PATIENCE_S)
        served.wait_up()
        assert [run.hit.tokens for run in reload(worker, chains)] == [HIT] * len(chains)
        if tiered.indexed:
            assert served.tier["details"]["objects"] == len(chains) * objects_of(worker.spec, TOKENS)


def test_a_server_killed_under_saves_leaves_nothing_half_written(tiered, start):
    served = start(tiered)
    with engine(served, small_spec(LAYERS)) as worker:
        whole_one, half = prompts(worker, 2)
        save(worker, whole_one)
        served.settle()
        run = worker.admit(half)
        step = worker.agent.open_step([run.request()])
        for layer in range(LAYERS - 1):
            worker.compute(run, layer, 0, TOKENS)
            step.layer_done(layer)
        assert served.wait(lambda tier: tier["writing_jobs"] == 1)
        served.process.kill()
        step.close()
        assert worker.agent.wait_idle(run.name, PATIENCE_S)
        served.process.restart()
        assert worker.agent.wait_attached(PATIENCE_S)
        served.wait_up()
        assert [run.hit.tokens for run in reload(worker, [whole_one, half])] == [HIT, 0]
        if tiered.indexed:
            assert served.tier["indexed_objects"] == objects_of(worker.spec, TOKENS)


def test_another_server_outlives_one_that_is_killed(tiered, start):
    skip_unless(tiered.shared, tiered, "every server has its own")
    one, two = start(tiered), start(tiered)
    spec = small_spec(LAYERS)
    with engine(one, spec) as first, engine(two, spec) as second:
        chains = prompts(first, 3)
        save(first, *chains)
        one.settle()
        one.process.kill()
        assert [run.hit.tokens for run in reload(second, chains)] == [HIT] * 3
        more = second.prompt(300)
        save(second, more)
        two.empty_arena()
        assert reload(second, [more, *chains])[0].hit.tokens == 299


def test_a_server_stopped_in_mid_load_goes_on(tiered, start):
    served = start(tiered, transfer__step_timeout_ms=500)
    with engine(served, small_spec(LAYERS), lookup_s=0.5) as worker:
        near, far = near_and_far(served, worker)
        with stopped(served):
            runs = [trusting(worker, near, HIT), trusting(worker, far, HIT)]
            step = worker.agent.open_step([run.request(save=False) for run in runs])
            served.wait(lambda tier: tier["fetching_jobs"] == 1)
            served.signal(STOP)
            assert worker.forward(step, runs) == 0
            step.close(False)
            assert runs[1].failed == whole(runs[1])
            assert not runs[0].failed or runs[0].failed == whole(runs[0])
            assert worker.agent.lookup("while-stopped", near).tokens == 0
            served.signal(GO_ON)
        for run in runs:
            assert worker.agent.wait_idle(run.name, PATIENCE_S)
            worker.retire(run)
        served.settle()
        assert eventually(lambda: worker.agent.lookup("again", far).tokens == HIT, PATIENCE_S, 0.1)
        assert reload(worker, [near, far])[1].hit.tokens == HIT
        worker.agent.drop_lease("again")
        served.wait_quiet()
