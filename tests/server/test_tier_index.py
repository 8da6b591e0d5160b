"""The server's copy of an index that its host tells: whole once, and kept while the backend is away."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec import structs

from layerflow.config.settings import PoolSettings
from layerflow.expiring import ExpiringSet
from layerflow.hosts.backend import IndexEntry, ObjectStatus
from layerflow.pool.base import NewObject
from layerflow.server.incoming import IncomingObjects
from layerflow.server.tier import tier as tier_module
from layerflow.server.tier.tier import CLEARED_PER_SLICE, FREED_PER_SLICE, HIDE_S, Tier
from layerflow.wire.host_messages import Clear, Cleared, Down, Evicted, Indexed, ToServer, Up
from layerflow.wire.packing import pack_u32

KEYS = [bytes([number]) * 24 for number in range(4)]


class Pool:
    """Not asked for anything."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


@pytest.fixture
async def tier() -> AsyncIterator[Tier]:
    pool = Pool()
    incoming = IncomingObjects(pool, lambda events: None)
    made = Tier(
        "disk",
        {},
        PoolSettings(),
        pool=pool,
        arena=(0, 4096),
        emit=lambda events: None,
        incoming=incoming,
        changed=lambda key: None,
        turned=lambda: None,
    )
    yield made
    if made.partitions._timer is not None:
        made.partitions._timer.cancel()


def told(*keys: bytes, last: bool = True) -> ToServer:
    return Indexed(b"".join(keys), pack_u32([1] * len(keys)), pack_u32([16] * len(keys)), last=last)


async def test_an_index_is_offered_when_all_of_it_is_told(tier: Tier) -> None:
    tier.host_said(Up({}, True, 7))
    tier.host_said(told(KEYS[0], last=False))
    assert not tier.up and tier.holds(KEYS) == [False] * 4
    tier.host_said(told(KEYS[1]))
    assert tier.up and tier.holds(KEYS) == [True, True, False, False]


async def test_what_has_left_before_its_write_is_told_to_have_ended_is_not_listed(tier: Tier) -> None:
    """One call publishes many objects, and a purge removes the first of them meanwhile."""
    tier.host_said(Up({}, True, 7))
    tier.host_said(told(KEYS[0]))
    tier.host_said(told(*KEYS[1:3]))
    tier.host_said(Evicted(KEYS[1]))
    for key in KEYS[1:3]:
        tier._written(NewObject(key, 4096, 1, 16))
    assert tier.holds(KEYS) == [True, False, True, False]
    assert tier.statistics().indexed_objects == 2


async def test_whoever_hears_of_the_index_hears_that_what_could_not_be_read_is_written_anew(tier: Tier) -> None:
    listed: dict[bytes, bool] = {}
    tier._changed = lambda key: listed.update({key: tier.lists(key)})
    tier.host_said(Up({}, True, 7))
    tier.host_said(told(KEYS[0]))
    tier._read_failed(KEYS[0], ObjectStatus.BROKEN, "a flipped bit")
    tier.host_said(told(KEYS[0]))
    tier._written(NewObject(KEYS[0], 4096, 1, 16))
    assert listed == {KEYS[0]: True}


async def test_after_an_outage_the_same_index_is_offered_at_once(tier: Tier) -> None:
    tier.host_said(Up({}, True, 7))
    tier.host_said(told(*KEYS[:3]))
    tier.host_said(Down("it is away"))
    tier.host_said(Evicted(KEYS[1]))
    assert not tier.up and tier.holds(KEYS) == [False] * 4
    tier.host_said(Up({}, True, 7))
    assert tier.up and tier.holds(KEYS) == [True, False, True, False]


async def test_another_process_tells_all_of_its_own(tier: Tier) -> None:
    tier.host_said(Up({}, True, 7))
    tier.host_said(told(*KEYS[:3]))
    tier.host_said(Up({}, True, 8))
    assert not tier.up
    tier.host_said(told(KEYS[3]))
    assert tier.up and tier.holds(KEYS) == [False, False, False, True]


async def test_the_index_of_a_process_before_is_freed_in_slices(tier: Tier) -> None:
    keys, digests = [at.to_bytes(24, "big") for at in range(10 * FREED_PER_SLICE)], bytearray(b"d" * 16)
    index, shared = tier._index, bytes(digests)
    unused = sys.getrefcount(shared)
    index.add(IndexEntry(key, 1, 16, b"r" * 16, shared) for key in keys)
    each = (sys.getrefcount(shared) - unused) / len(keys)
    tier.host_said(Up({}, True, 8))
    assert tier.holds(keys[:4]) == [False] * 4
    left = [sys.getrefcount(shared) - unused]
    while left[-1] > 0:
        await asyncio.sleep(0)
        left.append(sys.getrefcount(shared) - unused)
    assert max(before - after for before, after in itertools.pairwise(left)) <= 2 * each * FREED_PER_SLICE
    assert len(left) > 4 and len(index) == 0


