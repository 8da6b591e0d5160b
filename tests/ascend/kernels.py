"""What npu kernels compute, in torch: as much as models of dense, sliding-window and latent attention (MLA) need.

Signatures are those of torch_npu's operators. Sums are float32, as the kernels'.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from host_arithmetic import STAND_INS, on_host, stands_in
from torch import Tensor

CAUSAL, BAND = (2, 3), 4
"""``sparse_mode``: the newest query sees the newest key, and in BAND the last ``pre_tokens`` keys with its own, as the
models mean it. What the real kernel does at that edge is not known here."""


@stands_in("npu::npu_rms_norm")
def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * scale * gamma.float()).to(x.dtype), scale


@stands_in("_C_ascend::npu_gemma_rms_norm")
def gemma_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return rms_norm(x, 1.0 + gamma.float(), epsilon)


@stands_in("npu::npu_add_rms_norm")
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    total = (x1.float() + x2.float()).to(x1.dtype)
    return *rms_norm(total, gamma, epsilon), total


@stands_in("_C_ascend::npu_add_rms_norm_bias")
def add_rms_norm_bias(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    normed, scale, total = add_rms_norm(x1, x2, gamma, epsilon)
    return normed if beta is None else normed + beta, scale, total


@stands_in("npu::npu_swiglu")
def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.float().chunk(2, dim=dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    elif mode == "interleave":
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        raise NotImplementedError(f"rotary mode {mode!r}")
    return x * cos + turned * sin


@stands_in("npu::npu_rotary_mul")
def rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Any = None) -> Tensor:
    return _rotate(x.float(), r1.float(), r2.float(), rotary_mode).to(x.dtype)


@stands_in("npu::npu_apply_rotary_pos_emb")
def apply_rotary(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSH", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    return rotary_mul(query, cos, sin, rotary_mode), rotary_mul(key, cos, sin, rotary_mode)


@stands_in("npu::npu_mrope")
def mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: Any = None,
    rotary_mode: str = "half",
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Text only: one position a token."""
    if positions.dim() != 1:
        raise NotImplementedError("positions of several axes")
    cos, sin = cos_sin_cache[positions.long()].float().chunk(2, -1)
    cos, sin = (torch.cat((half, half), -1)[:, None] for half in (cos, sin))
    turned = cos.shape[-1]

    def of(x: Tensor) -> Tensor:
        heads = x.reshape(len(positions), -1, head_size).float()
        rotated = _rotate(heads[..., :turned], cos, sin, rotary_mode)
        return torch.cat((rotated, heads[..., turned:]), -1).to(x.dtype).reshape(x.shape)

    return of(query), of(key)


@stands_in("npu::npu_scatter_pa_kv_cache")
@stands_in("_C_ascend::npu_scatter_pa_kv_cache")
def scatter_to_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, *_: Any, **__: Any
) -> None:
    slots = slot_mapping.reshape(-1).long()[: len(key)]
    real = slots >= 0
    blocks, rows = slots[real] // key_cache.shape[1], slots[real] % key_cache.shape[1]
    for cache, made in ((key_cache, key), (value_cache, value)):
        cache[blocks, rows] = made[: len(slots)][real].reshape(-1, *cache.shape[2:])


@stands_in("atb::_npu_reshape_and_cache")
def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor) -> None:
    scatter_to_cache(key, value, key_cache, value_cache, slot_indices)


@stands_in("npu::npu_interleave_rope")
def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs lie side by side in `x`, and in halves in what is returned."""
    halves = torch.cat((x[..., ::2], x[..., 1::2]), -1).float()
    return _rotate(halves, cos.float(), sin.float(), "half").to(x.dtype)


@stands_in("npu::npu_kv_rmsnorm_rope_cache")
def latent_to_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    **more: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A latent and its rotary part, ``[tokens, 1, 1, both]``: the one normed, the other turned, to a row of each cache.

    :returns: the caches, then the rotary parts and the latents if they are asked for.
    """
    if cache_mode != "PA" or kv.shape[1:3] != (1, 1) or any(each is not None for each in more.values()):
        raise NotImplementedError(f"a latent {tuple(kv.shape)} to a cache of mode {cache_mode!r}, with {set(more)}")
    latent, rotary = kv.split((len(gamma), kv.shape[-1] - len(gamma)), -1)
    latent, rotary = rms_norm(latent, gamma, epsilon)[0], interleave_rope(rotary, cos, sin)
    scatter_to_cache(latent[:, 0], rotary[:, 0], ckv_cache, k_cache, index)
    made = (rotary, latent) if is_output_kv else (kv.new_empty(0), kv.new_empty(0))
    return k_cache, ckv_cache, *made


