"""SGLang's KV pools as layerflow sees them: groups, planes, and which slots a page has in each.

A page of SGLang's is a chunk here. Keys and values of several heads are registered with one token as a block: within a
token heads are outermost, so objects can be cut between heads, and engines of other tensor sizes share them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import structlog
import torch

from layerflow.boxes import HeadAxis, PlaneInterior, head_axis
from layerflow.errors import Unsupported
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard

KV, SWA, MAMBA = "kv", "swa", "mamba"
"""SGLang's names of its pools (``PoolName``), as its transfers carry them."""

_SCALES = ("k_scale_buffer", "native_k_scale_buffer", "kv_scale_buffer")

log = structlog.get_logger("layerflow.sglang")


@dataclass(frozen=True, slots=True)
class PoolGroup:
    """One of SGLang's pools as a group.

    :param pool: SGLang's name of it; of a draft model's cache the name of the pool whose slots it shares.
    :param blocks_are_pages: else a block is one token, or one state.
    :param draft: a draft model's cache.
    """

    pool: str
    blocks_are_pages: bool = False
    draft: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return "draft" if self.draft else self.pool

    def table(self, pages: int, page: int, slots: np.ndarray) -> np.ndarray:
        """The block table of a chain of `pages` pages.

        :param slots: int64: the pool's token slots of the last pages of the chain, whole pages; of states, one slot.
        :returns: int64, by block number; -1 = no block.
        """
        if self.pool == MAMBA:
            table = np.full(pages, -1, np.int64)
            table[-1:] = slots[:1] if len(slots) else -1
            return table
        blocks = slots[::page] // page if self.blocks_are_pages else slots
        table = np.full(pages if self.blocks_are_pages else pages * page, -1, np.int64)
        if len(blocks):
            table[-len(blocks) :] = blocks
        return table


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """One worker's cache.

    :param spec: without what the weights are called.
    :param tensors: for the agent, by layer and plane.
    :param groups: of `spec`, in its order.
    :param layers: layerflow's layer numbers by SGLang's, which count layers without a cache too.
    :param draft_layers: of each cache of a draft model: likewise. SGLang counts a draft model's layers from 0, too.
    """

    spec: ModelSpec
    tensors: dict[int, dict[str, torch.Tensor]]
    groups: tuple[PoolGroup, ...]
    layers: Mapping[int, int]
    draft_layers: tuple[Mapping[int, int], ...] = ()

    @property
    def shortens(self) -> bool:
        """Can a hit be loaded in part, up to any page?"""
        return all(group.pool == KV for group in self.groups)

    def tables(self, pages: int, slots: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """Block tables of a chain of `pages` pages, by group.

        :param slots: by pool, see :meth:`PoolGroup.table`; a pool that has none is left out.
        """
        page, nothing = self.spec.chunk_tokens, np.empty(0, np.int64)
        return tuple(group.table(pages, page, slots.get(group.pool, nothing)) for group in self.groups)

    def blocks(self, tables: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Engine blocks by group, int64, of block tables; see :meth:`layerflow.agent.Agent.reclaim`."""
        return [table[table >= 0] for table in tables]


@dataclass(frozen=True, slots=True)
class _Pool:
    """A pool's layers, before they have numbers.

    :param layers: by SGLang's layer number: its planes' tensors, shape ``(blocks, entries, ...)``.
    """

    group: PoolGroup
    kind: str
    block_size: int
    layers: Mapping[int, Mapping[str, torch.Tensor]]
    axis: HeadAxis
    window: int = 0


def layout_of(  # noqa: PLR0917 - what SGLang hands to a linker
    kvcache: Any,
    states: Any,
    page: int,
    window: int,
    model_heads: Mapping[str, int],
    shard: Shard,
    drafts: Sequence[tuple[Any, int]] = (),
) -> PoolLayout:
    """Translate SGLang's pools.

    A draft model's layers are numbered behind the model's own, in groups of their own: a hit needs them as well.

    :param kvcache: of its allocator. :param states: its request pool, where that holds recurrent states; else None.
    :param window: tokens that a sliding layer needs before the next one; 0 = there are none.
    :param model_heads: KV heads of the whole model, by pool.
    :param shard: the worker's ranks.
    :param drafts: caches of draft models, which share the slots of full attention, each with the KV heads of its model.
    :raises Unsupported: a pool that is packed in a way which is not known here.
    """
    pools = list(_pools(kvcache, states, page, window, model_heads, shard.tp_size))
    order = sorted(layer for pool in pools for layer in pool.layers)
    numbers = {layer: number for number, layer in enumerate(order)}
    numbered = [(pool, numbers) for pool in pools]
    for draft in _drafts(kvcache, drafts, page, shard.tp_size):
        begin = sum(len(pool.layers) for pool, _ in numbered)
        numbered.append((draft, {layer: begin + at for at, layer in enumerate(sorted(draft.layers))}))
    groups = []
    tensors: dict[int, dict[str, torch.Tensor]] = {}
    for pool, numbers_in in numbered:
        first = next(iter(pool.layers.values()))
        planes = tuple(
            Plane(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[2:]))
            for name, tensor in first.items()
        )
        groups.append(
            GroupSpec(
                pool.kind, pool.block_size, tuple(numbers_in[each] for each in sorted(pool.layers)), planes, pool.window
            )
        )
        tensors |= {numbers_in[layer]: dict(planes_of) for layer, planes_of in pool.layers.items()}
        if pool.axis.refusal:
            log.info("bound_to_tensor_size", pool=pool.group.name, reason=pool.axis.refusal)
    pools = [pool for pool, _ in numbered]
    heads = tuple(0 if pool.axis.refusal else pool.axis.heads for pool in pools)
    stages = tuple((len(pool.layers),) for pool in pools)
    spec = ModelSpec(
        "sglang",
        content="",
        groups=tuple(groups),
        shard=Shard(shard.tp_rank, shard.tp_size, 0, 1, heads, stages),
        attention="sglang/NHD",
        chunk_tokens=page,
    )
    draft_layers = tuple(numbers_in for pool, numbers_in in numbered if pool.group.draft)
    return PoolLayout(spec, tensors, tuple(pool.group for pool in pools), numbers, draft_layers)


def _pools(  # noqa: PLR0917
    kvcache: Any, states: Any, page: int, window: int, heads: Mapping[str, int], tp_size: int
) -> Iterable[_Pool]:
    """:raises Unsupported: see :func:`layout_of`."""
    kind = type(kvcache).__name__
    if kind == "SWAKVPool":
        places = kvcache.layers_mapping.items()
        full = {at: layer for layer, (at, is_swa) in places if not is_swa}
        sliding = {at: layer for layer, (at, is_swa) in places if is_swa}
        yield _attention(kvcache.full_kv_pool, full, page, KV, heads, tp_size)
        yield _attention(kvcache.swa_kv_pool, sliding, page, SWA, heads, tp_size, window)
    elif kind == "HybridLinearKVPool":
        full = {at: layer for layer, at in kvcache.full_attention_layer_id_mapping.items()}
        yield _attention(kvcache.full_kv_pool, full, page, KV, heads, tp_size)
        yield _state(states, page, tp_size)
    else:
        yield _attention(kvcache, {at: at for at in range(kvcache.layer_num)}, page, KV, heads, tp_size)


def _drafts(kvcache: Any, drafts: Sequence[tuple[Any, int]], page: int, tp_size: int) -> Iterable[_Pool]:
    """:raises Unsupported: see :func:`layout_of`."""
    if drafts and type(kvcache).__name__ == "SWAKVPool":
        raise Unsupported(
            "a draft model beside a model with sliding windows: which slots it shares is not known; run without "
            "--speculative-algorithm"
        )
    for pool, heads in drafts:
        inner, places = pool, None
        if type(pool).__name__ == "HybridLinearKVPool":  # of whose layers only those of attention have a cache here
            inner, places = pool.full_kv_pool, {at: layer for layer, at in pool.full_attention_layer_id_mapping.items()}
        found = _attention(inner, places or {at: at for at in range(inner.layer_num)}, page, KV, {KV: heads}, tp_size)
        yield replace(found, group=replace(found.group, draft=True))


def _attention(  # noqa: PLR0917
    pool: Any, layers: Mapping[int, int], page: int, name: str, heads: Mapping[str, int], tp_size: int, window: int = 0
) -> _Pool:
    """:param layers: SGLang's layer numbers, by their place in the pool."""
    kind = type(pool).__name__
    for scale in _SCALES:
        if getattr(pool, scale, None) is not None:
            raise Unsupported(
                f"SGLang's {kind} keeps scales beside its keys and values, which layerflow does not move; choose a "
                "--kv-cache-dtype without them"
            )
    # The next query sits behind the hit, so of `window` tokens before it all are read: one more than its own window.
    if window:
        window = math.ceil(window / page) * page + 1
    if kind == "MLATokenToKVPool":
        paged = {
            layer: {"latent": _check(pool.kv_buffer[at], kind, page).view(-1, page, pool.kv_buffer[at].shape[-1])}
            for at, layer in layers.items()
        }
        cache_kind = "sliding" if window else "mla"
        return _Pool(PoolGroup(name, blocks_are_pages=True), cache_kind, page, paged, HeadAxis(1), window)
    if kind == "MHATokenToKVPool":
        by_token = {
            layer: {
                "k": _check(pool.k_buffer[at], kind, page).unsqueeze(1),
                "v": _check(pool.v_buffer[at], kind, page).unsqueeze(1),
            }
            for at, layer in layers.items()
        }
        held = int(pool.k_buffer[0].shape[1])
        interiors = [PlaneInterior(plane, held, "HD") for plane in ("k", "v")]
        cache_kind = "sliding" if window else "full"
        axis = head_axis(cache_kind, interiors, heads[name], tp_size)
        return _Pool(PoolGroup(name), cache_kind, 1, by_token, axis, window)
    raise Unsupported(
        f"SGLang keeps this model's cache in a {kind}, which layerflow does not know (it knows MHATokenToKVPool and "
        "MLATokenToKVPool, alone, with sliding windows or with recurrent states); run it without the linker"
    )


def _check(buffer: torch.Tensor, kind: str, page: int) -> torch.Tensor:
    """A buffer whose rows are tokens, each with its heads: shape ``(slots, heads, size)``."""
    if buffer.dim() != 3 or buffer.shape[0] % page or not buffer.is_contiguous():
        raise Unsupported(
            f"SGLang's {kind} packs its blocks as {tuple(buffer.shape)}, {tuple(buffer.stride())}; layerflow knows "
            f"(slots, heads, size) with whole pages of {page}: unset SGLANG_USE_HND_KVCACHE and the like"
        )
    return buffer


def _state(states: Any, page: int, tp_size: int) -> _Pool:
    """Recurrent states: one slot has one state of each layer."""
    for name, effect in (("mamba_ckpt_pool", "checkpoints"), ("short_conv_pool", "short convolutions"),
                         ("ngram_pool", "n-grams")):  # fmt: skip
        side = getattr(states, name, None)
        if side is not None and getattr(side, "enabled", True):
            raise Unsupported(f"SGLang keeps {effect} beside this model's states, which layerflow does not move yet")
    cache = states.mamba_pool.mamba_cache
    parts: Sequence[tuple[str, torch.Tensor]] = [
        ("temporal", cache.temporal), *((f"conv{number}", conv) for number, conv in enumerate(cache.conv)),
    ]  # fmt: skip
    for name in ("replayssm_d", "replayssm_k", "replayssm_g"):
        if getattr(cache, name, None) is not None:
            raise Unsupported("--enable-linear-replayssm keeps tokens beside the states, which layerflow does not move")
    layers = {
        layer: {name: tensor[at].unsqueeze(1) for name, tensor in parts if tensor.numel()}
        for layer, at in states.mamba_map.items()
    }
    axis = head_axis("state", [], 1, tp_size)
    return _Pool(PoolGroup(MAMBA), "state", page, layers, axis)
