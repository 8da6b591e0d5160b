"""KV cache events: what the pool holds, in vLLM's blocks and hashes, on vLLM's channel (``--kv-events-config``).

vLLM collects a connector's events with a step's output. An engine that is idle takes no steps, while others go on to
fill the pool and to evict from it: so the events of the pool are handed to vLLM's publisher by the announcer's thread.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from vllm.distributed import kv_events
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from layerflow.agent.control import Control
from layerflow.connectors.common.announcer import Announcer
from layerflow.connectors.common.block_ledger import BlockEvent, BlockGroup, BlockLedger, Hash, StoredBlocks
from layerflow.connectors.common.publisher import EnginePublisher, WatchedPublisher
from layerflow.connectors.vllm.context import sizes_of
from layerflow.wire.messages import ChunkChange, ChunkDescription

if TYPE_CHECKING:
    from layerflow.connectors.vllm.scheduler.requests import RequestState
    from layerflow.keys import Chain
    from layerflow.spec import ModelSpec

MEDIUMS = {1: MEDIUM_CPU, 2: getattr(kv_events, "MEDIUM_STORAGE", "STORAGE")}
"""By state of a chunk."""

# vLLM 0.27 has its extra keys in the published form already.
_published = getattr(kv_cache_utils, "to_event_extra_keys", list)

# vLLM's publisher: it is made by vLLM's scheduler, right behind this connector.


class _WatchedPublisher(WatchedPublisher, ZmqEventPublisher):  # type: ignore[misc]
    forgetting = AllBlocksCleared


class VllmRouter(EnginePublisher):
    """vLLM's publisher.

    :param kind: of publisher, by vLLM's configuration.
    :param group_kinds: of vLLM's cache groups: the kind, and its sliding window.
    """

    def __init__(self, kind: str, group_kinds: Sequence[tuple[str, int | None]]) -> None:
        super().__init__(EventPublisherFactory._registry, kind, _WatchedPublisher)
        self._group_kinds = group_kinds

    def batch(self, events: Sequence[BlockEvent]) -> KVEventBatch:
        """vLLM's own events of these."""
        return KVEventBatch(ts=time.time(), events=[self._event(event) for event in events])

    def _event(self, event: BlockEvent) -> BlockRemoved | BlockStored:
        hashes = [kv_cache_utils.maybe_convert_block_hash(block) for block in event.hashes]
        if not isinstance(event, StoredBlocks):
            return BlockRemoved(block_hashes=hashes, medium=MEDIUMS[event.state], group_idx=event.group)
        kind, window = self._group_kinds[event.group]
        lora_name, keys = _unpacked(event.extra)
        blocks = range(event.first, event.first + len(hashes) * event.units, event.units)
        extra = [_merged(keys[at : at + event.units]) for at in blocks] if keys else [None] * len(hashes)
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=kv_cache_utils.maybe_convert_block_hash(event.parent)
            if event.parent is not None
            else None,
            token_ids=np.frombuffer(event.tokens, np.uint32).tolist(),
            block_size=event.block_tokens,
            lora_id=None,  # a number of the engine that has described the chunk
            medium=MEDIUMS[event.state],
            lora_name=lora_name,
            extra_keys=_published(extra),
            group_idx=event.group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )


# What a chunk is to vLLM: its tokens, and what else its blocks' hashes are made from.

_Keys = list[tuple[Any, ...] | None]
"""By unit of a chunk, vLLM's extra keys."""

_EXTRA = msgspec.msgpack.Decoder(tuple[str | None, list[list[Any] | None]])
"""The name of a LoRA adapter, and the keys."""


def _packed(request: Any, start: int, stop: int, unit: int) -> bytes:
    """What of a request besides tokens decides the hashes of these tokens' units; empty = nothing."""
    keys: _Keys = []
    at = 0
    for first in range(start, stop - unit + 1, unit):
        extra, at = kv_cache_utils.generate_block_hash_extra_keys(request, first, first + unit, at)
        keys.append(extra)
    lora = request.lora_request
    if lora is None and not any(keys):
        return b""
    return msgspec.msgpack.encode((lora.name if lora is not None else None, keys))


def _unpacked(extra: bytes) -> tuple[str | None, _Keys]:
    if not extra:
        return None, []
    name, keys = _EXTRA.decode(extra)
    return name, [_as_tuples(each) for each in keys]


