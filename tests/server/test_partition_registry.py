"""Notes of partitions in a backend that several servers share: who writes, who reads, what a lost host leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from layerflow.hosts.backend import ObjectStatus
from layerflow.objects import HEADER_BYTES
from layerflow.pool.covering import CoveringPool
from layerflow.server.tier.partitions import FAILED_S, MOST_RECORDED, PAYLOAD_BYTES, PartitionRegistry, note_key
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard
from layerflow.wire.host_messages import (
    EndFetch,
    EndWrite,
    Fetch,
    Fetched,
    ObjectFailure,
    Pull,
    Push,
    ToHost,
    Write,
    Written,
    split_keys,
)
from layerflow.wire.packing import list_u64
from server.support import Memory

HEADS = 12


def spec_of(tp: int, stages: tuple[int, ...] = (4,), rank: int = 0) -> ModelSpec:
    shard = Shard(rank, tp, 0, len(stages), (HEADS,), (stages,))
    group = GroupSpec("full", 4, tuple(range(stages[0])), (Plane("k", "uint8", (shard.box(0).heads, 8)),))
    return ModelSpec("m", "c", (group,), shard, chunk_tokens=16)


class Node:
    """A server's pool and registry, and its host, which does what it is told when `work` is called.

    :param shared: what the backend holds, by key.
    """

    def __init__(self, shared: dict[bytes, bytes]) -> None:
        self.shared, self.up = shared, True
        self.pool = CoveringPool(Memory(1 << 20))
        self.later: list[float] = []
        self.asked: list[tuple[Sequence[bytes], Callable[[frozenset[bytes]], None]]] = []
        self.told: list[ToHost] = []
        self.places: dict[int, list[tuple[bytes, int]]] = {}
        self.registry = PartitionRegistry(
            self.pool, self.send, lambda *asked: self.asked.append(asked), lambda: self.up
        )
        self.registry._again = self.later.append  # type: ignore[method-assign]

    def send(self, message: ToHost) -> bool:
        self.told.append(message)
        return True

    def attach(self, *specs: ModelSpec) -> None:
        for spec in specs:
            self.pool.add_partition(spec)
            self.registry.add_partition(spec)

    def answer(self) -> None:
        """The questions that are open."""
        asked, self.asked = self.asked, []
        for keys, then in asked:
            then(frozenset(self.shared.keys() & set(keys)))

    def work(self) -> None:
        """Everything that the host was told."""
        while self.told:
            message = self.told.pop(0)
            match message:
                case Fetch() | Write():
                    offsets = list_u64(message.objects.offsets)
                    self.places[message.id] = list(zip(split_keys(message.objects.keys), offsets, strict=True))
                case Pull():
                    lost = []
                    for position, (key, offset) in enumerate(self.places[message.id]):
                        if key in self.shared:
                            self.pool.memory_at(offset, len(self.shared[key]))[:] = self.shared[key]
                        else:
                            lost.append(ObjectFailure(position, int(ObjectStatus.MISSING), "it has gone"))
                    assert self.registry.call_ended(Fetched(message.id, message.call, tuple(lost)))
                case Push():
                    [(key, offset)] = self.places[message.id]
                    failed: tuple[ObjectFailure, ...] = ()
                    if message.layer_lo == message.layer_hi and key in self.shared:
                        failed = (ObjectFailure(0, int(ObjectStatus.EXISTS), "another writer"),)
                    elif message.layer_lo == message.layer_hi:
                        self.shared[key] = bytes(self.pool.memory_at(offset, HEADER_BYTES + PAYLOAD_BYTES))
                    assert self.registry.call_ended(Written(message.id, message.call, failed))
                case EndFetch() | EndWrite():
                    del self.places[message.id]

    def settle(self) -> None:
        """Look until there is nothing left to do."""
        self.registry.refresh()
        while self.asked or self.told:
            self.answer()
            self.work()
        assert not self.places and not self.pool.statistics().used_bytes, "room was not given back"


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    shared: dict[bytes, bytes] = {}
    yield Node(shared), Node(shared)


def test_each_node_learns_what_the_others_store_in(nodes):
    one, two = nodes
    one.attach(spec_of(2), spec_of(2, rank=1))
    one.settle()
    two.attach(spec_of(1))
    two.settle()
    assert len(one.shared) == 2 and two.pool.covering(spec_of(1)) is two.pool
    assert one.pool.covering(spec_of(2)) is None, "it has not looked since"
    one.settle()
    assert one.pool.covering(spec_of(2)) is one.pool
    for node in nodes:
        node.settle()
        assert len(node.registry.recorded()[spec_of(1).fingerprint.hex()]) == 2
    assert len(one.shared) == 2, "nothing is noted twice"


def test_two_that_note_at_the_same_moment(nodes):
    one, two = nodes
    one.attach(spec_of(2))
    two.attach(spec_of(3))
    one.answer(), two.answer()  # both find the first number free
    one.work(), two.work()
    assert len(one.shared) == 1 and two.later[-1] == FAILED_S
    two.settle()
    assert len(one.shared) == 2 and two.pool.covering(spec_of(3)) is two.pool


def test_what_the_backend_has_evicted_is_noted_again(nodes):
    one, _ = nodes
    one.attach(spec_of(2))
    one.settle()
    one.shared.clear()
    one.settle()
    assert set(one.shared) == {note_key(spec_of(2).fingerprint, 0)}


def test_a_note_that_goes_before_it_is_read(nodes):
    one, two = nodes
    one.attach(spec_of(2))
    one.settle()
    two.attach(spec_of(1))
    two.answer()
    one.shared.clear()
    two.work()
    two.settle()
    assert two.pool.covering(spec_of(1)) is None and len(one.shared) == 1


def test_a_host_that_dies_leaves_no_room_taken_and_no_model_stuck(nodes):
    one, _ = nodes
    one.attach(spec_of(2))
    one.answer()
    assert one.pool.statistics().half_written
    one.told.clear(), one.places.clear()
    one.registry.lost()
    assert not one.pool.statistics().half_written
    one.settle()
    assert len(one.shared) == 1


def test_nothing_is_asked_while_the_backend_is_down(nodes):
    one, _ = nodes
    one.up = False
    one.attach(spec_of(2))
    assert not one.asked and not one.told and one.later


def test_another_models_note_is_not_believed(nodes):
    """Its heads or layers are others, or its bytes are no note at all."""
    one, two = nodes
    one.attach(spec_of(2))
    one.settle()
    key, note = one.shared.popitem()
    for wrong in (b"\xff" * len(note), bytes(len(note)), note.replace(bytes([HEADS]), bytes([HEADS + 1]), 1)):
        two.shared[key] = wrong
        two.attach(spec_of(1))
        two.settle()
        assert two.pool.covering(spec_of(1)) is None


def test_the_first_sixteen_are_noted(nodes):
    one, _ = nodes
    sizes = [(tp, stages) for tp in (1, 2, 3, 4, 6, 12) for stages in ((4,), (2, 2), (1, 3))]
    one.attach(*(spec_of(*size) for size in sizes))
    for _ in sizes:
        one.settle()
    assert len(one.shared) == MOST_RECORDED < len(sizes)
