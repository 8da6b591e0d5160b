"""Clients that greet and say no more, and clients without memory that fall silent, are forgotten."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from layerflow.config.settings import Settings
from layerflow.server import clients as clients_module
from layerflow.server.account import Accounts, Allowance
from layerflow.server.clients import (
    IDLE_S,
    LOCAL,
    MAX_GREETED,
    Clients,
    ClientSession,
    Sessions,
    first_to_go,
)
from layerflow.wire import codec
from layerflow.wire.rights import HERE, Rights


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


def sessions_of(*clients: tuple[str, float]) -> list[ClientSession]:
    """A session of each key, heard at this time."""
    sessions, pid = World().sessions, 1
    return [
        sessions.open(
            (LOCAL, bytes([number])), f"e{number}", "test", pid, heard_at, rights=Rights(frozenset(), (), key)
        )
        for number, (key, heard_at) in enumerate(clients)
    ]


def test_of_the_key_with_most_clients_the_one_silent_longest_makes_room() -> None:
    clients = sessions_of(("a", 1.0), ("b", 5.0), ("b", 3.0), ("b", 4.0))
    assert first_to_go(clients, "c") is clients[2]
    assert first_to_go(clients, "a") is clients[2]
    assert first_to_go(clients, "b") is clients[2]
    assert first_to_go(clients[:3], "a") is clients[0], "it has as many as the other with the new one"
    assert first_to_go([], "a") is None


def test_where_no_key_has_more_than_another_who_was_silent_longest_makes_room() -> None:
    clients = sessions_of(("a", 3.0), ("b", 2.0), ("c", 4.0))
    assert first_to_go(clients, "d") is clients[1]


def test_who_has_something_open_or_serves_an_engine_makes_room_last() -> None:
    busy, engine, idle = sessions_of(("a", 1.0), ("a", 2.0), ("a", 3.0))
    charge = busy.account.charge("a hand-off")
    engine.spec = SimpleNamespace()  # type: ignore[assignment]
    assert first_to_go([busy, engine, idle], "b") is idle
    assert first_to_go([busy, engine], "b") is engine
    charge.release()
    assert first_to_go([busy, engine, idle], "b") is busy


def test_clients_of_this_machine_count_by_their_process() -> None:
    sessions = World().sessions
    mine, other = (sessions.open((LOCAL, bytes([pid])), "e", "test", pid, float(pid)) for pid in (1, 2))
    assert (mine.principal, other.principal) == ("pid 1", "pid 2")
    assert first_to_go([mine, other], other.principal) is other
