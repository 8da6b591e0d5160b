"""Leases of hits: counted for whoever asked as long as they pin anything, and ended few objects at a time."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from e2e.known import small_spec

from layerflow.flow.commands import Arrived, TransferDone
from layerflow.flow.events import Hop
from layerflow.hits import NO_BLOCKS, HitLength, Tail, search_bytes
from layerflow.keys import object_keys
from layerflow.objects import HEADER_BYTES
from layerflow.pool.base import NewObject
from layerflow.pool.memory import MemoryPool
from layerflow.server.account import ENTRY_BYTES, Accounts, Allowance, Refused
from layerflow.server.clients import ClientSession
from layerflow.server.handlers import lookup_requests
from layerflow.server.handlers.lookup_requests import LOCATED_BYTES, LookupRequest, kept_bytes
from layerflow.server.handlers.lookups import MOST_SEARCHES, LookupHandler
from layerflow.server.incoming import IncomingFetches, IncomingFetchJob, IncomingObjects
from layerflow.server.leases import PINNED_BYTES, PINS_PER_TURN, Leases, lease_owner
from layerflow.server.plans import PinnedHits, lookup_owner
from layerflow.wire import messages as wire
from layerflow.wire.rights import HERE, Rights, Role
from server.support import Memory

SHARE = 64 * ENTRY_BYTES
OBJECTS = 64
LEASE = ENTRY_BYTES + OBJECTS * PINNED_BYTES
COMING = 3
MOST_LEASES = 100
SPEC = small_spec(2, content="leases")


class World:
    """Leases of a pool with some objects, whose turns a test takes."""

    def __init__(self, stored: int = OBJECTS) -> None:
        self.turns: deque[Callable[[], None]] = deque()
        self.pool = MemoryPool(Memory(1 << 20))
        self.accounts = Accounts(lambda: Allowance(SHARE, 1 << 40))
        self.incoming = IncomingObjects(self.pool, lambda _: None)
        self.leases = Leases(self.pool, self.incoming, self.accounts, self.turns.append)
        self.digests = [number.to_bytes(16, "big") for number in range(stored + COMING)]
        keys = object_keys(self.digests, [0], SPEC.shard.peers())
        self.keys, self.coming = tuple(keys[:stored]), keys[stored:]
        self.pool.reserve([NewObject(key, HEADER_BYTES + 8, 1, 16) for key in self.keys], "writer")
        self.pool.commit(self.keys, "writer")

    def client(self, address: object = "client", engine: str = "e", rights: Rights = HERE) -> ClientSession:
        account = self.accounts.of(address)
        figures = SimpleNamespace(lookup_tokens=0, hit_tokens=0)
        told = SimpleNamespace(
            engine=engine,
            account=account,
            rights=rights,
            spec=SPEC,
            number=len(self.accounts),
            resets=0,
            hit_leases={},
            labels=(),
            figures=figures,
        )
        return cast(ClientSession, told)

    def begin(self) -> None:
        """What is coming is on its way, behind what is stored."""
        source = IncomingFetches(self.incoming, lambda _: True, lambda *_: None)
        job = IncomingFetchJob(1, source, list(self.coming), (0,), set(range(COMING)))
        self.incoming.add(job, [(0, 1)] * COMING)

    def look(
        self, asker: ClientSession, request: str, *, planned: bool = False, leaving: Sequence[bytes] = ()
    ) -> Iterator[object]:
        """A lookup that hits all that is stored and all that is coming, as tails where it is planned: its slices.

        :param leaving: of objects that it does not hit one leaves the arena, which has no store behind it, at each
            search.
        """
        left = iter(leaving)
        workers = [SimpleNamespace(number=7, direct=False)] if planned else []
        context = SimpleNamespace(
            pool=self.pool,
            driver=SimpleNamespace(incoming=self.incoming),
            leases=self.leases,
            settings=lambda: SimpleNamespace(max_leases=MOST_LEASES),
            sessions=SimpleNamespace(workers_of=lambda _: workers),
            sources=None if leaving else object(),
            plans=PinnedHits(self.pool, self.leases, lambda: 10.0),
            incarnation=1,
            recorder=SimpleNamespace(current=None),
            metrics=Mock(),
            send=lambda *_: None,
        )
        stored = len(self.keys) if planned else len(self.digests)
        tails = tuple(Tail(stored, 1, digest, 0) for digest in self.digests[stored:])
        tokens = stored * SPEC.chunk_tokens
        message = wire.Lookup(1, request, bytes(16), b"".join(self.digests), tokens + 1, 60_000, bytes(16))

        def search() -> Generator[None, None, HitLength]:
            yield from ()
            self.pool.hide([key for key in (next(left, b""),) if key])
            return HitLength(tokens, tails)

        asked = LookupRequest(message, self.digests, NO_BLOCKS, asker.resets)
        return cast(Any, LookupHandler(cast(Any, context))._find(asker, asked, 0.0, search).__await__())

    def lease(self, asker: ClientSession, request: str, until: float = math.inf, keys: tuple[bytes, ...] = ()) -> None:
        """As a lookup does it, of all objects or of some."""
        self.pool.acquire(keys or self.keys, "lookup", until)
        try:
            self.leases.keep(asker, request, "lookup", until)
        finally:
            self.leases.end("lookup")

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
    pins.append(world.pins())
    assert pins[0] - pins[1] == PINS_PER_TURN and len(world.turns) == 1, "the first end at once"
    world.pool.acquire(world.keys[:1], owners[0], math.inf)
    while world.turns:
        world.turn()
        pins.append(world.pins())
    assert pins[-1] == world.pool.pinned_by(owners[0]) == 1, "a lease that was made meanwhile stays"
    assert max(before - after for before, after in itertools.pairwise(pins[2:])) == PINS_PER_TURN


def test_many_small_leases_that_are_let_go_end_few_objects_a_round() -> None:
    world = World(4)
    for number in range(1000):
        world.pool.acquire(world.keys, lease_owner("e", f"r{number}"), math.inf)
    pins = [world.pins()]
    for number in range(1000):
        world.leases.let_go(lease_owner("e", f"r{number}"))
    pins.append(world.pins())
    while world.turns:
        world.turn()
        pins.append(world.pins())
    assert pins[-1] == 0
    assert max(before - after for before, after in itertools.pairwise(pins)) <= PINS_PER_TURN


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


def test_a_renewal_has_to_fit_by_what_it_is_more() -> None:
    world = World()
    asker = world.client()
    fit = SHARE // LEASE
    for number in range(fit):
        world.lease(asker, f"r{number}", 5.0)
    rest = SHARE - fit * LEASE
    asker.account.charge("all that is left", rest - ENTRY_BYTES)
    for number in range(fit):
        world.lease(asker, f"r{number}", 9.0)
    assert asker.account.nbytes == SHARE and world.pins() == fit * OBJECTS
    world.leases.expire(5.0)
    assert world.pins() == fit * OBJECTS, "each lasts as long as its renewal"


def test_a_plan_that_takes_over_a_lease_has_to_fit_by_what_it_is_more() -> None:
    world = World()
    asker, owner = world.client(), lease_owner("e", "r")
    world.lease(asker, "r", 5.0)
    world.begin()
    world.incoming.lease(world.coming, "lookup", 5.0)
    world.leases.keep(asker, "r", "lookup", 5.0)
    asker.account.charge("all that is left", SHARE - asker.account.nbytes - 2 * ENTRY_BYTES)
    world.pool.acquire(world.keys, "lookup", 9.0)
    charge = world.leases.charge_plan(asker, "r", "lookup")
    for giver in ("lookup", owner):
        world.pool.transfer_pins(giver, "plan", math.inf)
    assert asker.account.nbytes == SHARE, "what is still to come is the lease's, which has a record of its own"
    world.incoming.drop_lease(owner)
    charge.release()
    assert world.pool.pinned_by("plan") == OBJECTS
    assert asker.account.nbytes == SHARE - LEASE - COMING * PINNED_BYTES - ENTRY_BYTES


def test_a_request_with_a_plan_counts_until_that_ends_whatever_else_is_to_come() -> None:
    world = World()
    world.begin()
    asker = world.client()
    deque(world.look(asker, "r", planned=True))
    assert world.incoming.leased_by(lease_owner("e", "r")) == COMING
    assert asker.hit_leases == {"r": math.inf}
    assert asker.account.nbytes == LEASE + ENTRY_BYTES + COMING * PINNED_BYTES


@pytest.mark.parametrize("how", ["lost", "refused", "keeps too much"])
async def test_a_lookup_that_fails_ends_nothing_of_another_of_its_request(how: str) -> None:
    """Two ranks of one engine look up one request: of one, what is to come is leased and not counted yet."""
    world = World()
    world.begin()
    one, other = (world.client(address) for address in ("one", "other"))
    if how == "refused":
        one.hit_leases = {f"other {number}": math.inf for number in range(MOST_LEASES)}
    elif how == "keeps too much":
        one.account.charge("all that it may keep", SHARE - ENTRY_BYTES)
    its = world.look(other, "r")
    next(its)
    failing = world.look(one, "r")
    if how == "lost":
        next(failing)
        failing.close()
    else:
        with contextlib.suppress(Refused):
            deque(failing)
    deque(its)
    lease = lease_owner("e", "r")
    assert world.incoming.leased_by(lease) == len(world.coming) and world.pool.pinned_by(lease) == OBJECTS
    assert world.incoming.lease_owners() == {lease}
    while world.turns:
        world.turn()
    assert world.pins() == OBJECTS
    assert "r" in other.hit_leases and "r" not in one.hit_leases
    assert other.account.nbytes == LEASE + len(world.coming) * PINNED_BYTES


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


def test_leases_of_an_engine_end_in_slices_and_those_made_meanwhile_stay() -> None:
    """As where its weights are replaced: the same requests are looked up again, with the new ones."""
    world = World(4)
    asker, other = world.client("asker", "e"), world.client("other", "f")
    requests = [f"r{number}" for number in range(6)]
    for request in requests:
        world.lease(asker, request)
    world.lease(other, "r0")
    ending = world.leases.end_all("e")
    world.lease(asker, "r5")
    world.lease(asker, "new")
    held: list[int] = []
    while True:
        held.append(sum(world.leases.holds(lease_owner("e", request)) for request in requests))
        try:
            next(ending)
        except StopIteration as over:
            assert over.value == 5
            break
    assert held == [6, 5, 4, 3, 2, 1, 1], "one a slice"
    assert world.leases.holds(lease_owner("e", "new")) and world.leases.holds(lease_owner("e", "r5"))
    assert world.leases.holds(lease_owner("f", "r0"))
    world.leases.end(lease_owner("f", "r0"))
    deque(world.leases.end_all("e"))
    assert not world.leases._of_engine and not world.leases._charges and asker.account.nbytes == 0


def test_plans_of_an_engine_end_in_slices_and_those_told_meanwhile_stay() -> None:
    world = World(4)
    asker, plans = world.client(), PinnedHits(world.pool, world.leases, lambda: 10.0)

    def told(request: str) -> None:
        world.pool.acquire(world.keys, "lookup", math.inf)
        plans.keep(asker, request, [7], "lookup", world.leases.charge_plan(asker, request, "lookup"))

    for number in range(3):
        told(f"r{number}")
    ending = plans.reset("e")
    told("r0")
    plans.opened("e", "r2", 8)  # a worker that is not among its own has used it
    assert [len(plans) for _ in ending] == [3, 2, 2]
    assert asker.account.entries == 2 and "r0" in asker.hit_leases


async def test_a_reset_ends_what_a_client_leaves_that_goes_between_two_slices() -> None:
    world = World(4)
    clients = {name: world.client(name) for name in ("stays", "goes")}
    for name, client in clients.items():
        world.lease(client, name)
    plans = PinnedHits(world.pool, world.leases, lambda: 10.0)
    for request in ("told", "given back"):
        world.pool.acquire(world.keys, "lookup", math.inf)
        charge = world.leases.charge_plan(clients["goes"], request, "lookup")
        number = plans.keep(clients["goes"], request, [7], "lookup", charge)
    leases, told = world.leases.end_all("e"), plans.reset("e")
    next(leases)
    plans.drop("e", number, 9.0)
    world.close(clients["goes"], "goes")
    deque(leases)
    deque(told)
    while world.turns:
        world.turn()
    assert not len(plans) and not world.pins() and not world.accounts.nbytes
    assert not world.leases._overtaken


def test_a_lease_that_a_reset_is_to_end_lends_nothing_to_the_next_of_its_request() -> None:
    world = World(4)
    asker = world.client()
    world.lease(asker, "r")
    ending = world.leases.end_all("e")
    world.lease(asker, "r", keys=world.keys[:1])
    deque(ending)
    assert world.pool.pinned_by(lease_owner("e", "r")) == 1


def test_a_reset_ends_what_lookups_under_way_have_leased() -> None:
    """Nobody else does, until it has come or their time is over."""
    world = World(4)
    world.begin()
    mine, other = lookup_owner("e", "r", 1, 1), lookup_owner("f", "r", 2, 1)
    for owner in (mine, other):
        world.incoming.lease(world.coming, owner, math.inf)
        world.pool.acquire(world.keys, owner, math.inf)
    deque(world.leases.end_all("e"))
    assert world.incoming.lease_owners() == {other}
    assert (world.pool.pinned_by(mine), world.pool.pinned_by(other)) == (0, 4)


# Leases of remote keys, which end where others find no room.

ROOM = 32


class Shared(World):
    """Leases may pin half of the objects; each request is about eight of them."""

    def __init__(self) -> None:
        super().__init__()
        (self.nbytes,) = set(self.pool.unpinned(self.keys, "nobody"))
        self.pool._lease_share = (ROOM + 0.5) * self.nbytes / self.pool.statistics().capacity_bytes
        self.mine = self.client("mine")

    def begin_look(self, eighth: int) -> Iterator[object]:
        """A lookup of this machine's as of :meth:`ask`, whose first slice has run: the others."""
        digests = self.digests
        self.digests = digests[eighth * 8 : eighth * 8 + 8]
        slices = self.look(self.mine, f"r{eighth}")
        next(slices)
        self.digests = digests
        return slices

    def remote(self, key: str) -> ClientSession:
        return self.client(key, f"e@{key}", Rights(frozenset({Role.LOOK}), (), key))

    def ask(self, asker: ClientSession, eighth: int) -> int:
        """Look up objects of one eighth of all: how many of them are leased then."""
        digests, keys, self.digests = self.digests, self.keys[eighth * 8 : eighth * 8 + 8], self.digests[:]
        self.digests = digests[eighth * 8 : eighth * 8 + 8]
        try:
            deque(self.look(asker, f"r{eighth}"))
        finally:
            self.digests = digests
        owner = lease_owner(asker.engine, f"r{eighth}")
        assert len(self.pool.unpinned(keys, owner)) == 8 - self.pool.pinned_by(owner)
        return self.pool.pinned_by(owner)

    def held(self, asker: ClientSession) -> int:
        return sum(self.pool.pinned_by(lease_owner(asker.engine, f"r{eighth}")) for eighth in range(8))


