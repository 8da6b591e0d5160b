"""First tokens of handed-over prompts: given to each who waits, once, and kept within bounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from layerflow.connectors.sglang.pd import first_tokens
from layerflow.connectors.sglang.pd.first_tokens import KEPT_S, FirstTokens

A, B = ("10.0.0.1", 1), ("10.0.0.1", 2)


@pytest.mark.parametrize("waits_first", [True, False])
def test_whoever_waits_gets_it_once(waits_first: bool) -> None:
    tokens = FirstTokens()
    steps: list[Callable[[], object]] = [lambda: tokens.wait(1, A), lambda: tokens.put(1, [b"row"])]
    for step in steps if waits_first else reversed(steps):
        step()
    assert tokens.ready(1) == ([b"row"], {A})
    assert tokens.ready(1) == ([b"row"], set())
    tokens.wait(1, B)
    assert tokens.ready(1) == ([b"row"], {B}), "a rank that comes later"


def test_who_has_left_gets_nothing() -> None:
    tokens = FirstTokens()
    tokens.wait(1, A)
    tokens.leave(1)
    tokens.leave(2)
    tokens.put(1, [b"row"])
    assert tokens.ready(1) == ([b"row"], set())


def test_a_failure_is_told_to_those_who_wait_and_to_those_who_come() -> None:
    tokens = FirstTokens()
    tokens.wait(1, A)
    assert tokens.fail(1, "aborted") == {A}
    assert tokens.wait(1, B) == "aborted"
    assert tokens.fail(1, "aborted") == set()
    assert not tokens.wait(2, B)


def test_a_failure_behind_the_token_is_told_to_those_who_have_it() -> None:
    """They load the prompt yet, which will not come."""
    tokens = FirstTokens()
    for each in (A, B):
        tokens.wait(1, each)
    tokens.put(1, [b"row"])
    assert tokens.ready(1)[1] == {A, B}
    assert tokens.fail(1, "the server was lost") == {A, B}
    assert tokens.fail(1, "the server was lost") == set()


def test_it_is_kept_until_all_ranks_have_it_and_no_longer() -> None:
    """Prefill computes many prompts in the five minutes for which it keeps one that nobody asks for."""
    tokens = FirstTokens()
    tokens.put(1, [b"row"])
    assert not tokens.wait(1, A, ranks=2)
    assert tokens.ready(1) == ([b"row"], {A})
    assert not tokens.wait(1, B, ranks=2)
    assert tokens.ready(1) == ([b"row"], {B})
    assert tokens.ready(1) == ([], set())
    assert not any(room.rows for room in tokens._rooms.values())
    assert "2 ranks" in tokens.wait(1, ("10.0.0.3", 1), ranks=2), "one too many is told, and no other one"
    assert tokens.fail(1, "the server was lost") == {A, B}, "they load the prompt yet"


def test_it_is_taken_once() -> None:
    tokens = FirstTokens()
    assert tokens.take(1) == []
    tokens.put(1, [b"row"])
    assert tokens.take(1) == [b"row"]
    assert tokens.take(1) == []
    assert len(tokens) == 0


def test_what_nobody_fetches_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_tokens, "MOST_ROOMS", 3)
    now = [0.0]
    tokens = FirstTokens(lambda: now[0])
    for room in range(5):
        tokens.put(room, [b"row"])
    assert len(tokens) == 3
    assert not tokens.take(1)
    now[0] = KEPT_S + 1
    tokens.wait(9, A)
    assert len(tokens) == 1


def test_an_earlier_attempts_token_is_never_given_to_a_later_one() -> None:
    """Decode asks for a retracted request's room once more, be it before prefill has begun that."""
    tokens = FirstTokens()
    tokens.put(1, [b"old"])
    tokens.wait(1, A, attempt=1)
    assert tokens.ready(1, 1) == ([], set())
    assert tokens.take(1, 1) == []
    tokens.put(1, [b"late"])
    assert tokens.fail(1, "late") == set()
    assert not tokens.wait(1, A, attempt=1)
    tokens.put(1, [b"new"], attempt=1)
    assert tokens.ready(1, 1) == ([b"new"], {A})
    assert tokens.ready(1) == ([], set())
    assert tokens.take(1, 1) == [b"new"]
