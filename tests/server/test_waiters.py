"""Who waits until things have ended: told once all have, forgotten where it waits no longer."""

from __future__ import annotations

from layerflow.server.waiters import Waiters


class Thing:
    """Counts how often one of them is looked for."""

    looked_for = 0

    def __hash__(self) -> int:
        Thing.looked_for += 1
        return id(self)


def test_who_waits_is_told_once_all_have_ended() -> None:
    waiters: Waiters[str] = Waiters()
    told: list[str] = []
    waiters.wait("", lambda: told.append("nothing"))
    assert told == ["nothing"]
    waiters.wait("ab", lambda: told.append("ab"))
    waiters.wait("bb", lambda: told.append("b"))
    waiters.end("b")
    assert told == ["nothing", "b"]
    waiters.end("bca")
    assert told == ["nothing", "b", "ab"] and not waiters


def test_who_waits_no_longer_leaves_nothing_behind() -> None:
    waiters: Waiters[str] = Waiters()
    told: list[str] = []
    forget = waiters.wait("abc", lambda: told.append("forgotten"))
    stays = waiters.wait("cd", lambda: told.append("stays"))
    waiters.end("a")
    forget()
    assert len(waiters) == 2
    waiters.end("bcd")
    assert told == ["stays"]
    forget()
    stays()
    assert not waiters


def test_who_is_told_may_wait_again_or_let_another_wait_no_longer() -> None:
    waiters: Waiters[str] = Waiters()
    told: list[str] = []

    def go_on() -> None:
        told.append("first")
        waiters.wait("a", lambda: told.append("again"))
        forget()

    waiters.wait("a", go_on)
    forget = waiters.wait("a", lambda: told.append("forgotten"))
    waiters.end("a")
    assert told == ["first"]
    waiters.end("a")
    assert told == ["first", "again"] and not waiters


def test_an_end_touches_only_those_who_wait_for_it() -> None:
    waiters: Waiters[Thing] = Waiters()
    one, other = Thing(), Thing()
    told: list[Thing] = []
    for _ in range(10_000):
        waiters.wait([other], lambda: told.append(other))
    forget = waiters.wait([one], lambda: None)
    waiters.wait([one], lambda: told.append(one))
    Thing.looked_for = 0
    forget()
    waiters.end([one])
    assert told == [one] and Thing.looked_for < 10