def test_hits_of_this_machines_engines_are_pinned_whatever_a_remote_key_leases() -> None:
    world = Shared()
    remote = world.remote("k")
    assert [world.ask(remote, eighth) for eighth in range(5)] == [8, 8, 8, 8, 0], "alone it may lease all"
    assert world.ask(world.mine, 4) == 8
    assert world.held(remote) == 24 and not world.pool.pinned_by(lease_owner(remote.engine, "r0")), "its oldest ended"
    assert [world.ask(world.mine, eighth) for eighth in (5, 6, 7)] == [8, 8, 8]
    assert world.held(remote) == 0
    assert world.ask(remote, 0) == 0 and world.held(world.mine) == 32
    world.pool.validate()


def test_another_key_leases_an_equal_part_and_no_more() -> None:
    world = Shared()
    one, other = world.remote("one"), world.remote("other")
    assert [world.ask(one, eighth) for eighth in range(4)] == [8] * 4
    assert [world.ask(other, eighth) for eighth in range(4, 8)] == [8, 8, 0, 0]
    assert (world.held(one), world.held(other)) == (16, 16)
    assert world.ask(one, 0) == 0, "while the other one wants some"


def test_room_that_a_lease_has_made_is_not_for_its_key() -> None:
    """It looks up again, in its turn, before the other lookup goes on."""
    world = Shared()
    remote = world.remote("k")
    assert [world.ask(remote, eighth) for eighth in range(4)] == [8] * 4
    its = world.begin_look(4)
    assert world.held(remote) == 24
    assert world.ask(remote, 0) == 0
    deque(its)
    assert world.held(world.mine) == 8


