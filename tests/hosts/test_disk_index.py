"""The disk's index: what is reserved counts once, until it is published or given up."""

from __future__ import annotations

from layerflow.hosts.backend import ObjectStatus
from layerflow.hosts.disk.folder import StoredFile
from layerflow.hosts.disk.index import DiskIndex


def stored(number: int) -> StoredFile:
    return StoredFile(number.to_bytes(24, "big"), 2, 4096, 1, 16, b"")


def test_what_is_reserved_counts_until_it_is_published_or_given_up():
    files = [stored(number) for number in range(6)]
    room = files[0].room
    index = DiskIndex(4 * room)
    free = 1 << 40
    outcomes = [index.reserve(file, free)[0] for file in files[:5]]
    assert outcomes == [ObjectStatus.OK] * 4 + [ObjectStatus.FULL]
    assert index.reserved_bytes == index.statistics().reserved_bytes == 4 * room
    index.release(files[0])
    index.release(files[0])
    assert index.reserved_bytes == 3 * room
    index.publish(files[1])
    index.publish(stored(1))  # written by nobody who had reserved it
    assert index.reserved_bytes == 2 * room
    assert index.reserve(files[4], free) == (ObjectStatus.OK, [])
    status, victims = index.reserve(files[5], free)
    assert status is ObjectStatus.OK and len(victims) == 1, "what is published makes room, what is reserved does not"
    assert index.reserved_bytes == 4 * room
    index.validate()


def test_a_reservation_does_not_sum_the_others():
    index = DiskIndex(1 << 50)

    class Counting(dict):
        looks = 0

        def values(self):
            Counting.looks += 1
            return super().values()

    index._reserved = Counting()
    for number in range(100):
        index.reserve(stored(number), 1 << 50)
    assert Counting.looks == 0 and index.reserved_bytes == 100 * stored(0).room
