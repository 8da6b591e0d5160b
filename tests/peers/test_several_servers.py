"""An engine whose ranks are attached to two servers: each keeps a part of a hand-off, and a third one reads both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from e2e.known import eventually
from e2e.partitions import TOKENS, Rank, everyone, leave

from layerflow.agent import Control, Follow
from layerflow.agent.client import Inquiry
from layerflow.agent.lookups import Lookups
from layerflow.agent.values import Hit
from layerflow_cli.bench.harness import ServerProcess

WHOLE = (6,)
SETTINGS: dict[str, object] = {
    "pool.size": "16MiB",
    "pool.warm": "false",
    "peers.serve": "true",
    "peers.learn": "true",
    "pd.handoff_lease_s": 30.0,
    "server.liveness_ms": 10_000,
    "server.drain_timeout_s": 1,  # which a hand-off that nobody has read uses up
}


class Hosts:
    """P's two ranks and their servers, and D with its own; D's server is one of P's where there are only two.

    P's scheduler is attached to the first one.
    """

    def __init__(self, d: int, servers: int) -> None:
        self.servers = [ServerProcess(SETTINGS) for _ in range(servers)]
        self.controls = [Control(server.endpoint, "observer") for server in self.servers]
        first, second, third = self.servers[0], self.servers[1], self.servers[-1]
        self.p = [Rank(server.endpoint, (rank, 2), 0, WHOLE, "c") for rank, server in enumerate((first, second))]
        self.d = everyone(third.endpoint, d, WHOLE)
        self.chain = self.p[0].agent.chain(np.arange(TOKENS))
        self.p_control = Control(first.endpoint, "tp2pp1", self.p[0].spec, lookup_timeout_s=5.0)
        self.d_lookups = Lookups(third.endpoint, f"tp{d}pp1", self.d[0].spec, timeout_s=5.0)
        assert self.d_lookups.wait_connected(5)
        assert eventually(self.started), [control.status(10.0)["peers"] for control in self.controls]
        assert eventually(self.attached), [control.status(10.0)["peers"] for control in self.controls]

    @property
    def addresses(self) -> list[str]:
        """Of P's servers."""
        return [server.endpoint for server in self.servers[:2]]

    def started(self) -> bool:
        """Every server can be read from, and can read: it waits for its own processes no longer than a moment."""
        peers = [control.status(10.0)["peers"] for control in self.controls]
        return all(each["reads"]["importer"]["state"] == "up" and each["lends"]["endpoints"] for each in peers)

    def attached(self) -> bool:
        """P's first server attaches to the second one when it hears of it, at the first hand-off."""
        opened = bool(self.open("attach"))
        if opened:
            self.p_control.release_handoff("attach")
        return opened

    def open(self, name: str) -> Any:
        return self.p_control.open_handoff(name, self.chain, TOKENS, servers=[self.addresses[1]])

    def ask(self, name: str, within_s: float = 30.0) -> Inquiry:
        follow = Follow(time.monotonic() + within_s, name, tuple(self.addresses))
        return self.d_lookups.ask(f"D-{name}", self.chain, follow)

    def save(self, rank: int) -> None:
        self.p[rank].run("w", self.chain, Hit(0), save=True)

    def complete(self, name: str) -> None:
        """A hand-off of which both ranks store their part."""
        assert self.open(name)
        self.save(0)
        self.save(1)
        self.p_control.end_handoff(name, tokens=TOKENS)
        assert self.p_control.watch_handoff(name, 10.0).state == "complete"

    def load(self, name: str, hit: Hit) -> None:
        for rank in self.d:
            rank.run(f"D-{name}", self.chain, hit, save=False)
            rank.check(hit.tokens)

    def balanced(self) -> bool:
        """No hand-off, lease or read is left anywhere."""
        for control in self.controls:
            status = control.status(10.0)
            kept, lends, reads = status["handoffs"], status["peers"]["lends"], status["peers"]["reads"]
            if kept["open"] or kept["complete"] or kept["kept_bytes"]:
                return False
            if lends["leases"] or lends["lent_bytes"] or reads["leases"] or reads["fetching_jobs"]:
                return False
        return True

    def close(self) -> None:
        self.d_lookups.close()
        self.p_control.close()
        for control in self.controls:
            control.close()
        leave([*self.p, *self.d])
        for server in self.servers:
            server.close()


@pytest.fixture
def hosts() -> Iterator[Callable[..., Hosts]]:
    made: list[Hosts] = []

    def start(d: int = 1, servers: int = 3) -> Hosts:
        made.append(Hosts(d, servers))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.mark.parametrize(("d", "servers"), [(1, 3), (2, 3), (1, 2)], ids=["tp1", "tp2", "d-beside-a-rank"])