def test_remote_keys_take_no_lease_of_this_machines_engines() -> None:
    world = Shared()
    assert [world.ask(world.mine, eighth) for eighth in range(4)] == [8] * 4
    assert world.ask(world.remote("k"), 4) == 0 and world.held(world.mine) == 32


def test_plans_of_remote_keys_leave_half_of_what_leases_may_pin() -> None:
    world = Shared()
    remote, plans = world.remote("k"), PinnedHits(world.pool, world.leases, lambda: 10.0)

    def plan(asker: ClientSession, eighth: int) -> int:
        world.pool.lease(world.keys[eighth * 8 : eighth * 8 + 8], "lookup", math.inf)
        try:
            charge = world.leases.charge_plan(asker, f"r{eighth}", "lookup")
            return plans.keep(asker, f"r{eighth}", [7], "lookup", charge)
        finally:
            world.leases.end("lookup")

    first, _ = plan(remote, 0), plan(remote, 1)
    with pytest.raises(Refused, match="remote keys' plans"):
        plan(remote, 2)
    assert plan(world.mine, 3) and plan(world.mine, 4), "this machine's have all that is left"
    plans.drop(remote.engine, first)
    assert plan(remote, 0)
    plans.reset(remote.engine)
    deque(plans.reset(remote.engine))
    world.leases.expire(0.0)
    assert not world.leases._of_keys and world.leases._share.nbytes == world.leases._planned == 0


