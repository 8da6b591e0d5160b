"""Links by way of windows, over a library of this file: turns, objects larger than one, reads that hang or lie."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from e2e.known import eventually

from layerflow.hosts.backend import ObjectLocation, ObjectStatus
from layerflow.hosts.peer import windowed
from layerflow.hosts.peer.exporter import Links
from layerflow.hosts.peer.grants import Grants
from layerflow.hosts.peer.windowed import (
    SECTIONS,
    TURN_BYTES,
    LinkFailed,
    PlaneRead,
    ReadTimedOut,
    TransferLibrary,
    Window,
    WindowedLink,
    WindowLender,
)
from layerflow.objects import HEADER_BYTES, pack_header
from layerflow.system.memfd import SharedMemory
from layerflow.wire.host_messages import Lend
from layerflow.wire.packing import pack_u32, pack_u64
from layerflow.wire.peer_link import Origin, reader_key_of

INCARNATION, TOKEN, READER = b"i" * 16, b"t" * 16, b"r" * 16
EXPORTER_KEY, LEASE_KEY = b"e" * 32, b"l" * 32
LAYERS, LAYER_BYTES, COUNT = 3, TURN_BYTES // 2 + 4096 + 64, 4
PAYLOAD = LAYERS * LAYER_BYTES
STRIDE = HEADER_BYTES + PAYLOAD + 64


class Local(TransferLibrary):
    """A library within one process: a window is known by its address."""

    windows: dict[int, Window] = {}  # noqa: RUF012 - of this test's process
    mode = ""

    @classmethod
    def load(cls) -> None:
        """Nothing."""

    def __init__(self, window: Window, host: str) -> None:
        self.window, self.remote, self.late = window, 0, []
        self.windows[window.address] = window

    def describe(self) -> bytes:
        return self.window.address.to_bytes(8, "little")

    def connect(self, described: bytes, host: str) -> None:
        self.remote = int.from_bytes(described, "little")

    def read(self, local: int, remote: int, nbytes: int) -> PlaneRead:
        def copy() -> None:
            self.window.view[local : local + nbytes] = self.windows[self.remote].view[remote : remote + nbytes]

        return _Copy(self, copy)

    def close(self) -> None:
        self.windows.pop(self.window.address, None)


class _Copy(PlaneRead):
    def __init__(self, plane: Local, copy) -> None:
        self._plane, self._copy = plane, copy

    def wait(self, until: float) -> None:
        if self._plane.mode == "hangs":
            self._plane.late.append(self._copy)
            raise ReadTimedOut("it hangs")
        if self._plane.mode == "fails":
            raise LinkFailed("it fails")
        self._copy()


class Both:
    """An exporter's links over one arena, a reader's end over another: neither is mapped by its link."""

    def __init__(self) -> None:
        nbytes = -(-COUNT * STRIDE // 4096) * 4096
        self.source, self.target = SharedMemory.create(nbytes), SharedMemory.create(nbytes)
        unmapped = SharedMemory.attach(self.source.fd, nbytes, mapped=False)
        self.into = SharedMemory.attach(self.target.fd, nbytes, mapped=False)
        self.withdrawn: list[int] = []
        self.grants = Grants(self.withdrawn.append, nbytes)
        self.lender = WindowLender(unmapped, "127.0.0.1", Local)
        where = ("127.0.0.1", 0)
        self.links = Links(
            unmapped,
            self.lender,
            self.grants,
            address=where,
            incarnation=INCARNATION,
            exporter_key=EXPORTER_KEY,
            ended=lambda: None,
        )
        self.links.start()
        self.source.array[:] = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
        keys, self.places = [], []
        for at in range(COUNT):
            keys.append(bytes([at + 1]) * 24)
            header = pack_header(keys[-1], blocks=2, tokens=16, payload=PAYLOAD)
            self.source.view[at * STRIDE : at * STRIDE + HEADER_BYTES] = header
            self.places.append(ObjectLocation(keys[-1], at * STRIDE, 0, LAYER_BYTES, LAYERS, 2, 16, position=at))
        sizes = pack_u64([HEADER_BYTES + PAYLOAD] * COUNT)
        offsets = pack_u64([at * STRIDE for at in range(COUNT)])
        positions, blocks = pack_u32(range(COUNT)), pack_u32([2] * COUNT)
        self.grants.lend(Lend(7, TOKEN, positions, b"".join(keys), offsets, sizes, blocks, sizes, LEASE_KEY))
        address, key = f"127.0.0.1:{self.links.port}", reader_key_of(EXPORTER_KEY, READER)
        self.origin = Origin("owner", "local", address, INCARNATION, READER, key, TOKEN, LEASE_KEY)

    def connect(self, reader: bytes = READER) -> WindowedLink:
        origin = msgspec.structs.replace(self.origin, reader=reader, reader_key=reader_key_of(EXPORTER_KEY, reader))
        return WindowedLink(self.into, origin, time.monotonic() + 10, Local)

    def read(self, link: WindowedLink, lo: int, hi: int) -> list[ObjectStatus]:
        return [result.outcome for result in link.read(self.origin, self.places, lo, hi, time.monotonic() + 10)]

    def assert_came(self, lo: int, hi: int) -> None:
        for place in self.places:
            span = slice(place.offset + place.start(lo), place.offset + place.start(hi))
            assert np.array_equal(self.source.array[span], self.target.array[span])

    def assert_nothing_else_came(self, lo: int, hi: int) -> None:
        mask = np.ones(self.target.nbytes, dtype=bool)
        for place in self.places:
            mask[place.offset + place.start(lo) : place.offset + place.start(hi)] = False
        assert not self.target.array[mask].any()


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    monkeypatch.setattr(windowed, "_hanging", [])
    Local.mode = ""
    yield Both()


def test_layers_larger_than_a_turn_come_whole_and_nothing_else_does(both: Both) -> None:
    link = both.connect()
    assert both.read(link, 1, 3) == [ObjectStatus.OK] * COUNT
    both.assert_came(1, 3)
    both.assert_nothing_else_came(1, 3)
    link.close()


def test_a_library_that_does_not_reach_the_other_end_has_left_before_its_window_goes(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(self: Local, described: bytes, host: str) -> None:
        raise LinkFailed("no way there")

    registered = set(Local.windows)
    monkeypatch.setattr(Local, "connect", unreachable)
    with pytest.raises(LinkFailed, match="no way there"):
        both.connect()
    assert set(Local.windows) == registered


def test_what_is_withdrawn_does_not_count(both: Both) -> None:
    link = both.connect()
    both.grants.withdraw(7)
    assert both.withdrawn == [7]
    assert set(both.read(link, 0, 1)) == {ObjectStatus.EXPIRED}
    both.assert_nothing_else_came(0, 0)
    link.close()


def test_a_place_that_another_object_took_does_not_count(both: Both) -> None:
    link = both.connect()
    both.source.view[:HEADER_BYTES] = bytes(HEADER_BYTES)
    assert both.read(link, 0, 1) == [ObjectStatus.EXPIRED] + [ObjectStatus.OK] * (COUNT - 1)
    link.close()


def test_a_read_that_hangs_lands_nowhere_in_use(both: Both) -> None:
    link = both.connect()
    Local.mode = "hangs"
    with pytest.raises(ReadTimedOut):
        both.read(link, 0, 1)
    late = link._plane.late
    link.close()
    Local.mode = ""
    again = both.connect()
    assert both.read(again, 0, 1) == [ObjectStatus.OK] * COUNT
    before = both.target.array.copy()
    for copy in late:
        copy()
    assert np.array_equal(both.target.array, before)
    assert again._window.address != link._window.address
    again.close()


def test_too_many_reads_that_hang_end_the_process(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    Local.mode = "hangs"
    for _ in range(windowed.MAX_HANGING + 1):
        link = both.connect()
        with pytest.raises(ReadTimedOut):
            both.read(link, 0, 1)
        link.close()
    assert ended == [windowed.HUNG]


def test_what_was_altered_in_a_window_does_not_count_nor_land(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a fault, or by who reaches the library's data plane."""
    link = both.connect()
    copy = _Copy.wait

    def spoilt(self: _Copy, until: float) -> None:
        copy(self, until)
        self._plane.window.view[5 * TURN_BYTES // 2] ^= 1

    monkeypatch.setattr(_Copy, "wait", spoilt)
    results = both.read(link, 0, 3)
    assert ObjectStatus.BROKEN in results and set(results) <= {ObjectStatus.OK, ObjectStatus.BROKEN}
    for place, result in zip(both.places, results, strict=True):
        if result is ObjectStatus.OK:
            span = slice(place.offset + HEADER_BYTES, place.offset + place.nbytes)
            assert np.array_equal(both.source.array[span], both.target.array[span])
    link.close()


def test_a_library_that_fails_fails_the_link(both: Both) -> None:
    link = both.connect()
    Local.mode = "fails"
    with pytest.raises(LinkFailed):
        both.read(link, 0, 1)
    link.close()


def test_a_window_of_another_exporter_or_an_earlier_turn_does_not_count(both: Both) -> None:
    link = both.connect()
    other = Window(both.lender.window.nbytes)
    Local.windows[link._plane.remote] = other
    with pytest.raises(LinkFailed, match="another window"):
        both.read(link, 0, 1)
    link.close()
    Local.windows[both.lender.window.address] = both.lender.window
    again = both.connect()
    both.read(again, 0, 1)
    stale = bytes(both.lender.window.view)
    other.view[:] = stale
    Local.windows[again._plane.remote] = other
    with pytest.raises(LinkFailed, match="another window"):
        both.read(again, 0, 1)
    again.close()


def test_sections_come_back_and_one_more_reader_than_there_are_has_that_of_the_longest_idle(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windowed, "FREE_S", 60.0)
    held = [both.connect(bytes([number]) * 16) for number in range(SECTIONS)]
    assert not any(link.closed for link in held)
    held.append(both.connect())
    assert [at for at, link in enumerate(held) if link.closed] == [0]
    held.pop().close()
    assert eventually(lambda: len(both.lender._free) == 1)
    held.append(both.connect())
    assert [at for at, link in enumerate(held) if link.closed] == [0]
    for link in held:
        link.close()