def _as_tuples(value: Any) -> Any:
    """Hashes are made from tuples; the wire has lists."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _merged(keys: Sequence[tuple[Any, ...] | None]) -> tuple[Any, ...] | None:
    """Of a block of several units: each key once."""
    return tuple(dict.fromkeys(key for each in keys for key in each or ())) or None


def hash_units(hash_block: Callable[[Any], bytes], unit: int, before: Hash | None, chunk: ChunkChange) -> list[Hash]:
    """vLLM's hashes of a chunk's whole units, of so many tokens each.

    :raises Exception: the chunk cannot be read. What this returns for can be published, too.
    """
    tokens = np.frombuffer(chunk.tokens, np.uint32).tolist()
    firsts = range(0, len(tokens) - unit + 1, unit)
    _, keys = _unpacked(chunk.extra)
    if keys:
        if len(keys) != len(firsts):
            raise ValueError(f"extra keys of {len(keys)} units, where there are {len(firsts)} of {unit} tokens")
        _published([_merged(keys)])
    hashes = []
    for at, first in enumerate(firsts):
        before = kv_cache_utils.hash_block_tokens(
            hash_block, before, tokens[first : first + unit], keys[at] if keys else None
        )
        hashes.append(before)
    return hashes


def describe_chain(request: Any, chain: Chain, tokens: int, unit: int) -> Iterator[ChunkDescription]:
    """A prompt's chunks, the last one first, as far as `tokens`; less than one whole unit is nothing."""
    size, ids = chain.chunk_tokens, chain.tokens
    full, rest = divmod(tokens, size)
    numbers = [(full, chain.partial(full, rest), rest)] if rest >= unit else []
    numbers += [(number, chain.digests[number], size) for number in reversed(range(min(full, len(chain.digests))))]
    for number, digest, held in numbers:
        start, stop = number * size, number * size + held
        raw = ids[start:stop].astype(np.uint32).tobytes()
        parent = chain.parent(number) if number else b""
        yield ChunkDescription(digest, parent, raw, _packed(request, start, stop, unit))


def _hash_tokens(cache: Any, vllm_config: Any, block_tokens: Sequence[int]) -> int:
    """How many tokens one of vLLM's block hashes covers."""
    resolve = getattr(kv_cache_utils, "resolve_kv_cache_block_sizes", None)
    return int(resolve(cache, vllm_config)[1]) if resolve is not None else math.gcd(*block_tokens)


class PoolEvents:
    """For the scheduler's thread, which puts requests into a list and nothing more.

    :param vllm_config: vLLM's VllmConfig. :param cache: its KVCacheConfig.
    """

    def __init__(self, vllm_config: Any, cache: Any) -> None:
        specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
        kinds = [(get_kv_cache_spec_kind(spec).value, getattr(spec, "sliding_window", None)) for spec in specs]
        self._block_tokens = sizes_of(vllm_config.parallel_config).group_tokens(cache)
        self._unit = _hash_tokens(cache, vllm_config, self._block_tokens)
        self._hash = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        self._router = VllmRouter(vllm_config.kv_events_config.publisher, kinds)
        self._vllm_groups: tuple[int, ...] = ()
        self._connect: Callable[[ModelSpec], Control] | None = None
        self._announcer: Announcer | None = None

    def meet_workers(
        self, spec: ModelSpec, vllm_groups: Iterable[int], connect: Callable[[ModelSpec], Control]
    ) -> None:
        """All workers have registered their caches; see :class:`.layout.Layout`.

        :param connect: makes a client of the server, attached with a model's spec.
        """
        self._vllm_groups, self._connect = tuple(vllm_groups), connect
        self._announcer = Announcer(*self._model(spec), self._router).start()

    def planned(self, requests: Iterable[str], tracked: Mapping[str, RequestState]) -> None:
        """A step saves chunks of these requests."""
        if self._announcer is None:
            return
        for name in requests:
            request = tracked.get(name)
            if request is None:
                continue
            chain = request.chain
            tokens = len(chain)
            if tokens // chain.chunk_tokens > request.described // chain.chunk_tokens or not request.described:
                request.described = tokens
                self._announcer.stored(self._describing(request, chain, tokens))

    def found(self, request: RequestState, tokens: int) -> None:
        """A request has hit so many tokens."""
        if self._announcer is not None and tokens > request.announced:
            request.announced = tokens
            self._announcer.found(self._describing(request, request.chain, tokens))

    def replaced(self, spec: ModelSpec) -> None:
        """What was told is found no more: the weights were replaced, and keys are others from here on."""
        if self._announcer is not None:
            self._announcer.replace(*self._model(spec))

    def close(self) -> None:
        """End."""
        if self._announcer is not None:
            self._announcer.close()

    def _describing(self, request: RequestState, chain: Chain, tokens: int) -> Callable[[], Iterator[ChunkDescription]]:
        vllm_request, unit = request.request, self._unit
        return lambda: describe_chain(vllm_request, chain, tokens, unit)

    def _model(self, spec: ModelSpec) -> tuple[Callable[[], Control], BlockLedger]:
        """What announces a model's chunks."""
        connect = self._connect
        assert connect is not None
        own = spec.own
        groups = []
        for number, size in enumerate(self._block_tokens):
            sources = tuple(at for at in range(len(own.groups)) if self._vllm_groups[at] == number)
            if sources:
                whole = any(not (own.groups[at].rules.windowed or own.groups[at].rules.exact) for at in sources)
                groups.append(BlockGroup(number, size, sources, whole))
        return lambda: connect(spec), BlockLedger(
            groups, self._unit, functools.partial(hash_units, self._hash, self._unit)
        )
