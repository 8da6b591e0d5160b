"""Prefill and decode in reference engines over two servers, under load, while everything dies, stops or is cut."""

from __future__ import annotations

import pytest
from e2e.rounds import record
from pd_world import World, world

IN_FLIGHT = 4
"""Requests that are under way when something happens."""

Faults = list[tuple[str, str]]
"""What happens to whom: kill, stop, cut, leave."""

SHORT: Faults = [
    ("kill", "D"), ("kill", "P"), ("kill", "exporter"), ("cut", "link"), ("leave", "clients"), ("stop", "owner"),
]  # fmt: skip
"""Further ones are in the short form with vLLM."""


def mixed(times: int, *victims: str) -> Faults:
    """So many faults of each; every third one is a stop."""
    return [("kill" if each % 3 else "stop", victim) for each in range(times) for victim in victims]


def long(name: str, shape: str, faults: Faults) -> object:
    return pytest.param(shape, faults, 10.0, id=name, marks=[pytest.mark.campaign, pytest.mark.timeout(7200)])


@pytest.mark.parametrize(
    ("shape", "faults", "stopped_s"),
    [
        pytest.param("hybrid", SHORT, 2.5, id="short", marks=pytest.mark.timeout(300)),
        long("engines-gqa", "gqa", mixed(50, "P", "D")),
        long("engines-hybrid", "hybrid", mixed(50, "P", "D")),
        long("servers", "hybrid", mixed(30, "owner", "reader")),
        long("hosts", "mla", mixed(30, "exporter", "importer")),
        long("link", "hybrid", [("cut", "link"), ("leave", "clients")] * 30),
    ],
)
def test_right_tokens_and_nothing_left(shape: str, faults: Faults, stopped_s: float) -> None:
    with world(shape, seed=len(faults)) as it:
        it.recover()
        it.balanced()
        it.dice.shuffle(faults)
        for what, victim in faults:
            strike(it, what, victim, stopped_s)
            it.counts[f"{what} {victim}"] += 1
        record("pd_storm", shape=shape, **it.counts)
        assert [side.end() for side in it.sides.values()] == [0, 0], "blocks were never freed"
        assert it.counts["failed_loads"] or it.counts["not_handed_over"], "nothing was hit: the test has shown nothing"


def strike(it: World, what: str, victim: str, stopped_s: float) -> None:
    """Let it happen at some moment under load; then everything is answered, right, and given back."""
    if what == "cut":
        it.arm()
    names = [it.ask() for _ in range(IN_FLIGHT)]
    it.moment(1.0)
    gone: frozenset[str] = frozenset()
    match what:
        case "kill":
            it.kill(victim)
        case "stop":
            it.stop(victim, stopped_s)
        case "cut":
            it.cut()
        case "leave":
            gone = it.leave(names)
    it.finish(gone)
    it.recover()
    it.balanced()
