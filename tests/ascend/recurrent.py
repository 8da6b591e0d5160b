"""What the kernels of recurrent layers (gated delta net) compute, in torch: those of flash-linear-attention-npu, and
vLLM-Ascend's own in Triton.

Shapes: T tokens of all requests in a row, H heads of keys (K values each) and G of values (V each), G a multiple of H.
A slot of the recurrent state is (G, V, K), one of the convolution's (its width - 1, channels), the newest row last.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from host_arithmetic import lent, on_host
from torch import Tensor

EPSILON = 1e-6


def _lent(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for npu tensors, see :func:`host_arithmetic.lent`. One of the arguments is one."""

    @functools.wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        tensors = (each for each in (*given, *named.values()) if isinstance(each, Tensor))
        return lent(function, given, named, next(tensor.device for tensor in tensors if tensor.device.type == "npu"))

    return called


def l2norm(x: Tensor, eps: float = EPSILON) -> Tensor:
    """To length 1, of the last axis."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + eps)).to(x.dtype)


def gating(decay: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(1, T, G) each: the logarithm of what is kept of the state, and how much of a token is written."""
    kept = -decay.float().exp() * torch.nn.functional.softplus(a.float() + bias.float())
    return kept[None], b.float().sigmoid().to(b.dtype)[None]


def split_interleaved(qkvz: Tensor, ba: Tensor, heads: int, value_heads: int, size: int, value_size: int) -> Any:
    """From each key head's own rows to (T, queries | keys | values), (T, G, V), and (T, G) twice."""
    each = value_heads // heads
    query, key, value, gate = qkvz.view(len(qkvz), heads, -1).split(
        [size, size, each * value_size, each * value_size], dim=-1
    )
    b, a = ba.view(len(ba), heads, 2 * each).split([each, each], dim=-1)
    mixed = torch.cat([part.flatten(1) for part in (query, key, value)], dim=-1)
    return mixed, gate.reshape(len(qkvz), value_heads, value_size), b.flatten(1), a.flatten(1)


def clear_states(states: Tensor, has_initial_state: Tensor) -> None:
    """Zero the rows of requests that begin."""
    states[~has_initial_state.bool()] = 0


def gated_norm(x: Tensor, weight: Tensor, bias: Any, z: Tensor, eps: float, group_size: Any, *flags: bool) -> Tensor:
    """``norm(x) * silu(z)``.

    :param flags: norm before gate, and root mean square.
    """
    if bias is not None or group_size not in (None, x.shape[-1]) or flags != (True, True):
        raise NotImplementedError("another norm than that of Qwen3-Next")
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return (normed * torch.nn.functional.silu(z.float())).to(x.dtype)


def _requests(starts: Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(starts.tolist()))


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor | None,
    activation: str | None,
    pad_slot_id: int = -1,
    null_block_id: int = 0,
    **_: Any,
) -> Tensor:
    """Each channel over its last rows.

    :param x: (T, channels). :param weight: (width, channels). :param conv_states: (slots, width - 1, channels).
    """
    made, before = torch.zeros_like(x), len(weight) - 1
    for number, (begin, end) in enumerate(_requests(query_start_loc)):
        slot = int(cache_indices[number])
        if end == begin or slot in (pad_slot_id, null_block_id):
            continue
        known = has_initial_state is None or bool(has_initial_state[number])
        past = conv_states[slot, :before] if known else torch.zeros_like(conv_states[slot, :before])
        rows = torch.cat((past.to(x.dtype), x[begin:end]))
        total = sum(weight[at].float() * rows[at : at + end - begin].float() for at in range(before + 1))
        total = total if bias is None else total + bias.float()
        made[begin:end] = (torch.nn.functional.silu(total) if activation == "silu" else total).to(x.dtype)
        conv_states[slot, :before] = rows[len(rows) - before :].to(conv_states.dtype)
    return made


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    num_accepted_tokens: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """A token each, of requests that have a state."""
    if num_accepted_tokens is not None:
        raise NotImplementedError("speculative decoding")
    made = causal_conv1d(
        x,
        weight,
        bias,
        conv_states=conv_state,
        query_start_loc=query_start_loc[: len(conv_state_indices) + 1],
        cache_indices=conv_state_indices,
        has_initial_state=None,
        activation=activation,
    )
    out.copy_(made)
    return out