@stands_in("npu::npu_gather_pa_kv_cache")
def gather_from_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_offset: Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    """Rows of each request from its offset on, one request behind the other."""
    if is_seq_lens_cumsum:
        raise NotImplementedError("lengths as sums")
    size, done = key_cache.shape[1], 0
    for request, count in enumerate(seq_lens.tolist()):
        at = torch.arange(count) + (0 if seq_offset is None else int(seq_offset[request]))
        blocks, rows = block_tables[request, at // size].long(), at % size
        for made, cache in ((key, key_cache), (value, value_cache)):
            made[done : done + count] = cache[blocks, rows]
        done += count


@stands_in("npu::npu_transpose_batchmatmul")
def transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: Any = None,
    perm_x2: Any = None,
    perm_y: Any = None,
    batch_split_factor: int | None = 1,
) -> Tensor:
    if bias is not None or scale is not None or batch_split_factor != 1:
        raise NotImplementedError("a product that is shifted, scaled or split")
    left, right = (
        each.float().permute(*perm) if perm else each.float() for each, perm in ((input, perm_x1), (weight, perm_x2))
    )
    made = torch.bmm(left, right).to(input.dtype)
    return made.permute(*perm_y).contiguous() if perm_y else made


def _asked(options: dict[str, Any]) -> set[str]:
    """Those of an operator's options that ask for something."""
    return {name for name, each in options.items() if isinstance(each, Tensor) or each not in (None, 0, False)}


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """Softmax attention of ``[queries, heads, size]`` over ``[keys, KV heads, size]``; the last of both is one token.

    :param window: how many keys a query sees, its own included.
    :returns: and the logarithm of what each softmax was divided by, ``[queries, heads]``.
    """
    if window is not None:  # what no query sees is not there, whatever its memory holds
        seen = max(0, len(key) - len(query) - window + 1)
        key, value = key[seen:], value[seen:]
    shared = query.shape[1] // key.shape[1]
    key, value = (each.float().repeat_interleave(shared, 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    back = torch.arange(len(query))[:, None] + len(key) - len(query) - torch.arange(len(key))[None]
    if causal:
        scores = scores.masked_fill(back < 0, -torch.inf)
    if window is not None:
        scores = scores.masked_fill(back >= window, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value), scores.logsumexp(-1).T


@stands_in("npu::npu_fused_infer_attention_score")
def fused_infer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Any = None,
    actual_seq_lengths_kv: Any = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2**31 - 1,
    next_tokens: int = 2**31 - 1,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    query_rope: Tensor | None = None,
    key_rope: Any = None,
    softmax_lse_flag: bool = False,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Layout TND; ends of the requests' queries; lengths of paged keys, or ends of those that are not.

    Rotary parts are more of queries and keys. A query that has no key to see gets 0, and infinity for its logarithm.
    """
    unknown = _asked(more)
    if input_layout != "TND" or sparse_mode not in (0, *CAUSAL, BAND) or unknown - {"inner_precise"}:
        raise NotImplementedError(f"attention in layout {input_layout}, sparse_mode {sparse_mode}, with {unknown}")
    heads = num_key_value_heads or num_heads
    if query_rope is not None:
        query, key = torch.cat((query, query_rope), -1), torch.cat((key, key_rope), -1)
    size = value[0].numel() // heads // (1 if block_table is None else block_size)
    made, start, key_start = query.new_zeros(*query.shape[:2], size), 0, 0
    logarithms = torch.full((*query.shape[:2], 1), torch.inf)
    for request, end in enumerate(int(each) for each in actual_seq_lengths):
        count = int(actual_seq_lengths_kv[request])
        if block_table is None:
            keys, values, key_start = key[key_start:count], value[key_start:count], count
        else:
            blocks = block_table[request, : -(-count // block_size)].long()
            keys, values = (each[blocks].reshape(len(blocks) * block_size, heads, -1)[:count] for each in (key, value))
        if end > start and len(keys):
            window = pre_tokens if sparse_mode == BAND else None
            causal = sparse_mode in (*CAUSAL, BAND)
            attended, logarithms[start:end, :, 0] = _attend(query[start:end], keys, values, scale, causal, window)
            made[start:end] = attended.to(query.dtype)
        start = end
    return made, logarithms if softmax_lse_flag else torch.zeros(1)


@stands_in("npu::npu_fused_infer_attention_score_v2")
def fused_infer_attention_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_rope: Tensor,
    key_rope: Tensor,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    block_table: Tensor,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """One query a request, of latent size, over paged latents; layout BNSD, and NBSD of what is returned."""
    unknown = _asked(more)
    unknown |= {"actual_seq_qlen"} if actual_seq_qlen is not None else set()
    if (input_layout, query.shape[2], key.shape[1], sparse_mode) != ("BNSD_NBSD", 1, 1, 0) or unknown:
        raise NotImplementedError(f"attention {tuple(query.shape)} in layout {input_layout}, with {unknown}")
    made, _ = fused_infer_attention(
        query[:, :, 0],
        key[:, 0],
        value[:, 0],
        query_rope=query_rope[:, :, 0],
        key_rope=key_rope[:, 0],
        actual_seq_lengths=range(1, len(query) + 1),
        actual_seq_lengths_kv=actual_seq_kvlen,
        block_table=block_table,
        num_heads=num_query_heads,
        num_key_value_heads=num_key_value_heads,
        scale=softmax_scale,
        input_layout="TND",
        block_size=block_size,
    )
    return made.transpose(0, 1)[:, :, None].contiguous(), torch.zeros(1)


@stands_in("npu::npu_attention_update")
def attention_update(lse: list[Tensor], local_out: list[Tensor], update_type: int) -> tuple[Tensor, Tensor]:
    """Attention over all keys, of attentions over parts of them, with the logarithms of what each was divided by."""
    if update_type:
        raise NotImplementedError("logarithms of attention over all keys")
    parts = torch.stack([each.float() for each in lse])
    shares = parts.masked_fill(parts == torch.inf, -torch.inf).softmax(0)
    made = (torch.stack([each.float() for each in local_out]) * shares[..., None]).sum(0)
    return made.to(local_out[0].dtype), torch.zeros(1)


@stands_in("atb::_npu_paged_attention")
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
    workspace: Any = None,
) -> None:
    """One query a request."""
    ends, size = range(1, len(query) + 1), key_cache.shape[1]
    out.copy_(
        fused_infer_attention(
            query,
            key_cache,
            value_cache,
            actual_seq_lengths=ends,
            actual_seq_lengths_kv=context_lens,
            block_table=block_table,
            num_heads=num_heads,
            scale=scale_value,
            input_layout="TND",
            num_key_value_heads=num_kv_heads,
            block_size=size,
        )[0]
    )


STAND_INS["npu::npu_format_cast"] = lambda x, *_, **__: x.clone()


def _fill_slots(slots: Tensor, table: Tensor, block_size: int, starts: Tensor, positions: Tensor, pad: int) -> None:
    """Where each token's keys go: ``slots[token]`` is row ``block * block_size + offset`` of the cache."""
    slots[len(positions) :] = pad
    for request in range(len(table)):
        own = slice(int(starts[request]), int(starts[request + 1]))
        at = positions[own].long()
        slots[own] = (table[request, at // block_size].long() * block_size + at % block_size).to(slots.dtype)


class SlotMapping:
    """For vLLM-Ascend's Triton kernel of that name, one cache group: ``kernel[grid](...)``."""

    def __getitem__(self, grid: tuple[int, ...]) -> SlotMapping:
        self._requests = grid[0] - 1
        return self

    def __call__(
        self,
        num_tokens: int,
        max_tokens: int,
        starts: Tensor,
        positions: Tensor,
        table: Tensor,
        _stride: int,
        block_size: int,
        slots: Tensor,
        **constants: Any,
    ) -> None:
        if constants["TOTAL_CP_WORLD_SIZE"] != 1 or constants["IS_CIRCULAR"]:
            raise NotImplementedError("slots under context parallelism, or of a circular group")
        starts, positions, table, slots = map(on_host, (starts, positions, table, slots))
        pad = constants["PAD_ID"]
        _fill_slots(slots[:max_tokens], table[: self._requests], block_size, starts, positions[:num_tokens], pad)


def slots_of_groups(
    group_count: int,
    num_reqs: int,
    num_tokens: int,
    max_num_tokens: int,
    starts: Tensor,
    positions: Tensor,
    table_addresses: Tensor,
    slot_addresses: Tensor,
    table_strides: Tensor,
    block_sizes: Tensor,
    _min_block_size: int,
    *,
    pad_id: int,
    is_circular_ptr: Tensor | None = None,
) -> None:
    """For vLLM-Ascend's function of several cache groups at once, which gets the addresses of their int32 tensors."""
    if is_circular_ptr is not None and bool(on_host(is_circular_ptr).any()):
        raise NotImplementedError("slots of a circular group")
    starts, positions = on_host(starts), on_host(positions)[:num_tokens]
    by_group = (on_host(each).tolist() for each in (table_addresses, slot_addresses, table_strides, block_sizes))
    for table_address, slot_address, stride, block_size in list(zip(*by_group, strict=True))[:group_count]:
        table = _at(table_address, num_reqs * stride).view(num_reqs, stride)
        _fill_slots(_at(slot_address, max_num_tokens), table, block_size, starts, positions, pad_id)


def _at(address: int, count: int) -> Tensor:
    return torch.frombuffer((ctypes.c_int32 * count).from_address(address), dtype=torch.int32)
