"""What the kernels of sparse latent attention (DeepSeek-V3.2) compute, in torch: an indexer finds the tokens that
matter, and attention is over these alone.

Signatures are those of the operators. Shapes: T tokens of all requests in a row, H heads; caches are by pages, as
``layout`` PA_BSND has them: (blocks, block size, 1, values).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from host_arithmetic import stands_in
from torch import Tensor

MOST_FOUND = 256
"""Tokens that the indexer finds at most. vLLM-Ascend asks for 2,048, more than the tests' prompts have: then a wrong
key of the indexer would change no answer. The tests' model has this number, too."""


@stands_in("_C_ascend::npu_scatter_nd_update_sk")
def scatter_rows(var: Tensor, indices: Tensor, update: Tensor) -> None:
    """Rows of the first axis; negative = none."""
    rows = indices.flatten().long()
    real = rows >= 0
    var[rows[real]] = update[real].to(var.dtype)


def _requests(ends: Tensor, lengths: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """Each request's number, its first token in the row and the one behind its last, and the keys that it has."""
    begin = 0
    for number, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=False)):
        yield number, begin, end, length
        begin = end


def _paged(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """The first rows that a request has of a cache."""
    blocks = table[: -(-length // cache.shape[1])].long()
    return cache[blocks].flatten(0, 1)[:length].squeeze(1).float()


@stands_in("npu::npu_lightning_indexer")
def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    block_table: Tensor,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """For each token the places of those that it attends to, -1 behind them: (T, 1, count)."""
    if (layout_query, layout_key, sparse_mode) != ("TND", "PA_BSND", 3):
        raise NotImplementedError(f"{layout_query}, {layout_key}, mask {sparse_mode}")
    found = torch.full((len(query), 1, sparse_count), -1, dtype=torch.int32)
    for number, begin, end, length in _requests(actual_seq_lengths_query, actual_seq_lengths_key):
        keys = _paged(key, block_table[number], length)
        scores = torch.relu(torch.einsum("thd,sd->ths", query[begin:end].float(), keys))
        scores = torch.einsum("ths,th->ts", scores, weights[begin:end].float())
        for token in range(begin, end):
            seen = length - (end - token) + 1
            best = scores[token - begin, :seen].topk(min(seen, sparse_count, MOST_FOUND)).indices
            found[token, 0, : len(best)] = best.to(torch.int32)
    return found, torch.empty(0, dtype=query.dtype)


@stands_in("_C_ascend::npu_sparse_flash_attention")
def sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_kv: Tensor,
    query_rope: Tensor,
    key_rope: Tensor,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    attention_mode: int = 2,
    return_softmax_lse: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Over the tokens that were found: (T, H, values)."""
    if (layout_query, layout_kv, sparse_block_size, attention_mode) != ("TND", "PA_BSND", 1, 2) or return_softmax_lse:
        raise NotImplementedError(f"{layout_query}, {layout_kv}, blocks of {sparse_block_size}, mode {attention_mode}")
    made = torch.zeros_like(query)
    for number, begin, end, length in _requests(actual_seq_lengths_query, actual_seq_lengths_kv):
        keys, values, ropes = (_paged(cache, block_table[number], length) for cache in (key, value, key_rope))
        for token in range(begin, end):
            places = sparse_indices[token, 0]
            at = places[places >= 0].long()
            scores = query[token].float() @ keys[at].T + query_rope[token].float() @ ropes[at].T
            made[token] = ((scores * scale_value).softmax(-1) @ values[at]).to(made.dtype)
    return made, torch.empty(0), torch.empty(0)
