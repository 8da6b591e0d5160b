"""Messages in slices: in order for each client, in turn between clients, closed unfinished when a client is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from layerflow.server import clients
from layerflow.server.account import Account, Accounts, Allowance, Refused
from layerflow.server.clients import MAX_WAITING, Turns, Work


def work(log: list[str], name: str, slices: int) -> Work:
    try:
        for number in range(slices):
            log.append(f"{name}{number}")
            yield
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


async def run(turns_: Turns) -> None:
    while turns_.busy:  # noqa: ASYNC110 - the loop itself is what is tested
        await asyncio.sleep(0)


async def test_a_short_message_is_done_at_once(account: Open) -> None:
    log: list[str] = []
    pending = Turns()
    pending.start(account(1), work(log, "a", 0))
    assert log == ["a."]
    assert not pending.busy


async def test_clients_take_turns_and_each_stays_in_order(monkeypatch: pytest.MonkeyPatch, account: Open) -> None:
    monkeypatch.setattr(clients, "SLICE_S", 0.0)  # a slice ends at the first stop
    log: list[str] = []
    pending = Turns()
    pending.start(account(1), work(log, "a", 3))
    pending.start(account(1), work(log, "b", 0))
    pending.start(account(2), work(log, "c", 1))
    assert log == ["a0", "c0"], "what one client sends waits behind its own message, not behind another's"
    await run(pending)
    assert [entry for entry in log if entry[0] in "ab"] == ["a0", "a1", "a2", "a.", "b."]
    assert log.index("c.") < log.index("a."), "the short message of another client did not wait for the long one"


async def test_a_lost_client_s_messages_are_closed(monkeypatch: pytest.MonkeyPatch, account: Open) -> None:
    monkeypatch.setattr(clients, "SLICE_S", 0.0)
    log: list[str] = []
    pending = Turns()
    pending.start(account(1), work(log, "a", 3))
    pending.forget(account(1))
    assert log == ["a0", "a closed"]
    assert not pending.busy


async def test_a_message_that_raises_costs_only_itself(monkeypatch: pytest.MonkeyPatch, account: Open) -> None:
    monkeypatch.setattr(clients, "SLICE_S", 0.0)
    caught: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: caught.append(context["exception"]))

    def broken() -> Work:
        yield
        raise KeyError("a bug")

    log: list[str] = []
    pending = Turns()
    pending.start(account(1), broken())
    pending.start(account(1), work(log, "b", 0))
    monkeypatch.setattr(clients, "SLICE_S", 1.0)
    await asyncio.wait_for(run(pending), 10)
    assert [type(error) for error in caught] == [KeyError]
    assert log == ["b."]


async def test_what_may_wait_is_bounded(monkeypatch: pytest.MonkeyPatch, account: Open) -> None:
    monkeypatch.setattr(clients, "SLICE_S", 0.0)
    pending = Turns()
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
