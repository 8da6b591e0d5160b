"""KV cache events: what the pool holds, in SGLang's pages and hashes, on SGLang's publisher (``--kv-events-config``).

SGLang publishes what its own cache holds, with each step and while it is idle. On the same channel the announcer thread
publishes what the pool holds. The linker is called with page hashes, from which SGLang cannot make its event hashes: so
hooks show the prompts themselves, see :func:`.plugin.hook_events`.
"""

from __future__ import annotations

import functools
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import structlog
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVEventBatch,
    KVEventsConfig,
    StorageMedium,
    ZmqEventPublisher,
    kv_event_namespace_seed,
    namespaced_block_hash,
)
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import compute_node_event_hash_values, get_storage_hash_str, hash_str_to_int64

from layerflow.agent.control import Control
from layerflow.connectors.common.announcer import Announcer
from layerflow.connectors.common.block_ledger import (
    TOKEN_BYTES,
    BlockEvent,
    BlockGroup,
    BlockLedger,
    Hash,
    StoredBlocks,
)
from layerflow.connectors.common.publisher import EnginePublisher, WatchedPublisher
from layerflow.keys import HashedChain, root_digest
from layerflow.spec import ModelSpec
from layerflow.wire.messages import ChunkChange, ChunkDescription

MEDIUMS = {1: StorageMedium.CPU, 2: StorageMedium.DISK}
"""By state of a chunk."""

MOST_TOKEN = 2**32 - 1
"""A prompt with a larger one is not described: descriptions have 4 bytes for each."""

MOST_NAMESPACE = 1024
"""Bytes. A prompt with a longer one is not described: each of its pages would have it."""

HASH_BYTES = 32
"""Of a page's hash in SGLang; what is behind it in a :data:`Hash` is the seed of its namespace, or nothing."""


log = structlog.get_logger("layerflow.sglang")


class _WatchedPublisher(WatchedPublisher, ZmqEventPublisher):  # type: ignore[misc]
    forgetting = AllBlocksCleared


# What a page is to SGLang: its tokens, and the namespace of its request.


class Namespace(NamedTuple):
    """What of a request besides tokens decides SGLang's hashes of its pages.

    :param extra_key: SGLang's, an adapter's id included. :param lora_name: the adapter's, as routers are told it.
    """

    extra_key: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None

    def packed(self) -> bytes:
        """For a description; empty = there is nothing."""
        return msgspec.msgpack.encode(self) if any(each is not None for each in self) else b""

    @staticmethod
    def of(extra: bytes) -> Namespace:
        """From a description.

        :raises msgspec.MsgspecError: it is none.
        """
        return Namespace(*_NAMESPACE.decode(extra)) if extra else Namespace()


_NAMESPACE = msgspec.msgpack.Decoder(tuple[str | None, str | None, str | None])


class _Prompt(NamedTuple):
    """:param tokens: SGLang's own array, which it appends to. :param length: of them, those that are meant."""

    tokens: array[int]
    length: int
    extra_key: str | None
    cache_salt: str | None


@dataclass(slots=True)
class _Node:
    """A node of SGLang's tree, as far as its hashes go."""

    key: Any
    parent: _Node | None
    hash_value: list[str] | None = None
    event_hash_value: list[str] | None = None


