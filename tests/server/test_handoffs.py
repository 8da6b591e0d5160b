"""Hand-offs on one server: states, room that is kept and taken over, readers that wait, and everything's end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.known import KnownWorker, Run, eventually, small_spec

from layerflow.agent import Control, Follow
from layerflow.agent.connection.lookups import Inquiry, Lookups
from layerflow.keys import Chain
from layerflow.server import EmbeddedServer
from server.support import Embed, observe

TOKENS = 100  # six chunks of 16 and a tail of 4


class Pair:
    """A prefill and a decode engine on one server: their workers and their schedulers."""

    def __init__(self, server: EmbeddedServer, **more: Any) -> None:
        spec = small_spec(4)
        self.server = server
        self.p = KnownWorker(server.endpoint, spec=spec, engine="P", context=server.context, **more)
        self.d = KnownWorker(server.endpoint, spec=spec, engine="D", context=server.context, **more)
        self.p_control = Control(server.endpoint, "P", spec, context=server.context, lookup_timeout_s=5.0)
        self.d_lookups = Lookups(server.endpoint, "D", spec, context=server.context, timeout_s=5.0)
        assert self.d_lookups.wait_connected(5)
        self.observer = observe(server)

    def ask(self, name: str, chain: Chain, *, within_s: float = 20.0) -> Inquiry:
        return self.d_lookups.ask(f"D-{name}", chain, Follow(time.monotonic() + within_s, name))

    def figures(self) -> dict[str, Any]:
        return self.observer.status()["handoffs"]

    def balanced(self) -> bool:
        pool = self.observer.status()["pool"]
        return pool["pinned"] == 0 and pool["half_written"] == 0

    def close(self) -> None:
        self.d_lookups.close()
        for each in (self.p_control, self.observer):
            each.close()
        self.p.agent.close()
        self.d.agent.close()


@pytest.fixture
def pair(embed: Embed) -> Iterator[Pair]:
    made = Pair(embed())
    yield made
    made.close()


def prefilled(pair: Pair, name: str, chain: Chain) -> Run:
    assert pair.p_control.open_handoff(name, chain, len(chain))
    run = pair.p.serve(chain, look=False)
    pair.p_control.end_handoff(name, tokens=len(chain))
    return run


def test_a_handoff_is_open_then_complete_and_its_reader_finds_all_but_a_token(pair: Pair) -> None:
    chain = pair.p.prompt(TOKENS)
    opened = pair.p_control.open_handoff("h", chain, len(chain))
    assert (opened.state, opened.tokens) == ("open", TOKENS)
    assert pair.observer.status()["pool"]["half_written"] == 7
    pair.p.serve(chain, look=False)
    assert pair.observer.status()["pool"]["half_written"] == 0
    assert pair.figures()["open"] == 1
    pair.p_control.end_handoff("h", tokens=TOKENS)
    assert pair.p_control.watch_handoff("h", 5.0).state == "complete"
    assert pair.observer.status()["pool"]["pinned"] == 7
    hit = pair.d_lookups.wait(pair.ask("h", chain), 5.0)
    assert hit is not None and hit.following
    assert (hit.tokens, hit.reason) == (TOKENS - 1, "")
    pair.p_control.release_handoff("h")
    pair.d_lookups.drop_lease("D-h")
    assert eventually(pair.balanced)


def test_who_asks_before_it_is_opened_waits(pair: Pair) -> None:
    chain = pair.p.prompt(TOKENS)
    inquiry = pair.ask("h", chain)
    assert pair.d_lookups.wait(inquiry, 0.0) is None
    assert eventually(lambda: pair.figures()["announced"] == 1)
    assert pair.d_lookups.wait(inquiry, 0.0) is None
    prefilled(pair, "h", chain)
    hit = pair.d_lookups.wait(inquiry, 5.0)
    assert hit is not None and hit.following and hit.tokens == TOKENS - 1


def test_one_that_nobody_opens_ends_at_the_readers_deadline(pair: Pair) -> None:
    hit = pair.d_lookups.wait(pair.ask("h", pair.p.prompt(TOKENS), within_s=0.1), 5.0)
    assert hit is not None and not hit.following
    assert (hit.tokens, hit.reason) == (0, "announced and not readable in time")
    assert eventually(lambda: pair.figures()["announced"] == 0)


def test_one_that_its_engine_gives_up_fails_and_its_reader_hears_why(pair: Pair) -> None:
    chain = pair.p.prompt(TOKENS)
    assert pair.p_control.open_handoff("h", chain, len(chain))
    watched = pair.d_lookups.watch_handoff("h", 20.0)
    state = pair.d_lookups.handoff(watched, 5.0)
    assert state is not None and state.state == "open"
    pair.p_control.end_handoff("h", tokens=0, reason="the request was preempted")
    assert eventually(lambda: getattr(pair.d_lookups.handoff(watched, 0.0), "state", "") == "failed")
    hit = pair.d_lookups.wait(pair.ask("h", chain), 5.0)
    assert hit is not None and (hit.tokens, hit.following) == (0, False)
    assert hit.reason == "failed: the request was preempted"
    assert eventually(pair.balanced)
