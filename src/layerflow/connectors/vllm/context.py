"""Context parallelism: which tokens of a block each of vLLM's workers holds, and which workers hold the same.

**Decode** (``decode_context_parallel_size`` N, interleave I): all ranks have the same block tables, and a block stands
for N times as many tokens as it has rows on a rank. Of a block's tokens, rank r of N has those at
``offset // I % N == r``, in ascending order (``BlockTable.compute_slot_mapping`` of vLLM 0.32). The N ranks are
neighbours that would hold the same KV head without it.

To layerflow such a *part* of the tokens is what a KV head is: a worker holds one of heads x N. So a hit needs every
part, and ranks that hold the same part store it once. Where more than N ranks have a head, equal parts do not lie side
by side: :meth:`ContextParallel.place` puts them there, as :func:`layerflow.boxes.worker_box` counts. A row stands for N
tokens (`ratio`), of which each rank has one.

**Prefill** (``prefill_context_parallel_size``) alone computes a prompt in shares and gathers every layer's rows, so
that each of its ranks holds all of them: to layerflow these are tensor ranks that hold the same. Together with decode,
the parts are spread over them first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layerflow.connectors.vllm.reuse import kind_of
from layerflow.connectors.vllm.versions import release
from layerflow.errors import Unsupported
from layerflow.kinds import KINDS

FIRST = (0, 32)
"""The first vLLM whose context parallelism is known."""

_DECODE, _PREFILL = "decode_context_parallel_size", "prefill_context_parallel_size"


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """How an engine spreads its tokens.

    :param tensor: ranks of a pipeline stage's tensor parallelism. :param decode: parts of a block's tokens.
    :param prefill: ranks that compute shares of a prompt, each with `tensor` ranks.
    :param interleave: neighbouring tokens that one rank has.
    :param heads: KV heads of the model; 1 = latent. Only read where `decode` or `prefill` is above 1.
    """

    tensor: int
    decode: int = 1
    prefill: int = 1
    interleave: int = 1
    heads: int = 1

    @property
    def active(self) -> bool:
        """Is there any?"""
        return self.decode > 1 or self.prefill > 1

    @property
    def ranks(self) -> int:
        """Workers of one pipeline stage."""
        return self.tensor * self.prefill

    def parts(self, layer_spec: Any) -> int:
        """Over how many ranks the tokens of a cache's blocks are spread."""
        return self.decode if getattr(layer_spec, "dcp_sharded", False) else 1

    def block_tokens(self, layer_spec: Any) -> int:
        """Tokens that a block of a cache stands for."""
        return int(layer_spec.block_size) * self.parts(layer_spec)

    def group_tokens(self, cache: Any) -> list[int]:
        """The same of each of vLLM's cache groups.

        :param cache: vLLM's KVCacheConfig.
        """
        return [self.block_tokens(group.kv_cache_spec) for group in cache.kv_cache_groups]

    def place(self, rank: int) -> int:
        """The worker's position among those of its stage: by KV head, then by part, equal ones side by side.

        :param rank: vLLM's, of which the tensor rank is the innermost.
        """
        tensor_rank, prefill_rank = rank % self.tensor, rank // self.tensor % self.prefill
        if not self.active:
            return tensor_rank
        number = tensor_rank * self.prefill + prefill_rank  # as vLLM numbers the ranks that it forms the parts of
        alike = self.ranks // self.heads
        head, within = divmod(number, alike)
        return head * alike + within % self.decode * (alike // self.decode) + within // self.decode

    @property
    def packing(self) -> str:
        """What of it decides which bytes lie in a block: part of the keys. Empty = nothing."""
        return f":dcp{self.decode}x{self.interleave}" if self.decode > 1 else ""


ALONE = ContextParallel(1)
"""One rank."""


def sizes_of(parallel: Any) -> ContextParallel:
    """What the configuration says, whether or not it is supported.

    :param parallel: vLLM's ParallelConfig.
    """
    return ContextParallel(
        parallel.tensor_parallel_size,
        int(getattr(parallel, _DECODE, 1)),
        int(getattr(parallel, _PREFILL, 1)),
        int(getattr(parallel, "cp_kv_cache_interleave_size", 1)),
    )


def context_of(sizes: ContextParallel, layers: Mapping[str, tuple[Any, int]], version: str) -> ContextParallel:
    """How an engine with context parallelism spreads its tokens.

    :param sizes: what its configuration says.
    :param layers: by name, vLLM's spec of each cache that is loaded and saved, and the model's KV heads in that layer.
    :param version: vLLM's.
    :raises Unsupported: it spreads them in a way, or caches, of which it is not known what each rank holds.
    """
    if release(version) < FIRST:
        raise _refused(
            sizes, f"what vLLM {version} does with it is not known here; use vLLM {FIRST[0]}.{FIRST[1]} or later"
        )
    latent = True
    for name, (layer_spec, _) in layers.items():
        kind = kind_of(layer_spec)
        if KINDS[kind].windowed or KINDS[kind].exact:
            raise _refused(sizes, f"layer {name} has a cache of kind {type(layer_spec).__name__}, not of all tokens")
        if not hasattr(layer_spec, "dcp_sharded"):
            raise _refused(sizes, f"vLLM {version} does not tell whether it spreads the cache of layer {name}")
        if getattr(layer_spec, "tokens_per_state", 1) != 1:
            raise _refused(sizes, f"layer {name} has a compressed cache, and which rank has which row is not known")
        latent &= kind == "mla"
    heads = {1} if latent else {count for _, count in layers.values()}
    if len(heads) > 1:
        raise _refused(sizes, f"layers of this model have {sorted(heads)} KV heads, so their ranks differ")
    context = ContextParallel(sizes.tensor, sizes.decode, sizes.prefill, sizes.interleave, heads.pop())
    if not latent and sizes.prefill > 1:
        raise _refused(sizes, "it is known of latent attention (MLA) only")
    alike, odd = divmod(context.ranks, context.heads)
    if odd or alike % context.decode:
        raise _refused(
            sizes,
            f"over {context.ranks} ranks and {context.heads} KV heads, {context.decode} neighbouring ranks do not all "
            f"hold the same head; choose a size that divides {alike}",
        )
    return context


def _refused(sizes: ContextParallel, reason: str) -> Unsupported:
    settings = [f"{name} = {size}" for name, size in ((_DECODE, sizes.decode), (_PREFILL, sizes.prefill)) if size > 1]
    return Unsupported(f"{' and '.join(settings)}: {reason}. Set it to 1, or run vLLM without the connector")