def test_a_reader_asks_all_and_gives_all_back(hosts: Callable[..., Hosts], d: int, servers: int) -> None:
    ends = hosts(d, servers)
    assert ends.open("h")
    inquiry = ends.ask("h")
    ends.save(0)
    ends.save(1)
    ends.p_control.end_handoff("h", tokens=TOKENS)
    hit = ends.d_lookups.wait(inquiry, 20.0)
    assert hit is not None and (hit.tokens, hit.reason) == (TOKENS - 1, ""), hit
    ends.load("h", hit)
    ends.d_lookups.drop_lease("D-h")
    ends.d_lookups.release_handoff("h", ends.addresses)
    assert eventually(ends.balanced), [control.status(10.0) for control in ends.controls]


def test_it_is_complete_only_with_all_of_its_parts(hosts: Callable[..., Hosts]) -> None:
    ends = hosts()
    assert ends.open("h")
    ends.save(0)
    ends.p_control.end_handoff("h", tokens=TOKENS)
    assert ends.p_control.watch_handoff("h", 0.2).state == "open"
    ends.save(1)
    assert ends.p_control.watch_handoff("h", 10.0).state == "complete"


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_fails_all_parts_at_once(hosts: Callable[..., Hosts], dying: int) -> None:
    ends = hosts()
    assert ends.open("h")
    inquiry = ends.ask("h", within_s=60.0)
    ends.save(1 - dying)
    ends.p[dying].agent.close()
    hit = ends.d_lookups.wait(inquiry, 10.0)
    assert hit is not None and hit.tokens == 0 and hit.reason
    ends.d_lookups.drop_lease("D-h")
    assert eventually(ends.balanced), [control.status(10.0) for control in ends.controls]


def test_a_server_that_dies_fails_the_other_part_at_once(hosts: Callable[..., Hosts]) -> None:
    ends = hosts()
    assert ends.open("h")
    inquiry = ends.ask("h", within_s=60.0)
    ends.save(0)
    ends.servers[1].process.kill()
    hit = ends.d_lookups.wait(inquiry, 10.0)
    assert hit is not None and hit.tokens == 0 and hit.reason
    assert ends.p_control.watch_handoff("h", 10.0).state in ("failed", "revoked")


def test_a_part_that_is_refused_refuses_all(hosts: Callable[..., Hosts]) -> None:
    ends = hosts()
    ends.p[1].agent.close()
    assert eventually(lambda: not any(one["memory"] for one in ends.controls[1].status(10.0)["sessions"]))
    told = ends.open("h")
    assert told.state == "refused" and "no worker" in told.reason, told
    assert ends.p_control.watch_handoff("h", 10.0).state == "failed"


def test_a_reader_that_gives_up_releases_both_parts(hosts: Callable[..., Hosts]) -> None:
    """A request that is aborted at D: nothing is kept for it any more, before any lease ends."""
    ends = hosts()
    ends.complete("h")
    hit = ends.d_lookups.wait(ends.ask("h"), 20.0)
    assert hit is not None and hit.tokens
    ends.d_lookups.drop_lease("D-h")
    ends.d_lookups.release_handoff("h", ends.addresses)
    assert eventually(ends.balanced), [control.status(10.0) for control in ends.controls]


@pytest.mark.parametrize("asked", [False, True], ids=["rejected", "aborted-at-once"])
def test_a_reader_that_never_came_releases_both_parts(hosts: Callable[..., Hosts], asked: bool) -> None:
    """A request that D rejects, or aborts as it arrives: its server has not attached to those of P yet."""
    ends = hosts()
    ends.complete("h")
    assert not ends.controls[-1].status(10.0)["peers"]["reads"]["peers"]
    if asked:
        ends.ask("h")
        ends.d_lookups.drop_lease("D-h")
    ends.d_lookups.release_handoff("h", ends.addresses)
    assert eventually(ends.balanced), [control.status(10.0) for control in ends.controls]
    assert ends.p_control.watch_handoff("h", 10.0).state == "released"


@pytest.mark.parametrize("kept_at", [0, 1])
def test_one_server_that_is_told_releases_both_parts(hosts: Callable[..., Hosts], kept_at: int) -> None:
    """Its last read is over, and one of the servers cannot be told: the servers of P tell each other."""
    ends = hosts()
    ends.complete("h")
    ends.d_lookups.release_handoff("h", [ends.addresses[kept_at]])
    assert eventually(ends.balanced), [control.status(10.0) for control in ends.controls]
    assert ends.p_control.watch_handoff("h", 10.0).state == "released"


def test_what_is_released_while_the_readers_server_is_dead_is_released_once_it_is_back(
    hosts: Callable[..., Hosts],
) -> None:
    """Its engine calls nothing more; the new server has to attach to those of P first."""
    ends = hosts()
    ends.complete("h")
    ends.servers[-1].kill()
    ends.d_lookups.release_handoff("h", ends.addresses)
    assert ends.p_control.watch_handoff("h", 0.0).state == "complete"
    ends.servers[-1].restart()
    assert eventually(ends.balanced), [control.status(10.0) for control in ends.controls]
    assert ends.p_control.watch_handoff("h", 10.0).state == "released"
