"""A hand-off that another server keeps: its layers arrive in the reader's engine while they are being stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from e2e.known import KnownWorker, Run, eventually, small_spec, step_of

from layerflow.agent import Control, Follow
from layerflow.agent.client import Inquiry
from layerflow.agent.lookups import Lookups
from layerflow.keys import Chain
from peers.conftest import LINKS, Pair

pytestmark = pytest.mark.parametrize("link", LINKS)
TOKENS = 100  # six chunks of 16 and a tail of 4
SPEC = small_spec(4)


class Ends:
    """P at the owner and D at the reader, with their schedulers."""

    def __init__(self, two: Pair, p: KnownWorker, d: KnownWorker) -> None:
        self.two, self.p, self.d = two, p, d
        self.p_control = Control(two.owner.endpoint, "p", p.spec, lookup_timeout_s=5.0)
        self.d_lookups = Lookups(two.reader.endpoint, "d", d.spec, timeout_s=5.0)
        assert self.d_lookups.wait_connected(5)

    def ask(self, name: str, chain: Chain, within_s: float = 20.0) -> Inquiry:
        follow = Follow(time.monotonic() + within_s, name, (self.two.owner.endpoint,))
        return self.d_lookups.ask(f"D-{name}", chain, follow)

    def computing(self, chain: Chain) -> tuple[Run, object]:
        """P's step over all of the prompt, open and not a layer computed."""
        run = self.p.admit(chain, look=False)
        return run, self.p.agent.open_step([run.request()])

    def compute(self, run: Run, step: object, layers: range) -> None:
        for layer in layers:
            opened = step_of(step)
            opened.wait_layer(layer)
            self.p.compute(run, layer, 0, len(run.chain))
            opened.layer_done(layer)

    def loading(self, name: str, chain: Chain, timeout_s: float = 20.0) -> tuple[Run, object]:
        """D's step that loads what the hand-off has and will have."""
        hit = self.d_lookups.wait(self.ask(name, chain), 10.0)
        assert hit is not None and hit.following and hit.tokens == len(chain) - 1, hit
        run = self.d.admit(chain, look=False)
        run = Run(f"D-{name}", chain, hit, run.tables)
        return run, self.d.agent.open_step([run.request(save=False)], timeout_s)

    def loaded(self, run: Run, step: object, layer: int) -> int:
        """Wait for a layer; its wrong bytes."""
        self.d.note([run], step_of(step).wait_layer(layer))
        return 0 if run.failed else self.d.wrong_bytes(run, layer, 0, run.hit.tokens)

    def close(self) -> None:
        self.d_lookups.close()
        self.p_control.close()


@pytest.fixture
def ends(pair: Callable[..., Pair]) -> Iterator[Ends]:
    two = pair()
    with two.workers(SPEC) as (p, d):
        made = Ends(two, p, d)
        yield made
        made.close()


def test_layers_arrive_as_they_are_stored(ends: Ends) -> None:
    chain = ends.p.prompt(TOKENS)
    assert ends.p_control.open_handoff("h", chain, len(chain))
    # D asks before a step of P saves anything: room is promised, and taken over by the step.
    drun, dstep = ends.loading("h", ends.d.agent.chain(chain.tokens))
    prun, pstep = ends.computing(chain)
    for layer in range(3):
        ends.compute(prun, pstep, range(layer, layer + 1))
        assert ends.loaded(drun, dstep, layer) == 0 and not drun.failed
    assert not step_of(dstep).is_ready(3)
    ends.compute(prun, pstep, range(3, 4))
    step_of(pstep).close()
    ends.p_control.end_handoff("h", tokens=TOKENS)
    assert ends.loaded(drun, dstep, 3) == 0 and not drun.failed
    step_of(dstep).close()
    assert ends.p.agent.wait_idle(prun.name, 20)
    ends.p_control.release_handoff("h")
    ends.d_lookups.drop_lease("D-h")
    assert eventually(ends.two.settled), (ends.two.lends, ends.two.reads)


def test_who_asks_before_it_is_opened_waits(ends: Ends) -> None:
    chain = ends.p.prompt(TOKENS)
    inquiry = ends.ask("h", ends.d.agent.chain(chain.tokens))
    assert ends.d_lookups.wait(inquiry, 0.0) is None
    assert ends.p_control.open_handoff("h", chain, len(chain))
    ends.p.serve(chain, look=False)
    ends.p_control.end_handoff("h", tokens=TOKENS)
    hit = ends.d_lookups.wait(inquiry, 10.0)
    assert hit is not None and hit.tokens == TOKENS - 1


def test_one_that_nobody_opens_ends_at_the_readers_deadline(ends: Ends) -> None:
    hit = ends.d_lookups.wait(ends.ask("h", ends.p.prompt(TOKENS), within_s=0.3), 10.0)
    assert hit is not None and (hit.tokens, hit.following) == (0, False)
    assert hit.reason


def test_a_prefill_that_fails_fails_what_has_not_come_at_once(ends: Ends) -> None:
    chain = ends.p.prompt(TOKENS)
    assert ends.p_control.open_handoff("h", chain, len(chain))
    drun, dstep = ends.loading("h", ends.d.agent.chain(chain.tokens))
    prun, pstep = ends.computing(chain)
    ends.compute(prun, pstep, range(2))
    assert ends.loaded(drun, dstep, 0) == 0 and not drun.failed
    ends.p_control.end_handoff("h", tokens=0, reason="the request was preempted")
    step_of(pstep).close(ok=False)
    ends.loaded(drun, dstep, 3)
    assert drun.failed
    step_of(dstep).close()
    ends.d_lookups.drop_lease("D-h")
    assert eventually(ends.two.settled), (ends.two.lends, ends.two.reads)
