"""Messages in slices: in order for each client, in turn between clients, closed unfinished when a client is lost."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import weakref
from collections.abc import Callable

import pytest

from layerflow.server import mailboxes
from layerflow.server.account import Account, Accounts, Allowance, Refused
from layerflow.server.mailboxes import MAX_WAITING, Answer, Mailboxes, next_turn


async def work(log: list[str], name: str, slices: int) -> None:
    try:
        for number in range(slices):
            log.append(f"{name}{number}")
            await next_turn()
        log.append(f"{name}.")
    except GeneratorExit:
        log.append(f"{name} closed")
        raise


Open = Callable[[int], Account]
SHARE = 64 << 20


@pytest.fixture
def account() -> Open:
    """The account of a client, by its number."""
    return Accounts(lambda: Allowance(SHARE, 1 << 30)).of


async def run(pending: Mailboxes) -> None:
    while pending.busy:  # noqa: ASYNC110 - the loop itself is what is tested
        await asyncio.sleep(0)


async def test_a_short_message_is_done_at_once(account: Open) -> None:
    log: list[str] = []
    pending = Mailboxes()
    pending.start(account(1), work(log, "a", 0))
    assert log == ["a."]
    assert not pending.busy


async def test_clients_take_turns_and_each_stays_in_order(monkeypatch: pytest.MonkeyPatch, account: Open) -> None:
    monkeypatch.setattr(mailboxes, "SLICE_S", 0.0)  # a slice ends at the first stop
    log: list[str] = []
    pending = Mailboxes()
    pending.start(account(1), work(log, "a", 3))
    pending.start(account(1), work(log, "b", 0))
    pending.start(account(2), work(log, "c", 1))
    assert log == ["a0", "c0"], "what one client sends waits behind its own message, not behind another's"
    await run(pending)
    assert [entry for entry in log if entry[0] in "ab"] == ["a0", "a1", "a2", "a.", "b."]
    assert log.index("c.") < log.index("a."), "the short message of another client did not wait for the long one"


async def test_a_lost_client_s_messages_are_closed(monkeypatch: pytest.MonkeyPatch, account: Open) -> None:
    monkeypatch.setattr(mailboxes, "SLICE_S", 0.0)
    log: list[str] = []
    pending = Mailboxes()
    pending.start(account(1), work(log, "a", 3))
    pending.forget(account(1))
    assert log == ["a0", "a closed"]
    assert not pending.busy


async def test_a_message_that_raises_costs_only_itself(monkeypatch: pytest.MonkeyPatch, account: Open) -> None:
    monkeypatch.setattr(mailboxes, "SLICE_S", 0.0)
    caught: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: caught.append(context["exception"]))

    async def broken() -> None:
        await next_turn()
        raise KeyError("a bug")

    log: list[str] = []
    pending = Mailboxes()
    pending.start(account(1), broken())
    pending.start(account(1), work(log, "b", 0))
    monkeypatch.setattr(mailboxes, "SLICE_S", 1.0)
    await asyncio.wait_for(run(pending), 10)
    assert [type(error) for error in caught] == [KeyError]
    assert log == ["b."]


async def test_what_may_wait_is_bounded(monkeypatch: pytest.MonkeyPatch, account: Open) -> None:
    monkeypatch.setattr(mailboxes, "SLICE_S", 0.0)
    pending = Mailboxes()
    pending.start(account(1), work([], "a", 1), 1)
    with pytest.raises(Refused, match=r"server\.max_client_bytes"):
        pending.start(account(1), work([], "b", 0), SHARE)
    pending.start(account(2), work([], "b", 0), SHARE)
    for _ in range(MAX_WAITING - 1):
        pending.start(account(1), work([], "c", 0))
    with pytest.raises(Refused, match=f"{MAX_WAITING} of this client's messages wait"):
        pending.start(account(1), work([], "d", 0))
    pending.start(account(1), work([], "what ends something", 0), always=True)
    pending.forget(account(1))
    assert account(1).nbytes == account(1).entries == 0


async def wait(log: list[str], name: str, account: Account, answers: list[Answer[str]]) -> None:
    with account.charge(name, 10) as charge:
        answers.append(Answer[str](charge))
        try:
            log.append(f"{name} {await answers[-1]}")
        except GeneratorExit:
            log.append(f"{name} closed")
            raise


async def test_what_waits_for_an_answer_holds_up_nothing_else_of_its_client(account: Open) -> None:
    log: list[str] = []
    answers: list[Answer[str]] = []
    pending = Mailboxes()
    pending.start(account(1), wait(log, "a", account(1), answers))
    pending.start(account(1), work(log, "b", 0))
    assert log == ["b."]
    assert not pending.busy and account(1).entries == 1
    answers[0].tell("told")
    answers[0].tell("told twice")
    await run(pending)
    assert log == ["b.", "a told"]
    assert account(1).nbytes == account(1).entries == 0


async def test_an_answer_goes_on_behind_what_its_client_has_waiting(
    monkeypatch: pytest.MonkeyPatch, account: Open
) -> None:
    monkeypatch.setattr(mailboxes, "SLICE_S", 0.0)
    log: list[str] = []
    answers: list[Answer[str]] = []
    pending = Mailboxes()
    pending.start(account(1), wait(log, "a", account(1), answers))
    pending.start(account(1), work(log, "b", 2))
    answers[0].tell("told")
    assert log == ["b0"]
    await run(pending)
    assert log == ["b0", "b1", "b.", "a told"]


async def test_what_many_wait_for_is_told_in_one_turn_and_they_go_on_in_turns_with_others(
    monkeypatch: pytest.MonkeyPatch, account: Open
) -> None:
    monkeypatch.setattr(mailboxes, "SLICE_S", 0.0)
    log: list[str] = []
    answers: list[Answer[str]] = []
    pending, many = Mailboxes(), 2 * MAX_WAITING
    for number in range(many):
        pending.start(account(1), wait(log, f"{number}", account(1), answers))
    pending.start(account(2), wait(log, "alone", account(2), answers))
    nbytes = account(1).nbytes
    for answer in answers:
        answer.tell("told")
    assert log == [] and pending.busy, "who tells runs none of them"
    assert account(1).nbytes == nbytes, "each is counted once, as what waits"
    pending.start(account(1), work(log, "next", 0))  # refused for no one who has been told
    rounds = [0]
    while pending.busy:
        await asyncio.sleep(0)
        rounds.append(len(log))
    assert max(after - before for before, after in itertools.pairwise(rounds)) == 1
    assert log.index("alone told") == 1, "whoever waits alone does not wait for them"
    log.remove("alone told")
    assert log == [*(f"{number} told" for number in range(many)), "next."]
    assert account(1).entries == account(2).entries == 0


async def test_a_message_behind_those_that_have_been_told_alone_is_not_refused(account: Open) -> None:
    log: list[str] = []
    answers: list[Answer[str]] = []
    pending, client = Mailboxes(), account(1)
    pending.start(client, wait(log, "a", client, answers))
    client.charge("all that it may keep", SHARE, always=True)
    answers[0].tell("told")
    pending.start(client, work(log, "b", 0))
    with pytest.raises(Refused, match=r"server\.max_client_bytes"):
        pending.start(client, work(log, "c", 0))
    await run(pending)
    assert log == ["a told", "b."]


async def test_a_close_that_fails_keeps_neither_other_messages_nor_the_turns(
    monkeypatch: pytest.MonkeyPatch, account: Open
) -> None:
    monkeypatch.setattr(mailboxes, "SLICE_S", 0.0)
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(repr(context["exception"])))

    async def broken() -> None:
        try:
            await next_turn()
            await next_turn()
        finally:
            raise KeyError("a bug")

    log: list[str] = []
    pending, client = Mailboxes(), account(1)
    pending.start(client, broken())
    pending.start(client, work(log, "a", 0))
    pending.start(account(2), work(log, "b", 1))
    client.close()
    await asyncio.wait_for(run(pending), 10)
    assert told == ["KeyError('a bug')"]
    assert log == ["b0", "b."] and client.entries == 0


@pytest.mark.parametrize("how", ["and closed", "and its client is lost"])
async def test_what_has_been_told_and_has_not_gone_on_ends_with_its_client(how: str) -> None:
    accounts = Accounts(lambda: Allowance(SHARE, 1 << 30))
    log: list[str] = []
    answers: list[Answer[str]] = []
    pending, client = Mailboxes(), accounts.of(1)
    for name in "ab":
        pending.start(client, wait(log, name, client, answers))
    if how == "and closed":
        answers[0].tell("told")
        pending.forget(client)
        assert log == ["a closed"]
        answers[1].tell("told")  # by the end of another
    else:
        answers[0].tell("told")
        answers[1].tell("told")
        pending.forget(client)
    accounts.close(1)
    await run(pending)
    assert log == ["a closed", "b closed"]
    assert client.nbytes == client.entries == 0


async def test_who_is_told_by_a_message_of_its_own_client_goes_on_behind_it(
    monkeypatch: pytest.MonkeyPatch, account: Open
) -> None:
    monkeypatch.setattr(mailboxes, "SLICE_S", 0.0)
    log: list[str] = []
    answers: list[Answer[str]] = []

    async def tell() -> None:
        answers[0].tell("told")
        await work(log, "b", 2)

    pending = Mailboxes()
    pending.start(account(1), wait(log, "a", account(1), answers))
    pending.start(account(1), tell())
    await run(pending)
    assert log == ["b0", "b1", "b.", "a told"]
    assert account(1).entries == 0


async def test_what_goes_on_for_long_is_counted(monkeypatch: pytest.MonkeyPatch, account: Open) -> None:
    monkeypatch.setattr(mailboxes, "SLICE_S", 0.0)
    log: list[str] = []
    answers: list[Answer[str]] = []

    async def long() -> None:
        await wait(log, "a", account(1), answers)
        await work(log, "b", 2)

    pending = Mailboxes()
    pending.start(account(1), long())
    answers[0].tell("told")
    await asyncio.sleep(0)
    assert log == ["a told", "b0"] and account(1).entries == 1
    await run(pending)
    assert log[-1] == "b." and account(1).entries == 0


async def test_messages_behind_one_that_loses_its_client_are_not_run(
    monkeypatch: pytest.MonkeyPatch, account: Open
) -> None:
    log: list[str] = []
    pending, client = Mailboxes(), account(1)
    caught: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: caught.append(context))

    async def leave() -> None:
        pending.forget(client)
        client.close()

    with monkeypatch.context() as patch:
        patch.setattr(mailboxes, "SLICE_S", 0.0)
        pending.start(client, work(log, "a", 1))
        pending.start(client, leave())
        pending.start(client, work(log, "b", 0))
    monkeypatch.setattr(mailboxes, "SLICE_S", 1.0)
    await run(pending)
    assert log == ["a0", "a."] and not caught and client.entries == 0


async def test_an_answer_that_was_told_before_it_is_awaited_is_there_at_once(account: Open) -> None:
    log: list[str] = []

    async def told() -> None:
        answer = Answer[str](account(1).charge("a"))
        answer.tell("first")
        log.append(await answer)

    Mailboxes().start(account(1), told())
    assert log == ["first"]


async def test_what_waits_is_closed_with_its_client_and_nothing_of_it_is_left() -> None:
    accounts = Accounts(lambda: Allowance(SHARE, 1 << 30))
    log: list[str] = []
    answers: list[Answer[str]] = []
    pending, client = Mailboxes(), accounts.of(1)
    pending.start(client, wait(log, "a", client, answers))
    pending.forget(client)
    accounts.close(1)
    assert log == ["a closed"]
    assert client.nbytes == client.entries == 0
    gone = weakref.ref(answers[0])
    answers[0].tell("too late")
    answers.clear()
    assert log == ["a closed"]
    assert gone() is None, "it waits for no garbage collector"


async def test_an_answer_that_nothing_tells_in_time_is_what_was_to_be_then(account: Open) -> None:
    log: list[str] = []
    over = asyncio.Event()

    async def waits(name: str, until: float) -> None:
        with account(1).charge(name) as charge:
            answer = Answer[str](charge)
            if name == "told":
                answer.tell("told")
            log.append(await answer.by(until, "nothing"))
        over.set()

    pending = Mailboxes()
    pending.start(account(1), waits("told", math.inf))
    pending.start(account(1), waits("told", time.monotonic()))
    over.clear()
    pending.start(account(1), waits("late", time.monotonic()))
    await asyncio.wait_for(over.wait(), 10)
    assert log == ["told", "told", "nothing"]
    assert not account(1).entries
