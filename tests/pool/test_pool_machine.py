"""MemoryPool against a model that knows the rules but not the arena."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_contract import OBJECT, key_of, new

from layerflow.errors import PoolError
from layerflow.objects import HEADER_BYTES, check_header
from layerflow.pool.arena import Arena
from layerflow.pool.base import Located, ReserveStatus
from layerflow.pool.memory import MemoryPool
from layerflow.presence import PresenceWriter

CAPACITY = 16 * OBJECT
names = st.integers(0, 24)
batches = st.lists(names, min_size=1, max_size=8)
owners = st.sampled_from(["a", "b", "c"])
SIZES = (700, OBJECT, 3 * OBJECT, 5 * OBJECT + 64, 17 * OBJECT)


class PoolMachine(RuleBasedStateMachine):
    """The model: ready = name -> offset, writing = name -> (owner, offset), pins = (owner, offset) -> until."""

    @initialize()
    def start(self):
        self.arena = Arena(CAPACITY)
        self.presence = PresenceWriter(CAPACITY)
        self.pool = MemoryPool(self.arena, self.presence)
        self.now = 0.0
        self.ready: dict[int, tuple[int, int]] = {}
        self.writing: dict[int, tuple[str, int, int]] = {}
        self.hidden: dict[int, tuple[int, int]] = {}  # offset -> (name, size)
        self.pins: dict[tuple[str, int], float] = {}
        self.hits = self.misses = self.let_go_count = 0

    def nbytes(self, name: int) -> int:
        return SIZES[min(name // 6, 4)]

    def object(self, name: int):
        return new(name, self.nbytes(name), parent=key_of("parent") if name % 3 == 0 else b"")

    def pinned(self, offset: int) -> bool:
        return any(at == offset for _, at in self.pins)

    def held_bytes(self) -> int:
        ready = sum(size for offset, size in self.ready.values() if self.pinned(offset))
        return ready + sum(size for _, _, size in self.writing.values()) + sum(s for _, s in self.hidden.values())

    def unpin(self, dropped: list[tuple[str, int]]) -> None:
        for pin in dropped:
            del self.pins[pin]
        self.hidden = {offset: entry for offset, entry in self.hidden.items() if self.pinned(offset)}

    @rule(batch=batches, owner=owners)
    def reserve(self, batch, owner):
        if any(self.nbytes(name) <= CAPACITY for name in batch if name not in self.ready and name not in self.writing):
            self.unpin([pin for pin in self.pins if str(pin[0]).startswith("let go")])  # fewer than end at once
        evictions = self.pool.statistics().evictions
        results = self.pool.reserve([self.object(name) for name in batch], owner)
        evicted = self.pool.statistics().evictions - evictions
        still = {name for name in self.ready if self.pool.lookup([key_of(name)])[0]}
        gone = set(self.ready) - still
        assert len(gone) == evicted
        assert not any(self.pinned(self.ready[name][0]) for name in gone)
        refused: set[int] = set()
        any_new_room = False
        for name, result in zip(batch, results, strict=True):
            if name in self.ready:
                assert result.outcome is ReserveStatus.EXISTS
            elif name in self.writing:
                assert result.outcome is ReserveStatus.BUSY
            elif self.nbytes(name) > CAPACITY:
                assert result.outcome is ReserveStatus.TOO_LARGE
            elif result.outcome is ReserveStatus.RESERVED:
                assert name not in refused
                any_new_room = True
                self.writing[name] = (owner, result.offset, self.nbytes(name))
            else:
                assert result.outcome is ReserveStatus.FULL
                assert self.held_bytes()
                refused.add(name)
        assert any_new_room or not gone  # nothing is evicted for nothing
        for name in gone:
            del self.ready[name]

    @rule(name=names, owner=owners)
    def reserve_on_an_empty_enough_pool(self, name, owner):
        """Whatever is not held may be evicted: with nothing held, any object that can ever fit fits."""
        if self.held_bytes() or self.nbytes(name) > CAPACITY or name in self.ready:
            return
        self.reserve([name], owner)
        assert name in self.writing

    @rule(batch=batches, owner=owners)
    def commit(self, batch, owner):
        mine = {name for name in batch if name in self.writing and self.writing[name][0] == owner}
        assert self.pool.commit([key_of(name) for name in batch], owner) == len(mine)
        for name in mine:
            self.ready[name] = self.writing.pop(name)[1:]

    @rule(data=st.data())
    @precondition(lambda self: self.writing)
    def commit_what_is_being_written(self, data):
        name = data.draw(st.sampled_from(sorted(self.writing)))
        self.commit([name], self.writing[name][0])
        assert name in self.ready

    @rule(batch=batches, owner=owners)
    def revoke(self, batch, owner):
        mine = {name for name in batch if name in self.writing and self.writing[name][0] == owner}
        assert self.pool.revoke([key_of(name) for name in batch], owner) == len(mine)
        for name in mine:
            del self.writing[name]

    @rule(batch=batches, owner=owners, lease=st.sampled_from([0.0, 1.0, 5.0, math.inf]))
    def acquire(self, batch, owner, lease):
        until = self.now + lease
        places = self.pool.acquire([key_of(name) for name in batch], owner, until)
        for name, place in zip(batch, places, strict=True):
            assert (place is None) == (name not in self.ready)
            if place is None:
                self.misses += 1
                continue
            self.hits += 1
            assert place == Located(self.ready[name][0], 16, 256)
            # All pins of an owner end together.
            self.pins.setdefault((owner, place.offset), until)
            last = max(until, *(end for (other, _), end in self.pins.items() if other == owner))
            self.pins |= {pin: last for pin in self.pins if pin[0] == owner}

    @rule(data=st.data(), owner=owners, lease=st.sampled_from([0.0, 1.0, 5.0, math.inf]))
    @precondition(lambda self: self.ready)
    def acquire_what_is_there(self, data, owner, lease):
        self.acquire([data.draw(st.sampled_from(sorted(self.ready)))], owner, lease)

    @rule(batch=st.none() | batches, owner=owners)
    def release(self, batch, owner):
        self.pool.release(owner, None if batch is None else [key_of(name) for name in batch])
        named = {offset for name, (offset, _) in self.ready.items() if batch is None or name in batch}
        named |= {offset for offset, (name, _) in self.hidden.items() if batch is None or name in batch}
        self.unpin([pin for pin in self.pins if pin[0] == owner and pin[1] in named])

    @rule(passed=st.floats(0.0, 3.0), most=st.integers(1, 40))
    def expire(self, passed, most):
        self.now += passed
        overdue = [pin for pin, until in self.pins.items() if until <= self.now]
        ended = [self.pool.expire(self.now, most) for _ in range(len(overdue) // most + 1)]
        assert max(ended) <= most and sum(ended) == len(overdue)
        self.unpin(overdue)

    @rule(owner=owners)
    def let_go(self, owner):
        self.pool.let_go(owner)
        self.let_go_count += 1
        mine = [offset for other, offset in self.pins if other == owner]
        for offset in mine:
            del self.pins[owner, offset]
            self.pins[f"let go {self.let_go_count}", offset] = -math.inf

    @rule(batch=batches)
    def hide(self, batch):
        there = [name for name in dict.fromkeys(batch) if name in self.ready]
        assert self.pool.hide([key_of(name) for name in batch]) == len(there)
        self.now_hidden(there)

    @rule()
    def clear(self):
        assert self.pool.clear() == len(self.ready)
        self.now_hidden(list(self.ready))

    def now_hidden(self, there):
        for name in there:
            offset, size = self.ready.pop(name)
            if self.pinned(offset):
                self.hidden[offset] = (name, size)

    @rule(owner=owners)
    def drop_owner(self, owner):
        pins = [pin for pin in self.pins if pin[0] == owner]
        half = [name for name, entry in self.writing.items() if entry[0] == owner]
        assert self.pool.drop_owner(owner) == len(pins) + len(half)
        self.unpin(pins)
        for name in half:
            del self.writing[name]

    @invariant()
    def books_agree(self):
        self.pool.validate()
        now = self.pool.statistics()
        assert now.used_bytes <= now.capacity_bytes == CAPACITY
        assert (now.objects, now.half_written) == (len(self.ready), len(self.writing))
        assert (now.hits, now.misses) == (self.hits, self.misses)
        assert now.pinned == len({offset for _, offset in self.pins})
        assert self.pool.lookup([key_of(name) for name in range(25)]) == [name in self.ready for name in range(25)]

    @invariant()
    def the_presence_table_tells_what_lookup_would_find(self):
        """Exactly: the table is so large that 25 keys share no bucket of it beyond its room."""
        for name in range(25):
            assert self.presence.may_hold(key_of(name)) == self.pool.lookup([key_of(name)])[0]
        assert self.presence.may_hold_tails(key_of("parent")) == any(True for _ in self.pool.tails(key_of("parent")))

    @invariant()
    def ranges_never_overlap(self):
        ranges = [*self.ready.values(), *(entry[1:] for entry in self.writing.values())]
        ranges += [(offset, size) for offset, (_, size) in self.hidden.items()]
        end = 0
        for offset, size in sorted(ranges):
            assert offset >= end and offset % 64 == 0
            end = offset + size
        assert end <= CAPACITY

    @invariant()
    def exactly_the_complete_objects_have_headers(self):
        for name, (offset, _) in self.ready.items():
            check_header(self.arena.view[offset : offset + HEADER_BYTES], key_of(name), 16)
        for name, (_, offset, _) in self.writing.items():
            try:
                check_header(self.arena.view[offset : offset + HEADER_BYTES], key_of(name), 16)
            except PoolError:
                continue
            raise AssertionError("a half-written object verifies")

    @invariant()
    def tails_are_the_complete_partial_chunks(self):
        assert {key for _, key in self.pool.tails(key_of("parent"))} == {
            key_of(name) for name in self.ready if name % 3 == 0
        }


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
