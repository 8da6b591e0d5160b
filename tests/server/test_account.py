"""What a client makes the server keep is counted against its share and everybody's total, and ends with the client."""

from __future__ import annotations

import asyncio

import pytest

from layerflow.server import account
from layerflow.server.account import ENTRY_BYTES, Accounts, Allowance, Refused

SHARE, TOTAL = 10 * ENTRY_BYTES, 16 * ENTRY_BYTES


def accounts() -> Accounts:
    return Accounts(lambda: Allowance(SHARE, TOTAL))


def test_a_client_keeps_no_more_than_its_share() -> None:
    every = accounts()
    mine = every.of("a")
    charges = [mine.charge("a watch") for _ in range(10)]
    with pytest.raises(Refused, match=r"a watch.*10 things.*server\.max_client_bytes") as refused:
        mine.charge("a watch")
    assert refused.value.code == "quota"
    assert mine.charge("an end", always=True).nbytes == ENTRY_BYTES
    charges[0].release()
    charges[0].release()
    assert (mine.entries, mine.nbytes, every.nbytes) == (10, SHARE, SHARE), "again gives nothing back"


def test_where_the_total_is_used_up_those_that_keep_most_are_refused() -> None:
    every = accounts()
    for client in ("a", "b"):
        for _ in range(8):
            every.of(client).charge("a watch")
    with pytest.raises(Refused, match=r"server\.max_clients_bytes"):
        every.of("a").charge("a watch")
    small = every.of("c").charge("a watch")
    assert every.of("c").nbytes == ENTRY_BYTES, "a client within its equal part is let through"
    small.release()


def test_who_has_many_clients_has_one_part_of_the_total() -> None:
    every = accounts()
    for client in range(16):
        every.of(client, "greedy").charge("a watch")
    other = every.of("other", "decent")
    charges = [other.charge("a watch") for _ in range(8)]
    with pytest.raises(Refused, match=r"server\.max_clients_bytes"):
        other.charge("a watch")
    with pytest.raises(Refused, match=rf"{16 * ENTRY_BYTES} of them for those of this key or process"):
        every.of("new", "greedy").charge("a watch")
    for client in [*range(16), "new"]:
        every.close(client)
    charges.append(other.charge("a watch"))
    assert other.whose.nbytes == every.nbytes == 9 * ENTRY_BYTES
    every.close("other")
    assert other.whose.nbytes == every.nbytes == 0


async def test_what_is_still_being_ended_counts_for_whoever_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "SLICE_S", 0.0)  # a slice is one
    every = accounts()
    for client in range(16):
        every.of(client, "greedy").charge("a watch")
    for client in range(16):
        every.close(client)
    assert every.nbytes == 15 * ENTRY_BYTES and len(every) == 0, "the rest takes turns"
    back = every.of("back", "greedy")
    assert back.whose.nbytes == every.nbytes
    every.of("other", "decent").charge("a watch")
    with pytest.raises(Refused, match=rf"{15 * ENTRY_BYTES} of them for those of this key or process"):
        back.charge("a watch")
    while every.nbytes > ENTRY_BYTES:  # noqa: ASYNC110 - the loop itself is what is tested
        await asyncio.sleep(0)
    assert back.whose.nbytes == 0 and back.charge("a watch").nbytes == ENTRY_BYTES
    for client in ("back", "other"):
        every.close(client)
    while every.nbytes:  # noqa: ASYNC110 - the loop itself is what is tested
        await asyncio.sleep(0)
    assert every.kept_by("greedy") is not back.whose, "nothing is remembered of who keeps nothing"


def test_who_has_many_clients_does_not_have_another_one_hung_up_on() -> None:
    every = accounts()
    other, greedy = every.of("other", "decent"), [every.of(client, "greedy") for client in range(9)]
    for _ in range(8):
        other.charge("an end", always=True)
    for each in greedy:
        for _ in range(3):
            each.charge("an end", always=True)
    assert every.nbytes > 2 * TOTAL and other.nbytes > 2 * TOTAL // 10
    assert not other.overdrawn
    greedy[0].charge("an end", always=True)
    assert greedy[0].overdrawn and not greedy[1].overdrawn