class PageHashes:
    """SGLang's hashes of pages, as its events have them.

    :param page: tokens of a page. :param dynamo: SGLang's format of events is ``dynamo``: every namespace counts, where
        the default one tells adapters apart only.
    """

    def __init__(self, page: int, dynamo: bool) -> None:
        self._page = page
        self._dynamo = dynamo

    def of_chunk(self, before: Hash | None, chunk: ChunkChange) -> list[Hash]:
        """The hash of a chunk, which is a page.

        :param before: of the page before; None = there is none.
        :raises Exception: the chunk cannot be read. What this returns for can be published, too.
        """
        if len(chunk.tokens) != self._page * TOKEN_BYTES:
            raise ValueError(f"{len(chunk.tokens)} bytes of tokens, where a page has {self._page}")
        namespace = Namespace.of(chunk.extra)
        ids = array("I")
        ids.frombytes(chunk.tokens)
        key = RadixKey(ids, namespace.extra_key, cache_salt=namespace.cache_salt)
        parent = None
        if before is not None:
            last = [before[:HASH_BYTES].hex()]
            parent = _Node(key, None, last, last)
        (found,) = compute_node_event_hash_values(_Node(key, parent), self._page)
        return [bytes.fromhex(found) + (self._seed(namespace) or b"")]

    def published(self, page: Hash) -> int:
        """A page's hash as routers are told it."""
        number = hash_str_to_int64(page[:HASH_BYTES].hex())
        return int(namespaced_block_hash(number, namespace_seed=page[HASH_BYTES:] or None))

    def _seed(self, namespace: Namespace) -> bytes | None:
        """By the rule of SGLang's KVCacheEventRecorder."""
        if self._dynamo:
            seed = kv_event_namespace_seed(extra_key=namespace.extra_key, cache_salt=namespace.cache_salt)
        else:
            extra_key = namespace.extra_key if namespace.lora_name is not None else None
            seed = kv_event_namespace_seed(extra_key=extra_key, cache_salt=None)
        return bytes(seed) if seed is not None else None


class SglangRouter(EnginePublisher):
    """SGLang's publisher. Its scheduler makes it after its cache, and so after the linker.

    :param kind: of publisher, by SGLang's configuration.
    """

    def __init__(self, kind: str, page: int, hashes: PageHashes) -> None:
        super().__init__(EventPublisherFactory._registry, kind, _WatchedPublisher)
        self._page = page
        self._hashes = hashes

    def batch(self, events: Sequence[BlockEvent]) -> KVEventBatch:
        """SGLang's own events of these, put together as SGLang does."""
        recorder = KVCacheEventRecorder(enabled=True, page_size=self._page)
        for event in events:
            recorder.enqueue(self._event(event))
        return KVEventBatch(ts=time.time(), events=recorder.take())

    def _event(self, event: BlockEvent) -> BlockRemoved | BlockStored:
        hashes, medium = [self._hashes.published(page) for page in event.hashes], MEDIUMS[event.state]
        if not isinstance(event, StoredBlocks):
            return BlockRemoved(block_hashes=hashes, medium=medium)
        namespace = Namespace.of(event.extra)
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=self._hashes.published(event.parent) if event.parent is not None else None,
            token_ids=np.frombuffer(event.tokens, np.uint32).tolist(),
            block_size=event.block_tokens,
            lora_id=None,
            medium=medium,
            cache_salt=namespace.cache_salt,
            lora_name=namespace.lora_name,
        )