async def test_what_a_remote_key_leases_is_counted_for_it_until_it_ends() -> None:
    world = Shared()
    remote = world.remote("k")
    world.ask(remote, 0)
    world.ask(remote, 0)
    assert world.leases._share.nbytes == 8 * world.nbytes, "once, however often it is looked up"
    world.close(remote, "k")
    assert world.leases._share.nbytes == 8 * world.nbytes, "it outlives its client"
    world.leases.end(lease_owner(remote.engine, "r0"))
    assert world.leases._share.nbytes == 0 and not world.leases._owners


def bring(world: Shared, asker: ClientSession, request: str, until: float = math.inf) -> Callable[[], None]:
    """Lease eight objects that are on their way, as a lookup does it; what is returned lets them come."""
    number = next(world.incoming.numbers)
    objects = [NewObject(b"%16d%8d" % (number, at), HEADER_BYTES + 8, 1, 16) for at in range(8)]
    keys = [new.key for new in objects]
    source = IncomingFetches(world.incoming, lambda _: True, lambda *_: None)
    job = IncomingFetchJob(number, source, keys, (0,), set(range(8)), objects=objects)
    world.pool.reserve(objects, job.owner)
    world.incoming.add(job, [(0, 1)] * 8)
    world.incoming.lease(keys, "lookup", until)
    world.leases.keep(asker, request, "lookup", until)

    def come() -> None:
        for few in (range(3), range(3, 8)):
            world.incoming.obey(Arrived(Hop.FETCH, number, tuple(few), ()))
        world.incoming.obey(TransferDone(Hop.FETCH, number))

    return come