async def test_what_is_away_by_the_time_that_all_is_told_is_not_up(tier: Tier) -> None:
    tier.host_said(Up({}, True, 7))
    tier.host_said(told(KEYS[0], last=False))
    tier.host_said(Down("it is away"))
    tier.host_said(told(KEYS[1]))
    assert not tier.up
    tier.host_said(Up({}, True, 7))
    assert tier.up and tier.holds(KEYS) == [True, True, False, False]


async def purged(tier: Tier, keys: list[bytes], answers: list[Cleared | None]) -> tuple[list[Clear], Cleared]:
    """What a host is told that answers so (None = it is gone), and what the purge tells."""
    sent: list[Clear] = []

    def send(message: Clear) -> bool:
        sent.append(message)
        answer = answers.pop(0)
        if answer is not None:
            answer = structs.replace(answer, id=message.id)
            asyncio.get_running_loop().call_soon(tier.host_said, answer)
        return answer is not None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier._host, "send", send)
        cleared = await tier.clear(keys, 60.0)
    assert not answers and not tier._clearing
    return sent, cleared


async def test_a_host_is_told_of_more_of_a_purge_once_it_has_read_what_it_was_told(tier: Tier) -> None:
    keys = [at.to_bytes(24, "big") for at in range(3 * CLEARED_PER_SLICE + 1)]
    sent, cleared = await purged(tier, keys, [*[Cleared(0, 0)] * 3, Cleared(0, 5)])
    assert cleared.objects == 5 and not cleared.reason
    assert [len(message.keys) // 24 for message in sent] == [*[CLEARED_PER_SLICE] * 3, 1]
    assert b"".join(message.keys for message in sent) == b"".join(keys)
    assert [message.last for message in sent] == [False, False, False, True]
    assert len({message.id for message in sent}) == 1
    for answers, why in (
        ([Cleared(0, 0), None], "its host process is not running"),
        ([Cleared(0, 0), Cleared(0, 0, "unreachable")], "unreachable"),
    ):
        assert why in (await purged(tier, keys, answers))[1].reason
    sent, _ = await purged(tier, [], [Cleared(0, 0)])
    assert [(message.keys, message.last) for message in sent] == [(b"", True)]


@pytest.mark.parametrize("told_first", [0, 2])
async def test_a_purge_that_leaves_the_host_no_time_ends_with_a_reason(
    tier: Tier, told_first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What writes under way or the first messages have used up is not given to the last keys alone."""
    sent: list[Clear] = []

    def send(message: Clear) -> bool:
        sent.append(message)
        if len(sent) == told_first:
            monkeypatch.setattr(tier_module, "ANSWER_S", 60.0)
        asyncio.get_running_loop().call_soon(tier.host_said, Cleared(message.id, 0))
        return True

    monkeypatch.setattr(tier._host, "send", send)
    if not told_first:
        monkeypatch.setattr(tier_module, "ANSWER_S", 60.0)
    keys = [at.to_bytes(24, "big") for at in range(3 * CLEARED_PER_SLICE)]
    cleared = await tier.clear(keys, 60.0)
    assert "could not be told of all objects" in cleared.reason and not tier._clearing
    assert len(sent) == told_first and not any(message.last for message in sent)


async def test_a_backend_with_an_index_is_told_no_keys_of_a_purge(tier: Tier) -> None:
    tier.host_said(Up({}, True, 7))
    tier.host_said(told(*KEYS))
    sent, cleared = await purged(tier, [bytes(24)] * 3 * CLEARED_PER_SLICE, [Cleared(0, 4)])
    assert cleared.objects == 4
    assert [(message.keys, message.last) for message in sent] == [(b"", True)]


async def test_whoever_hears_of_the_index_hears_of_what_is_hidden_too(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else tells routers that what could not be read is offered again."""
    listed: dict[bytes, bool] = {}
    tier._changed = lambda key: listed.update({key: tier.lists(key)})
    now = 100.0
    monkeypatch.setattr(tier_module.time, "monotonic", lambda: now)
    tier.host_said(Up({}, True, 7))
    tier.host_said(told(*KEYS[:3]))
    listed.clear()
    tier.hide([KEYS[0]])
    tier._read_failed(KEYS[1], ObjectStatus.FAILED, "the disk was slow")
    assert listed == {KEYS[0]: False, KEYS[1]: False}
    tier._write_failed(KEYS[1], ObjectStatus.EXISTS, "it is there")
    assert listed == {KEYS[0]: False, KEYS[1]: True}
    now += HIDE_S - 1
    tier.expire(now)
    assert listed[KEYS[0]] is False
    now += 1
    tier.expire(now)
    assert listed[KEYS[0]] is True and tier.statistics().shunned_objects == 0
    monkeypatch.setattr(tier, "_hidden", ExpiringSet(2))
    tier.hide(KEYS[:3])
    assert listed == {KEYS[0]: True, KEYS[1]: False, KEYS[2]: False}, "of more than fit the first is offered again"
