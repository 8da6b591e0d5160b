"""KV cache events: chunks that layerflow has stored, told on vLLM's own channel (``--kv-events-config``).

An event's blocks are layerflow's chunks: their size and their hashes are not those of vLLM's own blocks. What the pool
evicts later is not told: it is shared, and a chunk that is announced is a hint.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockStored
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from layerflow.agent.descriptors import ObjectDescriptor, PartDescriptor
from layerflow.connectors.vllm.plan import ChunkKey
from layerflow.connectors.vllm.scheduler.requests import RequestState
from layerflow.keys import covered_by
from layerflow.spec import ModelSpec

FORGET_S = 60.0
"""A chunk that is not stored so long after its save was planned is not told any more; twice the default
``transfer.save_timeout_ms``. An event is a hint: what is missing costs a router a guess."""

# vLLM 0.27 has its extra keys in the published form already.
_published = getattr(kv_cache_utils, "to_event_extra_keys", list)


@dataclass(slots=True)
class _PendingChunk:
    """A chunk on its way.

    :param event: told once it is stored.
    :param missing: how many stores are still missing: per layerflow group of the vLLM group, one for each box.
    :param asked_at: monotonic seconds.
    """

    event: BlockStored
    missing: int
    asked_at: float


class ChunkEvents:
    """The scheduler's side: a chunk is news when all ranks have stored it.

    :param cache: vLLM's KVCacheConfig.
    """

    def __init__(self, cache: Any) -> None:
        self._kinds = [
            (get_kv_cache_spec_kind(group.kv_cache_spec).value, getattr(group.kv_cache_spec, "sliding_window", None))
            for group in cache.kv_cache_groups
        ]
        self._spec: ModelSpec | None = None
        self._vllm_groups: tuple[int, ...] = ()
        self._stores: list[int] = []
        self._pending: dict[ChunkKey, _PendingChunk] = {}
        self._news: list[Any] = []

    def meet_workers(self, spec: ModelSpec, vllm_groups: Iterable[int]) -> None:
        """All workers have registered their caches; see :class:`.layout.Layout`."""
        self._spec, self._vllm_groups = spec, tuple(vllm_groups)
        # What several ranks hold is stored by one of them.
        self._stores = [
            len({covered_by(group, shard) for shard in spec.shard.peers()}) for group in range(len(spec.groups))
        ]

    def planned(self, parts: Iterable[PartDescriptor], requests: Mapping[str, RequestState]) -> None:
        """A step saves these parts."""
        assert self._spec is not None
        now = time.monotonic()
        for part in parts:
            for piece in part.pieces:
                if piece.tokens == self._spec.chunk_tokens:
                    key = (self._vllm_groups[part.group], piece.digest)
                    chunk = self._pending.pop(key, None) or self._chunk(part, piece, requests[part.request])
                    chunk.asked_at = now
                    self._pending[key] = chunk
        # Saves that failed, or found their chunk stored already, are reported by nobody: the oldest are asked about.
        while self._pending:
            oldest = next(iter(self._pending))
            if now - self._pending[oldest].asked_at <= FORGET_S:
                break
            del self._pending[oldest]

    def stored(self, chunks: Mapping[ChunkKey, int]) -> None:
        """Workers have stored these chunks of layerflow's groups, each by so many ranks."""
        for (group, digest), ranks in chunks.items():
            key = (self._vllm_groups[group], digest)
            chunk = self._pending.get(key)
            if chunk is not None:
                chunk.missing -= ranks
                if chunk.missing <= 0:
                    self._news.append(self._pending.pop(key).event)

    def cleared(self) -> None:
        """What was told is found no more: the weights were replaced."""
        self._pending.clear()
        self._news = [AllBlocksCleared()]

    def take(self) -> list[Any]:
        """vLLM's KVCacheEvents since the last call."""
        taken, self._news = self._news, []
        return taken

    def _chunk(self, part: PartDescriptor, piece: ObjectDescriptor, tracked: RequestState) -> _PendingChunk:
        assert self._spec is not None
        size, vllm_group = self._spec.chunk_tokens, self._vllm_groups[part.group]
        number = piece.blocks.start * self._spec.groups[part.group].block_size // size
        start, stop = number * size, (number + 1) * size
        extra, _ = kv_cache_utils.generate_block_hash_extra_keys(tracked.request, start, stop, 0)
        lora = tracked.request.lora_request
        kind, window = self._kinds[vllm_group]
        event = BlockStored(
            block_hashes=[piece.digest],
            parent_block_hash=tracked.chain.parent(number) if number else None,
            token_ids=tracked.chain.tokens[start:stop].tolist(),
            block_size=size,
            lora_id=lora.adapter_id if lora is not None else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora is not None else None,
            extra_keys=_published([extra]),
            group_idx=vllm_group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )
        stores = [self._stores[own] for own, theirs in enumerate(self._vllm_groups) if theirs == vllm_group]
        return _PendingChunk(event, sum(stores), time.monotonic())