def test_what_takes_anothers_place_has_to_fit_by_the_difference() -> None:
    every = accounts()
    mine, other = every.of("a", "one"), every.of("b", "two")
    first = mine.charge("a lease", 5 * ENTRY_BYTES)
    longer = mine.charge("a lease", 9 * ENTRY_BYTES, giver=first, given=first.nbytes)
    assert (mine.entries, mine.nbytes, first.nbytes) == (1, SHARE, 0)
    with pytest.raises(Refused, match=r"server\.max_client_bytes"):
        mine.charge("a lease", 10 * ENTRY_BYTES, giver=longer, given=longer.nbytes)
    with pytest.raises(Refused, match=r"server\.max_client_bytes"):
        mine.charge("a part of it", giver=longer, given=0)
    assert (mine.entries, mine.nbytes, longer.nbytes) == (1, SHARE, SHARE), "refused, nothing has changed"
    part = mine.charge("a part of it", ENTRY_BYTES, giver=longer, given=2 * ENTRY_BYTES)
    assert (mine.entries, mine.nbytes, longer.nbytes, part.nbytes) == (2, SHARE, SHARE - part.nbytes, part.nbytes)
    for _ in range((TOTAL - SHARE) // ENTRY_BYTES):
        every.of("c").charge("a watch")
    taken = other.charge("a lease", longer.nbytes - ENTRY_BYTES, giver=longer, given=longer.nbytes)
    assert (mine.nbytes, other.nbytes, every.nbytes) == (part.nbytes, taken.nbytes, TOTAL), "the total does not grow"


def test_where_nothing_grows_what_takes_anothers_place_fits_however_much_is_kept() -> None:
    every = accounts()
    mine = every.of("a")
    for _ in range(12):
        last = mine.charge("an end", always=True)
    assert mine.charge("the same", giver=last, given=last.nbytes).nbytes == last.nbytes + ENTRY_BYTES


def test_what_is_always_counted_has_a_bound_too() -> None:
    every = accounts()
    mine, other = every.of("a"), every.of("b")
    for _ in range(2 * SHARE // ENTRY_BYTES):
        mine.charge("an end", always=True)
    assert not mine.overdrawn
    for _ in range((2 * TOTAL - 2 * SHARE) // ENTRY_BYTES + 1):
        other.charge("an end", always=True)
    assert mine.overdrawn and not other.overdrawn, "of the total, more than an equal part"
    every.close("b")
    assert not mine.overdrawn
    mine.charge("an end", always=True)
    assert mine.overdrawn


async def test_much_ends_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much a client has kept, the loop goes on between two ends; what another keeps ends in its turn."""
    monkeypatch.setattr(account, "SLICE_S", 0.0)  # a slice is one
    every, ended = accounts(), []
    for client in ("a", "b"):
        for number in range(5):
            every.of(client).charge("a watch", end=lambda number=number: ended.append(number))  # type: ignore[misc]
    every.close("a")
    every.close("b")
    told = []
    while every.nbytes:
        told.append(len(ended))
        assert told[-1] <= len(told), "one in each round of the loop"
        await asyncio.sleep(0)
    assert ended == [*range(5), *range(5)]


async def test_an_end_that_fails_keeps_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: failed.append(told["exception"]))
    monkeypatch.setattr(account, "SLICE_S", 0.0)
    every, ended = accounts(), []

    def broken() -> None:
        raise KeyError("a bug")

    for end in (broken, lambda: ended.append("first"), broken, lambda: ended.append("last")):
        every.of("a").charge("a watch", end=end)
    every.close("a")
    assert failed, "whoever closes it goes on"
    while every.nbytes:  # noqa: ASYNC110 - the loop itself is what is tested
        await asyncio.sleep(0)
    assert ended == ["first", "last"]
    assert [type(error) for error in failed] == [KeyError, KeyError]


async def test_ends_that_fail_give_way_as_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: failed.append(told["exception"]))
    monkeypatch.setattr(account, "SLICE_S", 0.0)
    every = accounts()
    for _ in range(5):
        every.of("a").charge("a watch", end=lambda: 1 // 0)
    every.close("a")
    assert len(failed) == 1, "one in each round of the loop"
    while every.nbytes:  # noqa: ASYNC110 - the loop itself is what is tested
        await asyncio.sleep(0)
    assert len(failed) == 5


def test_what_is_left_ends_with_the_client() -> None:
    every, ended = accounts(), []
    mine = every.of("a")
    gone = mine.charge("a lookup", end=lambda: ended.append("gone"))
    mine.charge("a lookup", end=lambda: ended.append("first"))
    last = mine.charge("a watch", 5, end=lambda: ended.append("last"))
    gone.release()
    every.close("a")
    last.release()
    assert ended == ["first", "last"]
    assert (every.nbytes, len(every), mine.closed) == (0, 0, True)
