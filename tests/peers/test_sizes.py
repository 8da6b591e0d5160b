"""P and D of different tensor and pipeline sizes, each with its server: every byte arrives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from e2e.known import eventually
from e2e.partitions import TOKENS, everyone, leave

from layerflow.agent import Control, Follow
from layerflow.agent.client import Inquiry
from layerflow.agent.lookups import Lookups
from layerflow.agent.values import Hit, StepRequest
from layerflow.keys import Chain
from peers.conftest import Pair

Partition = tuple[int, tuple[int, ...]]
SIZES: list[tuple[Partition, Partition]] = [
    ((2, (6,)), (1, (6,))),
    ((1, (6,)), (2, (6,))),
    ((3, (6,)), (2, (6,))),
    ((1, (2, 4)), (1, (6,))),
    ((2, (6,)), (3, (1, 3, 2))),
]
NAMES = [f"tp{p[0]}pp{len(p[1])}-to-tp{d[0]}pp{len(d[1])}" for p, d in SIZES]


class Sizes:
    """The workers of P at the owner and of D at the reader, with their schedulers."""

    def __init__(self, two: Pair, p: Partition, d: Partition, content: str = "c") -> None:
        self.two = two
        self.p, self.d = everyone(two.owner.endpoint, *p), everyone(two.reader.endpoint, *d, content)
        self.p_control = Control(two.owner.endpoint, engine_of(p), self.p[0].spec, lookup_timeout_s=5.0)
        self.d_lookups = Lookups(two.reader.endpoint, engine_of(d), self.d[0].spec, timeout_s=5.0)
        assert self.d_lookups.wait_connected(5)
        self.chain: Chain = self.p[0].agent.chain(np.arange(TOKENS))

    def open(self, name: str) -> None:
        assert self.p_control.open_handoff(name, self.chain, TOKENS)

    def ask(self, name: str, within_s: float = 20.0) -> Inquiry:
        follow = Follow(time.monotonic() + within_s, name, (self.two.owner.endpoint,))
        return self.d_lookups.ask(f"D-{name}", self.chain, follow)

    def load(self, name: str, hit: Hit) -> None:
        for rank in self.d:
            rank.run(f"D-{name}", self.chain, hit, save=False)
            rank.check(hit.tokens)

    def close(self) -> None:
        self.d_lookups.close()
        self.p_control.close()
        leave([*self.p, *self.d])


def engine_of(partition: Partition) -> str:
    return f"tp{partition[0]}pp{len(partition[1])}"


@pytest.fixture
def sizes(pair: Callable[..., Pair]) -> Iterator[Callable[[Partition, Partition], Sizes]]:
    made: list[Sizes] = []

    def start(p: Partition, d: Partition, content: str = "c") -> Sizes:
        made.append(Sizes(pair(), p, d, content))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.mark.parametrize(("p", "d"), SIZES, ids=NAMES)
def test_a_handoff_between_sizes(sizes: Callable[..., Sizes], p: Partition, d: Partition) -> None:
    """D asks before anything is stored."""
    ends = sizes(p, d)
    ends.open("h")
    inquiry = ends.ask("h")
    assert ends.d_lookups.wait(inquiry, 0.0) is None
    for rank in ends.p:
        rank.run("w", ends.chain, Hit(0), save=True)
    ends.p_control.end_handoff("h", tokens=TOKENS)
    hit = ends.d_lookups.wait(inquiry, 10.0)
    assert hit is not None and (hit.tokens, hit.reason) == (TOKENS - 1, ""), hit
    ends.load("h", hit)
    ends.p_control.release_handoff("h")
    ends.d_lookups.drop_lease("D-h")
    assert eventually(ends.two.settled), (ends.two.lends, ends.two.reads)


def test_what_another_size_has_stored_hits_without_a_handoff(sizes: Callable[..., Sizes]) -> None:
    ends = sizes((2, (6,)), (1, (6,)))
    for rank in ends.p:
        rank.run("w", ends.chain, Hit(0), save=True)
    hit = ends.d_lookups.wait(ends.d_lookups.ask("r", ends.chain), 10.0)
    assert hit is not None and hit.tokens == TOKENS - 1
    for rank in ends.d:
        rank.run("r", ends.chain, hit, save=False)
        rank.check(hit.tokens)


def test_pieces_cross_the_link_while_the_prefiller_computes(sizes: Callable[..., Sizes]) -> None:
    """The first layers of P's first rank are at D's server while its last ones are not computed."""
    ends = sizes((2, (6,)), (1, (6,)))
    ends.open("h")
    inquiry = ends.ask("h")
    first, second = ends.p
    request = StepRequest("w", ends.chain, (first.table,), (0, 0), Hit(0), (0, TOKENS), tail=True)
    with first.agent.open_step([request]) as step:
        for layer in range(first.box.layers):
            step.wait_layer(layer)
            for plane in first.memory[layer]:
                first.memory[layer][plane][first.table] = first.own(layer, plane)
            if layer == 4:
                assert eventually(lambda: ends.two.reads["importer_figures"].get("read_bytes_total", 0) > 0)
                assert ends.d_lookups.wait(inquiry, 0.0) is None
            step.layer_done(layer)
    second.run("w", ends.chain, Hit(0), save=True)
    ends.p_control.end_handoff("h", tokens=TOKENS)
    hit = ends.d_lookups.wait(inquiry, 10.0)
    assert hit is not None and hit.tokens == TOKENS - 1
    ends.load("h", hit)


def test_engines_that_cannot_share_are_told_the_first_fact_that_differs(sizes: Callable[..., Sizes]) -> None:
    ends = sizes((2, (6,)), (1, (6,)), content="other weights")
    ends.open("h")
    follow = Follow(time.monotonic() + 20, "h", (ends.two.owner.endpoint,))
    hit = ends.d_lookups.wait(ends.d_lookups.ask("D-h", ends.d[0].agent.chain(np.arange(TOKENS)), follow), 10.0)
    assert hit is not None and hit.tokens == 0 and "weights: other weights here, c there" in hit.reason


def test_a_rank_that_dies_ends_the_wait_at_once(sizes: Callable[..., Sizes]) -> None:
    ends = sizes((2, (6,)), (1, (6,)))
    ends.open("h")
    inquiry = ends.ask("h", within_s=60.0)
    ends.p[0].run("w", ends.chain, Hit(0), save=True)
    assert ends.d_lookups.wait(inquiry, 0.0) is None
    ends.p.pop().agent.close()
    hit = ends.d_lookups.wait(inquiry, 10.0)
    assert hit is not None and hit.tokens == 0 and hit.reason
    ends.d_lookups.drop_lease("D-h")
    assert eventually(ends.two.settled), (ends.two.lends, ends.two.reads)
