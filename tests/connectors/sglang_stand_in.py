"""What layerflow's events for SGLang take from SGLang, where that is not installed: its shapes, with hashes of our own.

``tests/sglang/test_events.py`` compares the hashes with SGLang's recorder.
"""

from __future__ import annotations

import enum
import hashlib
import importlib
import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import zmq


class StorageMedium(enum.StrEnum):
    GPU = "GPU"
    CPU = "CPU_PINNED"
    DISK = "DISK"


@dataclass
class BlockStored:
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


@dataclass
class BlockRemoved:
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared:
    pass


@dataclass
class KVEventBatch:
    ts: float
    events: list[Any]


class ZmqEventPublisher:
    """A socket; what is published is kept."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:0") -> None:
        self._running = True
        self._pub: zmq.Socket[bytes] | None = None
        self._endpoint = endpoint
        self.batches: list[KVEventBatch] = []
        self._socket_setup()

    def _socket_setup(self) -> None:
        self._pub = zmq.Context.instance().socket(zmq.PUB)
        self._pub.bind(self._endpoint)

    @property
    def address(self) -> str:
        assert self._pub is not None
        return str(self._pub.getsockopt_string(zmq.LAST_ENDPOINT))

    def publish(self, events: KVEventBatch) -> None:
        self.batches.append(events)

    def shutdown(self) -> None:
        self._running = False
        if self._pub is not None:
            self._pub.close(0)


class EventPublisherFactory:
    _registry: ClassVar[dict[str, Any]] = {"zmq": ZmqEventPublisher}


class KVEventsConfig(SimpleNamespace):
    @classmethod
    def from_cli(cls, text: str) -> KVEventsConfig:
        return cls(**{"publisher": "null"} | json.loads(text))


def kv_event_namespace_seed(*, extra_key: str | None, cache_salt: str | None) -> bytes | None:
    if extra_key is None and cache_salt is None:
        return None
    return hashlib.sha256(repr((extra_key, cache_salt)).encode()).digest()


def namespaced_block_hash(block_hash: int, *, namespace_seed: bytes | None) -> int:
    if namespace_seed is None:
        return block_hash
    return hash_str_to_int64(hashlib.sha256(namespace_seed + block_hash.to_bytes(8, "big", signed=True)).hexdigest())


def hash_str_to_int64(text: str) -> int:
    return int.from_bytes(bytes.fromhex(text)[:8], "big", signed=True)


class RadixKey:
    def __init__(self, token_ids: array[int], extra_key: str | None = None, cache_salt: str | None = None) -> None:
        self.token_ids, self.extra_key, self.cache_salt = token_ids, extra_key, cache_salt

    def __len__(self) -> int:
        return len(self.token_ids)


def _hashes(tokens: Sequence[int], before: str, page: int) -> list[str]:
    found = []
    for at in range(0, len(tokens), page):
        before = hashlib.sha256(before.encode() + repr(list(tokens[at : at + page])).encode()).hexdigest()
        found.append(before)
    return found


def get_storage_hash_str(key: RadixKey, prior_hash: str | None, page_size: int) -> list[str]:
    return _hashes(key.token_ids, prior_hash or repr((key.extra_key, key.cache_salt)), page_size)


def compute_node_event_hash_values(node: Any, page_size: int) -> list[str]:
    """Without the extra key, which the seed of a namespace is for."""
    before = node.parent.event_hash_value[-1] if node.parent is not None else repr(node.key.cache_salt)
    return _hashes(node.key.token_ids, before, page_size)


class KVCacheEventRecorder:
    """Puts together events that go on with each other."""

    def __init__(self, *, enabled: bool, page_size: int) -> None:
        self._queue: list[Any] = []

    def enqueue(self, event: Any) -> None:
        tail = self._queue[-1] if self._queue else None
        follows = isinstance(tail, BlockStored) and isinstance(event, BlockStored)
        if follows and (tail.medium, tail.block_hashes[-1]) == (event.medium, event.parent_block_hash):
            tail.block_hashes += event.block_hashes
            tail.token_ids += event.token_ids
        else:
            self._queue.append(event)

    def take(self) -> list[Any]:
        return self._queue


FILES: dict[str, tuple[Any, ...]] = {
    "sglang.srt.disaggregation.kv_events": (
        AllBlocksCleared, BlockRemoved, BlockStored, EventPublisherFactory, KVEventBatch, KVEventsConfig, StorageMedium,
        ZmqEventPublisher, kv_event_namespace_seed, namespaced_block_hash,
    ),
    "sglang.srt.mem_cache.events": (KVCacheEventRecorder,),
    "sglang.srt.mem_cache.radix_cache": (RadixKey,),
    "sglang.srt.mem_cache.utils": (compute_node_event_hash_values, get_storage_hash_str, hash_str_to_int64),
}  # fmt: skip


def import_events() -> Any:
    """``layerflow.connectors.sglang.events``; nobody else sees the stand-ins."""
    name = "layerflow.connectors.sglang.events"
    sglang = find_spec("sglang")  # a package without a file is the tests' own folder of that name
    if sglang is not None and sglang.origin is not None:
        return importlib.import_module(name)
    with pytest.MonkeyPatch.context() as patch:
        for file, members in FILES.items():
            parts = file.split(".")
            for end in range(1, len(parts)):
                patch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
            stand_in = ModuleType(file)
            for member in members:
                setattr(stand_in, member.__name__, member)
            patch.setitem(sys.modules, file, stand_in)
        return importlib.import_module(name)
