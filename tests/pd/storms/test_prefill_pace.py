"""A prefiller never waits for a decoder: what it gets done while that is stopped, beside one that nobody reads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
from e2e.children import Child, follow_all, tokens_of
from e2e.known import KnownWorker, small_spec
from e2e.rounds import record
from e2e.stopping import go_on, stop

from layerflow.agent import Control
from layerflow_cli.bench.harness import ServerProcess

LAYERS, TOKENS, PENDING = 8, 300, 50
SETTINGS = {
    "pool__size": "64MiB",
    "transfer__max_transfer_bytes": "64KiB",
    "transfer__max_inflight_bytes": "256KiB",
    "transfer__step_timeout_ms": 120_000,
    "pd__handoff_share": 0.5,
    "pd__handoff_lease_s": 120.0,
}


class Prefiller:
    """An engine worker and its scheduler, at a server of its own."""

    def __init__(self, server: ServerProcess) -> None:
        self.server, spec = server, small_spec(LAYERS)
        self.worker = KnownWorker(server.endpoint, spec, engine="P", lookup_timeout_s=20.0)
        self.control = Control(server.endpoint, "P", spec, lookup_timeout_s=20.0)
        self.took: list[float] = []

    def open(self, seed: int) -> None:
        chain = self.worker.agent.chain(tokens_of(seed, TOKENS))
        assert self.control.open_handoff(f"h{seed}", chain, TOKENS, timeout_s=300.0)

    def serve(self, seed: int, layer_s: float, *, opened: bool) -> None:
        """Open a hand-off, if that was not done, compute the prompt, and end it when all is stored."""
        chain = self.worker.agent.chain(tokens_of(seed, TOKENS))
        began = time.perf_counter()
        if not opened:
            self.open(seed)
        run = self.worker.admit(chain, look=False)
        with self.worker.agent.open_step([run.request()]) as step:
            self.worker.forward(step, [run], lambda *_: time.sleep(layer_s))
        assert self.worker.agent.wait_idle(run.name, 20), "the step never ended"
        assert run.name in self.worker.agent.poll().saved, "not stored"
        self.worker.retire(run)
        self.control.end_handoff(f"h{seed}", tokens=TOKENS)
        self.took.append(time.perf_counter() - began)

    def close(self) -> None:
        self.control.close()
        self.worker.agent.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("layer_s", "seconds"),
    [
        (0.0, 0.5),
        pytest.param(0.0, 30.0, marks=pytest.mark.campaign),
        pytest.param(0.005, 30.0, marks=pytest.mark.campaign),
    ],
)
def test_a_stopped_decoder_with_50_hand_offs_pending(
    serve: Callable[..., ServerProcess], layer_s: float, seconds: float
) -> None:
    """In turns, prompt by prompt, on two servers of one kind; the figure is recorded, and everything is stored.

    :param layer_s: what a layer takes to compute; at 0 all of the time is what saves and hand-offs cost.
    """
    read, unread = (Prefiller(serve(**SETTINGS)) for _ in range(2))
    pending = list(range(PENDING))
    for each in (read, unread):
        for seed in pending:
            each.open(seed)
    child = Child(follow_all, read.server.endpoint, LAYERS, TOKENS, pending)
    assert child.hear(60.0) == [TOKENS - 1] * PENDING
    assert child.process.pid is not None
    stop(child.process.pid)
    began, served = time.monotonic(), 0
    while served < PENDING or time.monotonic() - began < seconds:
        for each in (read, unread) if served % 2 else (unread, read):
            each.serve(served, layer_s, opened=served < PENDING)
        served += 1
    flow = read.control.status()["flow"]
    assert flow["loaded_bytes"] == 0 and flow["load_inflight_bytes"] > 0, "the decoder was not stopped"
    go_on(child.process.pid)
    throughput = statistics.median(one / other for one, other in zip(unread.took, read.took, strict=True))
    record(
        "prefill_pace",
        layer_s=layer_s,
        prompts=served,
        of_unread=round(throughput, 4),
        sums=[sum(read.took), sum(unread.took)],
    )
    child.pipe.send("go on")
    wrong, _ = child.hear(60.0)
    assert wrong == 0
    child.close()
    read.close()
    unread.close()
