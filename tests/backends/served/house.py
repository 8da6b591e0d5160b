"""A running server with what is behind it, and what tests ask of both."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from backends.served.kinds import Kind
from e2e.known import AFTER, KnownWorker, Run, eventually
from e2e.stopping import stop

from layerflow.agent import Control, Hit, LoadResult
from layerflow.keys import Chain
from layerflow.spec import ModelSpec
from layerflow_cli.bench.harness import ServerProcess

PATIENCE_S = 30.0
LOOKUP_S = 5.0
PATIENT = {"pool.lookup_timeout_ms": 4000, "transfer.step_timeout_ms": 20_000, "pool.lease_ms": 1500}
"""So that a machine with other work to do decides nothing."""


class Served:
    """A ``layerflow run`` of its own.

    :param settings: by dotted key, before those of `kind`.
    """

    def __init__(self, kind: Kind, settings: dict[str, object], *, wait: bool = True) -> None:
        self.kind = kind
        self.process = ServerProcess(
            {"pool.size": "16MiB", "log.level": "warning"} | PATIENT | kind.settings() | settings
        )
        self.control = Control(self.process.endpoint, "observer")
        self._looks = 0
        self._lookers: dict[ModelSpec, Control] = {}
        if wait:
            self.wait_up()

    @property
    def endpoint(self) -> str:
        return self.process.endpoint

    @property
    def pid(self) -> int:
        return self.process.process.pid

    def close(self) -> None:
        """At once: some backends take seconds to leave."""
        for control in (self.control, *self._lookers.values()):
            control.close()
        self.process.kill()
        self.process.close()

    # -- looking ----------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        return self.control.status(10)

    @property
    def tier(self) -> dict[str, Any]:
        tier = self.status()["tier"]
        assert isinstance(tier, dict), "nothing is behind this server"
        return tier

    def wait_up(self) -> None:
        if self.kind.tiered:
            self.wait(lambda tier: tier["up"])

    def wait(self, condition: Any) -> dict[str, Any]:
        """Until it holds of the tier's status, which is returned."""
        seen: list[dict[str, Any]] = []

        def holds() -> bool:
            seen[:] = [self.tier]
            return bool(condition(seen[0]))

        assert eventually(holds, PATIENCE_S, 0.01), seen
        return seen[0]

    def settle(self) -> None:
        """Until nothing is on its way between arena and tier."""
        if self.kind.tiered:
            self.wait(lambda tier: not (tier["writing_jobs"] or tier["fetching_jobs"] or tier["backlog_bytes"]))

    def quiet(self) -> bool:
        """Does nobody hold anything of the arena?"""
        status = self.status()
        held = [status["pool"][name] for name in ("half_written", "pinned")]
        flow = status["flow"]
        return not any([*held, flow["steps"], flow["unsaved_bytes"]])

    def wait_quiet(self) -> None:
        assert eventually(self.quiet, PATIENCE_S, 0.01), self.status()

    def look(self, spec: ModelSpec, chain: Chain) -> int:
        """Tokens that a scheduler would be told of; it does not load them."""
        if spec not in self._lookers:
            self._lookers[spec] = Control(
                self.endpoint, f"looker-{len(self._lookers)}", spec, lookup_timeout_s=LOOKUP_S
            )
        self._looks += 1
        name = f"look-{self._looks}"
        tokens = self._lookers[spec].lookup(name, chain).tokens
        self._lookers[spec].drop_lease(name)
        return tokens

    def empty_arena(self) -> None:
        """What is behind it is all there is from now on; where there is nothing, all stays."""
        if self.kind.tiered:
            self.settle()
            self.control.purge(10)

    # -- breaking ---------------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        """To the server."""
        tell(self.pid, number)

    def signal_host(self, number: signal.Signals) -> int:
        """To its host process, whose number is returned."""
        pid = int(self.tier["host"]["pid"])
        assert pid, "there is no host process"
        tell(pid, number)
        return pid


def tell(pid: int, number: signal.Signals) -> None:
    """A process that is told to stop has stopped afterwards."""
    if number == signal.SIGSTOP:
        stop(pid)
    else:
        os.kill(pid, number)


def engine(
    served: Served, spec: ModelSpec, blocks: int = 512, name: str = "engine", lookup_s: float = LOOKUP_S
) -> KnownWorker:
    """An engine worker that has time."""
    worker = KnownWorker(served.endpoint, spec, blocks, name, lookup_timeout_s=lookup_s)
    assert worker.agent.attached
    return worker


def reload(worker: KnownWorker, chains: Sequence[Chain]) -> list[Run]:
    """Load what there is of these prompts, in one step, and compare every byte; nothing fails, nothing is saved."""
    runs = [worker.admit(chain) for chain in chains]
    with worker.agent.open_step([run.request(save=False) for run in runs]) as step:
        wrong = worker.forward(step, runs)
    assert wrong == 0, f"{wrong} wrong bytes"
    assert not any(run.failed for run in runs), [run.failed for run in runs]
    for run in runs:
        assert worker.agent.wait_idle(run.name, PATIENCE_S)
        worker.retire(run)
    return runs


def attempt(
    worker: KnownWorker,
    runs: Sequence[Run],
    *,
    timeout_s: float | None = None,
    on_layer: Callable[[int, LoadResult], None] | None = None,
    save: bool = False,
) -> set[str]:
    """One step over admitted requests, in which anything may fail; why something did.

    :raises AssertionError: a wrong byte in what has not failed, a late write to what has, or a step without end.
    """
    with worker.agent.open_step([run.request(save=save) for run in runs], timeout_s) as step:
        wrong = worker.forward(step, runs, on_layer)
        failed = step.failed
    assert wrong == 0, f"{wrong} wrong bytes"
    lost = [(run, group, blocks) for run in runs for group, blocks in run.failed.items()]
    for run, group, blocks in lost:
        for layer in worker.spec.groups[group].layers:
            worker.fill(run, layer, sorted(blocks), AFTER)
    for run in runs:
        assert worker.agent.wait_idle(run.name, PATIENCE_S), "the step never ended"
    for run, group, blocks in lost:
        for layer in worker.spec.groups[group].layers:
            assert not worker.changed_bytes(run, layer, blocks, AFTER), "written after its load had failed"
    return {one.reason for one in failed}


def save(worker: KnownWorker, *chains: Chain) -> None:
    """Each prompt in a step of its own."""
    for chain in chains:
        run = worker.serve(chain, look=False)
        ended = worker.agent.poll()
        assert run.name in ended.saved, ended


def trusting(worker: KnownWorker, chain: Chain, tokens: int) -> Run:
    """A request that was told of this hit a moment ago: nothing is asked, nor fetched before its step opens."""
    run = worker.admit(chain, look=False)
    run.hit = Hit(tokens)
    return run


def objects_of(spec: ModelSpec, tokens: int) -> int:
    """Chunks, partial ones included, times groups."""
    return -(-tokens // spec.chunk_tokens) * len(spec.groups)


def skip_unless(has: bool, kind: Kind, why: str) -> None:
    if not has:
        pytest.skip(f"{kind.name}: {why}")