def test_what_comes_for_a_lease_of_a_remote_key_counts_for_it_too() -> None:
    world = Shared()
    remote = world.remote("k")
    for number in range(4):
        bring(world, remote, f"r{number}")()
    assert world.held(remote) == 32 and world.leases._share.nbytes == 32 * world.nbytes
    assert [world.ask(world.mine, eighth) for eighth in range(2)] == [8, 8]
    assert world.held(remote) == 16 and not world.pool.pinned_by(lease_owner(remote.engine, "r1")), "its oldest ended"
    for number in range(4):
        world.leases.end(lease_owner(remote.engine, f"r{number}"))
    assert world.leases._share.nbytes == 0 and not world.leases._owners and not world.leases._of_keys
    world.pool.validate()


def test_what_comes_for_a_lease_that_a_plan_or_another_has_taken_pins_from_counts() -> None:
    world = Shared()
    remote, plans = world.remote("k"), PinnedHits(world.pool, world.leases, lambda: 10.0)
    coming = [bring(world, remote, "planned"), bring(world, remote, "ended")]
    for request, keys in (("planned", world.keys[:8]), ("ended", world.keys[8:16])):
        world.lease(remote, request, keys=keys)
    world.pool.lease(world.keys[:8], "lookup", math.inf)
    plans.keep(remote, "planned", [7], "lookup", world.leases.charge_plan(remote, "planned", "lookup"))
    world.leases.let_go(lease_owner(remote.engine, "ended"))
    assert world.leases._share.nbytes == 8 * world.nbytes, "of the plan"
    for come in coming:
        come()
    assert world.leases._share.nbytes == 24 * world.nbytes and world.leases._planned == 8 * world.nbytes


