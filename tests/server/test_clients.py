"""Clients that greet and say no more, and clients without memory that fall silent, are forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerflow.config.settings import Settings
from layerflow.server import clients as clients_module
from layerflow.server.account import Accounts, Allowance
from layerflow.server.clients import IDLE_S, LOCAL, MAX_GREETED, Clients, ClientSession, Sessions
from layerflow.wire import codec
from layerflow.wire.rights import HERE


class World:
    """Clients over sessions of its own; nothing is sent."""

    def __init__(self) -> None:
        self.sessions = Sessions(Accounts(lambda: Allowance(1 << 20, 1 << 30)))
        self.lost: list[tuple[int, str]] = []
        self.suspected: list[ClientSession] = []
        nowhere, nobody = Path("/nowhere"), lambda *_: None
        self.clients = Clients(
            Settings,
            self.sessions,
            nowhere,
            send=nobody,
            send_raw=nobody,
            lose=self._lose,
            suspect=self.suspected.append,
        )

    def _lose(self, session: ClientSession, why: str) -> None:
        self.lost.append((session.number, why))


def test_of_clients_that_only_greet_the_last_are_known() -> None:
    clients = World().clients
    addresses = [(LOCAL, number.to_bytes(4)) for number in range(MAX_GREETED + 2)]
    for address in addresses:
        clients.greet(address, codec.greeting())
    assert [clients.greeted(address) for address in addresses[:3]] == [False, False, True]
    assert clients.greeted(addresses[-1])


@pytest.mark.parametrize("may_write", [False, True])
def test_only_who_cannot_write_to_the_arena_is_lost_by_silence(
    monkeypatch: pytest.MonkeyPatch, may_write: bool
) -> None:
    world = World()
    session = world.sessions.open((LOCAL, b"quiet"), "engine", "test", 1, heard := 100.0)
    session.entered = session.at_fd_server = may_write
    monkeypatch.setattr(clients_module.time, "monotonic", lambda: heard + IDLE_S)
    world.clients.lose_silent(session)
    assert not world.lost
    monkeypatch.setattr(clients_module.time, "monotonic", lambda: heard + IDLE_S + 1)
    world.clients.lose_silent(session)
    assert world.lost == ([] if may_write else [(session.number, "idle")])
    assert session.silent == may_write


def test_a_server_that_reads_is_lost_by_silence_and_with_its_connection() -> None:
    world = World()
    reader = world.sessions.open_reader((LOCAL, b"peer"), "peer", 1, 100.0, HERE)
    assert (world.sessions.at(reader.address), world.sessions.readers(), len(world.sessions)) == (reader, [reader], 0)
    world.clients.lose_silent(reader)
    world.clients.disconnected(reader)
    assert world.lost == [(reader.number, "silent"), (reader.number, "hung_up")]
    world.sessions.close(reader)
    assert world.sessions.at(reader.address) is None and not world.sessions.all() and reader.account.closed
