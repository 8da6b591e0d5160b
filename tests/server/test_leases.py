"""Leases of hits: counted for whoever asked as long as they pin anything, and ended few objects at a time."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from layerflow.objects import HEADER_BYTES
from layerflow.pool.base import NewObject
from layerflow.pool.memory import MemoryPool
from layerflow.server.account import ENTRY_BYTES, Accounts, Allowance, Refused
from layerflow.server.clients import ClientSession
from layerflow.server.incoming import IncomingObjects
from layerflow.server.leases import PINNED_BYTES, PINS_PER_TURN, Leases, lease_owner
from layerflow.wire.rights import HERE
from server.support import Memory

SHARE = 64 * ENTRY_BYTES
OBJECTS = 64
LEASE = ENTRY_BYTES + OBJECTS * PINNED_BYTES


class World:
    """Leases of a pool with some objects, whose turns a test takes."""

    def __init__(self, stored: int = OBJECTS) -> None:
        self.turns: deque[Callable[[], None]] = deque()
        self.pool = MemoryPool(Memory(1 << 20))
        self.accounts = Accounts(lambda: Allowance(SHARE, 1 << 40))
        self.leases = Leases(self.pool, IncomingObjects(self.pool, lambda _: None), self.accounts, self.turns.append)
        self.keys = tuple(number.to_bytes(24, "big") for number in range(stored))
        self.pool.reserve([NewObject(key, HEADER_BYTES + 8, 1, 16) for key in self.keys], "writer")
        self.pool.commit(self.keys, "writer")

    def client(self, address: object = "client", engine: str = "e") -> ClientSession:
        account = self.accounts.of(address)
        return cast(ClientSession, SimpleNamespace(engine=engine, account=account, rights=HERE))

    def lease(self, asker: ClientSession, request: str, until: float = math.inf, keys: tuple[bytes, ...] = ()) -> None:
        """As a lookup does it, of all objects or of some."""
        self.pool.acquire(keys or self.keys, "lookup", until)
        owner = lease_owner(asker.engine, request)
        try:
            self.leases.charge(asker, request, self.pool.pinned_by("lookup"))
            self.pool.transfer_pins("lookup", owner, until)
        finally:
            self.leases.settle(owner)
            self.leases.let_go("lookup")

    def close(self, client: ClientSession, address: object) -> None:
        """It has gone, and all of what it keeps, which else takes turns."""
        self.accounts.close(address)
        while client.account.end_one():
            pass

    def pins(self) -> int:
        """Of all owners."""
        return sum(map(self.pool.pinned_by, self.pool.owners()))

    def turn(self) -> None:
        self.turns.popleft()()
        self.pool.validate()


def test_5000_leases_that_end_at_once_end_few_objects_a_turn() -> None:
    world = World(4)
    for number in range(5000):
        world.pool.acquire(world.keys, lease_owner("e", f"r{number}"), 5.0)
    pins = [world.pins()]
    world.leases.expire(4.9)
    assert world.pins() == pins[0] == 20_000 and not world.turns
    world.leases.expire(5.0)
    pins.append(world.pins())
    world.leases.expire(5.1)
    assert len(world.turns) == 1, "one turn is under way, however often it is looked at"
    while world.turns:
        world.turns.popleft()()
        pins.append(world.pins())
    assert pins[-1] == 0
    assert max(before - after for before, after in itertools.pairwise(pins)) == PINS_PER_TURN
    world.pool.validate()


def test_what_is_let_go_at_once_ends_in_turns_and_is_nobodys_meanwhile() -> None:
    """As all leases of an engine whose weights are replaced, or the plans of a scheduler that is gone."""
    world = World(2 * PINS_PER_TURN)
    owners = [lease_owner("e", f"r{number}") for number in range(3)]
    for owner in owners:
        world.pool.acquire(world.keys, owner, math.inf)
    pins = [world.pins()]
    for owner in owners:
        world.leases.let_go(owner)
        assert world.pool.copy_pins(owner, world.keys[:1], "step") is None
    assert world.pins() == pins[0]
    world.pool.acquire(world.keys[:1], owners[0], math.inf)
    while world.turns:
        world.turn()
        pins.append(world.pins())
    assert pins[-1] == world.pool.pinned_by(owners[0]) == 1, "a lease that was made meanwhile stays"
    assert max(before - after for before, after in itertools.pairwise(pins[1:])) == PINS_PER_TURN


def test_a_lease_is_counted_by_its_objects_until_it_ends() -> None:
    world = World()
    asker = world.client()
    world.lease(asker, "whole", 5.0)
    assert asker.account.nbytes == LEASE
    world.lease(asker, "few", 9.0, world.keys[:3])
    assert asker.account.nbytes == LEASE + ENTRY_BYTES + 3 * PINNED_BYTES
    world.lease(asker, "few", 9.0, world.keys[2:4])
    assert asker.account.nbytes == LEASE + ENTRY_BYTES + 4 * PINNED_BYTES, "its request is looked up again"
    world.leases.expire(5.0)
    assert asker.account.nbytes == ENTRY_BYTES + 4 * PINNED_BYTES
    world.pool.release(lease_owner("e", "few"), world.keys)
    assert asker.account.nbytes == world.accounts.nbytes == 0


def test_a_lease_that_does_not_fit_is_refused_and_pins_nothing() -> None:
    world = World()
    asker = world.client()
    fit = SHARE // LEASE
    for number in range(fit):
        world.lease(asker, f"r{number}")
    with pytest.raises(Refused, match=r"request 'more': the lease of a hit of .* server.max_client_bytes"):
        world.lease(asker, "more")
    assert asker.account.nbytes == fit * LEASE
    assert not world.pool.pinned_by(lease_owner("e", "more"))
    world.leases.let_go(lease_owner("e", "r0"))
    world.lease(asker, "more")


async def test_what_two_clients_of_an_engine_lease_for_a_request_is_counted_once() -> None:
    world = World()
    one, other = world.client("one"), world.client("other")
    world.lease(one, "r")
    world.lease(other, "r")
    assert (one.account.nbytes, other.account.nbytes) == (0, LEASE)
    world.close(one, "one")
    assert other.account.nbytes == LEASE


async def test_leases_outlive_their_clients_and_are_counted_with_what_others_of_the_engine_left() -> None:
    world = World()
    fit = SHARE // LEASE
    for session in range(3):
        asker = world.client(f"session {session}")
        for number in range(fit):
            world.lease(asker, f"{session} {number}", 5.0)
        world.close(asker, f"session {session}")
        leased = [owner for owner in world.pool.owners() if cast(Any, owner)[0] == "lease"]
        assert len(leased) == fit, "those of the first session stay, later ones find no room"
        assert world.accounts.nbytes == fit * LEASE
    other = world.client("other", "another engine")
    world.lease(other, "r", 9.0)
    world.close(other, "other")
    assert world.accounts.nbytes == (fit + 1) * LEASE and len(world.accounts) == 2
    world.leases.expire(5.0)
    while world.turns:
        world.turn()
    assert world.accounts.nbytes == LEASE and len(world.accounts) == 1
    world.leases.expire(9.0)
    assert world.accounts.nbytes == len(world.accounts) == world.pins() == 0