def test_what_comes_for_a_key_takes_no_room_that_was_made_by_it() -> None:
    world = Shared()
    remote = world.remote("k")
    come = bring(world, remote, "r4")
    assert [world.ask(remote, eighth) for eighth in range(4)] == [8] * 4
    its = world.begin_look(4)
    come()
    assert world.held(remote) == 24
    deque(its)
    assert world.held(world.mine) == 8
    assert not world.leases.holds(lease_owner(remote.engine, "r4"))


def test_what_does_not_come_for_a_key_is_not_remembered() -> None:
    world = Shared()
    remote = world.remote("k")
    bring(world, remote, "r0")
    world.incoming.drop_leases(lambda owner: True)
    assert not world.leases._of_keys and not world.leases._owners and not world.leases._share._parts


def room_for(asker: ClientSession, nbytes: int) -> None:
    """The client keeps so much that it may keep just this besides."""
    asker.account.charge("what else it keeps", SHARE - asker.account.nbytes - nbytes - ENTRY_BYTES)


def searching_bytes(world: World) -> int:
    """What a lookup of the world is counted for while it searches."""
    message = wire.Lookup(1, "r", bytes(16), b"".join(world.digests), 0, 60_000, bytes(16))
    return ENTRY_BYTES + kept_bytes(message) + search_bytes(SPEC, len(world.digests))


def test_what_a_lookup_pins_is_counted_once_however_often_it_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_requests, "RUNNING_BYTES", 0)
    world = World()
    asker = world.client()
    leaving = object_keys([os.urandom(16) for _ in range(MOST_SEARCHES)], [0], SPEC.shard.peers())
    world.pool.reserve([NewObject(key, HEADER_BYTES + 8, 1, 16) for key in leaving], "writer")
    world.pool.commit(leaving, "writer")
    room_for(asker, searching_bytes(world) + OBJECTS * PINNED_BYTES + len(world.digests) * LOCATED_BYTES)
    for _ in world.look(asker, "r", leaving=leaving):
        assert asker.account.nbytes <= SHARE
    assert world.pool.lookup(leaving) == [False] * MOST_SEARCHES, "it has searched as often as it may"
    assert "r" in asker.hit_leases and world.pool.pinned_by(lease_owner("e", "r")) == OBJECTS


@pytest.mark.parametrize("planned", [True, False], ids=["and planned", "and leased"])
def test_a_request_that_is_looked_up_again_needs_room_only_for_what_is_more(
    monkeypatch: pytest.MonkeyPatch, planned: bool
) -> None:
    monkeypatch.setattr(lookup_requests, "RUNNING_BYTES", 0)
    world = World()
    world.begin()
    asker = world.client()
    deque(world.look(asker, "r"))
    room = searching_bytes(world) + (ENTRY_BYTES if planned else 0)  # what is coming stays a lease beside the plan
    room_for(asker, room)
    asker.hit_leases.clear()
    deque(world.look(asker, "r", planned=planned))
    assert "r" in asker.hit_leases and (asker.hit_leases["r"] == math.inf) is planned
    assert asker.account.nbytes == SHARE - searching_bytes(world)
    deque(world.look(asker, "s"))
    assert "s" not in asker.hit_leases and not world.pool.pinned_by(lease_owner("e", "s")), "it has no lease yet"
