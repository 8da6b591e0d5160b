"""Gated delta networks in plain torch: what SGLang's Qwen3.5 and Qwen3-Next call on a CPU, under its own names.

Signatures are SGLang 0.5.23's; the arithmetic is that of transformers' ``torch_recurrent_gated_delta_rule``, one token
after the other in float32. A test compares the tokens with transformers'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

Tensor = torch.Tensor


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """Convolve prompts of shape (channels, tokens), each behind its state, which is replaced by its last inputs."""
    out, keeps = torch.empty_like(x), weight.shape[1] - 1
    starts = query_start_loc.tolist()
    for row, slot in enumerate(cache_indices.tolist()):
        part = slice(starts[row], starts[row + 1])
        before = conv_states[slot, :, -keeps:] if has_initial_state[row] else x.new_zeros(len(x), keeps)
        line = torch.cat([before.to(x.dtype), x[:, part]], dim=1)
        convolved = functional.conv1d(line[None], weight[:, None].to(x.dtype), bias, groups=len(x))[0]
        out[:, part] = _activated(convolved, activation)
        conv_states[slot, :, -keeps:] = line[:, -keeps:].to(conv_states.dtype)
    return out


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """One token of each sequence, shape (sequences, channels)."""
    out, keeps = torch.empty_like(x), weight.shape[1] - 1
    for row, slot in enumerate(conv_state_indices.tolist()):
        line = torch.cat([conv_states[slot, :, -keeps:].to(x.dtype), x[row][:, None]], dim=1)
        summed = (line * weight.to(x.dtype)).sum(-1)
        out[row] = _activated(summed if bias is None else summed + bias, activation)
        conv_states[slot, :, -keeps:] = line[:, 1:].to(conv_states.dtype)
    return out


def chunk_gated_delta_rule_cpu(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    initial_state_indices: Tensor,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Run each sequence of a batch from its state, which is replaced by the one behind its last token."""
    out, starts = torch.empty_like(v), cu_seqlens.tolist()
    for row, slot in enumerate(initial_state_indices.tolist()):
        part = slice(starts[row], starts[row + 1])
        state = initial_state[slot]
        out[0, part] = _recur(q[0, part], k[0, part], v[0, part], g[0, part], beta[0, part], state).to(v.dtype)
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> Tensor:
    """The same for decoding, with the gates computed here."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    return chunk_gated_delta_rule_cpu(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state_source,
        cu_seqlens=cu_seqlens,
        initial_state_indices=initial_state_indices,
    )[0]


def fused_gdn_gating_cpu(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Decay (as a logarithm) and update strength of each token and head."""
    return (-A_log.float().exp() * functional.softplus(a.float() + dt_bias))[None], b.sigmoid()[None]


def fused_rmsnorm_gated_cpu(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """RMS norm, times the gate's SiLU."""
    return (_rms(x, eps) * weight.float() * functional.silu(gate.float())).to(x.dtype)


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """In place."""
    x.mul_(gate.sigmoid())


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, size: int
) -> tuple[Tensor, Tensor]:
    """Gemma's RMS norm (weights count from 1) of queries and keys, head by head."""
    return _gemma(q, q_weight, eps, size), _gemma(k, k_weight, eps, size)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, size: int, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same where each query head lies beside its output gate."""
    q, gate = q_gate.reshape(-1, heads, 2 * size).split(size, dim=-1)
    return _gemma(q.contiguous(), q_weight, eps, size), _gemma(k, k_weight, eps, size), gate.contiguous()


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_size: int, value_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both projections' outputs taken apart: queries, keys and values; z by head; b; a."""
    qkv = 2 * key_heads * key_size + value_heads * value_size
    b, a = ba.split(value_heads, dim=-1)
    z = qkvz[:, qkv:].reshape(-1, value_heads, value_size)
    return qkvz[:, :qkv].contiguous(), z, b.contiguous(), a.contiguous()


_OPERATORS = (
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_gdn_gating_cpu,
    fused_rmsnorm_gated_cpu,
    fused_sigmoid_mul_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
)
"""Those that SGLang calls as ``torch.ops.sgl_kernel.…``; it imports the others from here."""


def register() -> None:
    """Put the operators where SGLang looks for them."""
    for operator in _OPERATORS:
        setattr(torch.ops.sgl_kernel, operator.__name__, operator)


def _recur(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One sequence: q, k (tokens, key heads, size), v (tokens, heads, size), state (heads, value, key) in place."""
    group = v.shape[1] // q.shape[1]
    q, k = (functional.normalize(each.float(), dim=-1, eps=1e-6).repeat_interleave(group, 1) for each in (q, k))
    q, v, decay, beta = q * q.shape[-1] ** -0.5, v.float(), g.float().exp(), beta.float()
    out, carried = torch.empty_like(v), state.float()
    for token in range(len(v)):
        carried = carried * decay[token][:, None, None]
        recalled = torch.einsum("hvk,hk->hv", carried, k[token])
        update = (v[token] - recalled) * beta[token][:, None]
        carried = carried + update[:, :, None] * k[token][:, None, :]
        out[token] = torch.einsum("hvk,hk->hv", carried, q[token])
    state.copy_(carried)
    return out


def _activated(x: Tensor, activation: str | None) -> Tensor:
    return functional.silu(x) if activation in ("silu", "swish") else x


def _rms(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _gemma(x: Tensor, weight: Tensor, eps: float, size: int) -> Tensor:
    return (_rms(x.reshape(-1, size), eps) * (1 + weight.float())).to(x.dtype)