class PoolEvents:
    """For the scheduler's thread, which puts prompts into a list and nothing more.

    :param publisher: the kind, by SGLang's configuration. :param dynamo: as of :class:`PageHashes`.
    :param page: tokens of a page.
    :param sources: of layerflow's groups, those that hold layers which see every token: as of SGLang's own events.
    :param names: SGLang's table of adapters' names, ``KvEventLoraNames``.
    """

    def __init__(self, publisher: str, *, page: int, dynamo: bool, sources: Sequence[int], names: Any) -> None:
        self._page = page
        self._sources = tuple(sources)
        self._name = names.resolve if dynamo else names.get
        self._hashes = PageHashes(page, dynamo)
        self._router = SglangRouter(publisher, page, self._hashes)
        self._root = b""
        self._model = b""  #: fingerprint; empty = none can be hit
        self._announcer: Announcer | None = None
        self._inserting: Any = None

    def begin(self, spec: ModelSpec, connect: Callable[[ModelSpec], Control]) -> None:
        """What the pool holds of this model can be hit from here on, and of no other.

        :param connect: makes a client of the server, attached with a model's spec.
        """
        if spec.fingerprint == self._model:
            return
        self._model, self._root = spec.fingerprint, root_digest(spec.fingerprint)
        ledger = BlockLedger([BlockGroup(0, self._page, self._sources, True)], self._page, self._hashes.of_chunk)
        client = functools.partial(connect, spec)
        if self._announcer is None:
            self._announcer = Announcer(client, ledger, self._router).start()
        else:
            self._announcer.replace(client, ledger)

    def withdraw(self) -> None:
        """Nothing can be hit until :meth:`begin`."""
        if self._model and self._announcer is not None:
            self._model = b""
            self._announcer.withdraw()

    def inserting(self, key: Any) -> None:
        """SGLang is about to insert a prompt into its tree: :meth:`saving` is about it.

        :param key: SGLang's RadixKey.
        """
        self._inserting = key

    def saving(self) -> None:
        """A part of the prompt that is being inserted is saved; told of all parts at once."""
        key, self._inserting = self._inserting, None
        if key is not None and self._announcer is not None and self._model:
            prompt = _Prompt(key.token_ids, len(key), key.extra_key, key.cache_salt)
            self._announcer.stored(functools.partial(self._describe, prompt, self._root))

    def found(self, request: Any, hit: Any) -> None:
        """A request is about to load a hit.

        :param request: SGLang's Req. :param hit: its ExternalCacheHitMarker; None = nothing was found.
        """
        if hit is not None and self._announcer is not None and self._model:
            tokens = hit.device_hit_len + len(hit.tail_hashes) * self._page
            prompt = _Prompt(request.full_untruncated_fill_ids, tokens, request.extra_key, request.cache_salt)
            self._announcer.found(functools.partial(self._describe, prompt, self._root))

    def close(self) -> None:
        """End."""
        if self._announcer is not None:
            self._announcer.close()

    def _describe(self, prompt: _Prompt, root: bytes) -> Iterator[ChunkDescription]:
        """A prompt's whole pages, the last one first."""
        page = self._page
        pages = prompt.length // page
        # A copy: an array cannot be appended to while its bytes are read, and SGLang appends each token that it makes.
        ids = prompt.tokens[: pages * page]
        numbers = np.frombuffer(ids, np.int64)
        if not pages or numbers.max() > MOST_TOKEN:
            return
        raw = numbers.astype(np.uint32).tobytes()
        extra = Namespace(prompt.extra_key, prompt.cache_salt, self._name(prompt.extra_key)).packed()
        if len(extra) > MOST_NAMESPACE:
            return
        key = RadixKey(ids, prompt.extra_key, cache_salt=prompt.cache_salt)
        hashes = get_storage_hash_str(key, None, page_size=page)
        digests = HashedChain(root, [each.encode() for each in hashes], page).digests[:pages]
        size = page * TOKEN_BYTES
        for number in reversed(range(pages)):
            parent = digests[number - 1] if number else b""
            yield ChunkDescription(digests[number], parent, raw[number * size : (number + 1) * size], extra)


def pool_events(params: Any, config: str | None, sources: Sequence[int], *, pairs: bool = False) -> PoolEvents | None:
    """What tells routers; None = SGLang's events are off, or another rank publishes them.

    :param params: SGLang's CacheInitParams. :param config: its ``--kv-events-config``.
    :param sources: as of :class:`PoolEvents`. :param pairs: SGLang's keys are of each token and the next one.
    """
    publisher = KVEventsConfig.from_cli(config).publisher if config and params.enable_kv_cache_events else "null"
    if publisher == "null" or publisher not in EventPublisherFactory._registry:  # which SGLang refuses
        return None
    if pairs:
        log.info("pool_events_off", reason="SGLang keys pages of an EAGLE draft model by pairs of tokens")
        return None
    return PoolEvents(
        publisher,
        page=params.page_size,
        dynamo=params.dynamo_kv_event_format,
        sources=sources,
        names=params.kv_event_lora_names,
    )