def _recur(
    query: Tensor, key: Tensor, value: Tensor, kept: Tensor, written: Tensor, state: Tensor, scale: float
) -> Tensor:
    """One request's tokens, one after the other. Changes `state`, (G, V, K) of float32.

    :returns: (T, G, V).
    """
    repeats = value.shape[1] // query.shape[1]
    queries, keys = (each.float().repeat_interleave(repeats, 1) for each in (query, key))
    values, kept, written = value.float(), kept.float().exp(), written.float()
    made = torch.empty(value.shape)
    for token in range(len(value)):
        state *= kept[token, :, None, None]
        error = (values[token] - (state @ keys[token, :, :, None]).squeeze(-1)) * written[token, :, None]
        state += error[:, :, None] * keys[token, :, None, :]
        made[token] = (state @ queries[token, :, :, None]).squeeze(-1) * scale
    return made


def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    states: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    scale: float,
    actual_seq_lengths: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
) -> Tensor:
    """A token each, of requests that have a state; (T, H, K) and (T, G, V)."""
    if num_accepted_tokens is not None:
        raise NotImplementedError("speculative decoding")
    made = torch.zeros_like(value)
    for token, slot in enumerate(ssm_state_indices.tolist()[: len(value)]):
        state = states[slot].float()
        one = slice(token, token + 1)
        made[one] = _recur(query[one], key[one], value[one], g[one], beta[one], state, scale).to(value.dtype)
        states[slot] = state.to(states.dtype)
    return made


def chunk_gated_delta_rule(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    output_final_state: bool,
    head_first: bool,
    prebuilt_meta: Any = None,
) -> tuple[Tensor, Tensor]:
    """Whole pieces of prompts; all have a leading axis of 1, and states are (requests, G, K, V).

    :returns: (1, T, G, V), and the states behind them.
    """
    if head_first or not output_final_state:
        raise NotImplementedError("another layout than that of vLLM-Ascend's gated delta net")
    query, key = (l2norm(each[0]) if use_qk_l2norm_in_kernel else each[0] for each in (q, k))
    made, final = torch.zeros_like(v), torch.empty(initial_state.shape)
    for number, (begin, end) in enumerate(_requests(cu_seqlens)):
        state = initial_state[number].float().transpose(-1, -2).contiguous()
        one = slice(begin, end)
        made[0, one] = _recur(query[one], key[one], v[0, one], g[0, one], beta[0, one], state, k.shape[-1] ** -0.5).to(
            v.dtype
        )
        final[number] = state.transpose(-1, -2)
    return made, final


class CopyStates:
    """For vLLM-Ascend's Triton kernel of that name: ``kernel[grid](sources, targets, sizes, ...)``."""

    def __getitem__(self, grid: Sequence[int]) -> CopyStates:
        return self

    def __call__(self, sources: Tensor, targets: Tensor, sizes: Tensor, **_: Any) -> None:
        for source, target, size in zip(*(on_host(each).tolist() for each in (sources, targets, sizes)), strict=True):
            ctypes.memmove(target, source, size)


def install() -> None:
    """Put these in place of the kernels, where vLLM-Ascend calls them."""
    from vllm.model_executor.models import qwen3_next
    from vllm_ascend.device.device_op import DeviceOperator
    from vllm_ascend.ops import gdn, layernorm
    from vllm_ascend.patch.worker import patch_mamba_utils

    gdn.causal_conv1d_fn = _lent(causal_conv1d)
    gdn.causal_conv1d_update = _lent(causal_conv1d_update)
    gdn.recurrent_gated_delta_rule = _lent(recurrent_gated_delta_rule)
    gdn._get_fla_gdn_prefill_op = lambda: None  # of three ways for whole pieces of prompts, the one in Triton
    gdn.AscendGatedDeltaNetAttention._fused_chunk_available = False
    gdn.chunk_gated_delta_rule = _lent(chunk_gated_delta_rule)
    gdn.l2norm_fwd = _lent(l2norm)
    gdn.fused_qkvzba_split_reshape_cat = _lent(split_interleaved)
    gdn.clear_ssm_states = _lent(clear_states)
    qwen3_next.QwenNextMixtureOfExperts.set_moe_parameters = lambda _model: (
        None
    )  # vLLM misses experts where there are none
    DeviceOperator.fused_gdn_gating = staticmethod(_lent(gating))
    patch_mamba_utils.batch_memcpy_kernel = CopyStates()

    class Norm:
        apply = staticmethod(_lent(gated_norm))

    layernorm.LayerNormFn = Norm
