"""The same transformer written down plainly: whole sequence, no pages, no tiles, keys and values expanded."""

from __future__ import annotations

import math

import torch

from layerflow_engine.attention import ROPE_BASE
from layerflow_engine.config import EngineConfig


def norm(x):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def turn(x, every=1):
    """Rotary embedding of (tokens, heads, dim) as complex numbers; of each `every`-th position."""
    tokens, _, dim = x.shape
    angles = torch.outer(torch.arange(tokens).double() * every, ROPE_BASE ** (-torch.arange(0, dim, 2).double() / dim))
    turned = (
        torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return torch.cat((turned.real, turned.imag), -1)


def attention(q, k, v, allowed):
    """(tokens, heads, dim) each, allowed (tokens, tokens)."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -math.inf).softmax(-1), v).flatten(1)


def gqa(config, w, x, allowed):
    q, k, v = ((x @ w[name].T).unflatten(-1, (-1, config.head_dim)) for name in "qkv")
    share = config.heads // config.kv_heads
    k, v = turn(k).repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    return attention(turn(q), k, v, allowed) @ w["o"].T


def mla(config, w, x, allowed):
    heads, dim, tokens = config.heads, config.head_dim, len(x)
    latent = x @ w["latent"].T
    keys, values = ((latent @ w[name].T).unflatten(-1, (heads, dim)) for name in ("key_up", "value_up"))
    rope = turn((x @ w["rope"].T)[:, None]).expand(-1, heads, -1)
    q = (x @ w["q"].T).unflatten(-1, (heads, dim + config.rope_dim))
    q = torch.cat((q[..., :dim], turn(q[..., dim:])), -1)

    raw = x @ w["index_k"].T
    scale = (raw.abs().amax(-1, keepdim=True) / 127).half().double()
    index_keys = (raw / scale).round() * scale
    products = torch.einsum("qhd,kd->qhk", (x @ w["index_q"].T).unflatten(-1, (config.index_heads, -1)), index_keys)
    wanted = torch.einsum("qhk,qh->qk", products.relu(), x @ w["index_mix"].T).masked_fill(~allowed, -math.inf)
    chosen = torch.zeros_like(allowed)
    for row in range(tokens):
        context = -(-(row + 1) // config.tile) * config.tile
        keep = max(config.index_floor, math.ceil(context / 2))
        best = wanted[row].sort(descending=True).values[min(keep, tokens) - 1]
        chosen[row] = allowed[row] & (wanted[row] >= best)
    return attention(q, torch.cat((keys, rope), -1), values, chosen) @ w["o"].T


def compressed(config, ratio, w, x, allowed, near):
    """Row by row: of which tokens each is made, and who sees it."""
    tokens, heads, dim = len(x), config.heads, config.head_dim
    q = turn((x @ w["q"].T).unflatten(-1, (heads, dim)))
    offer, score = x @ w["offer"].T, x @ w["score"].T
    rows = []
    for end in range(ratio, tokens + 1, ratio):
        first = max(0, end - 2 * ratio)
        share = (score[first:end] + w["bias"][2 * ratio - (end - first) :]).softmax(0)
        rows.append((share * offer[first:end]).sum(0))
    whole = torch.stack(rows) if rows else x.new_zeros(0, 2 * dim)
    row_k, row_v = turn(norm(whole[:, None, :dim]) * 2.3, ratio), norm(whole[:, None, dim:])
    k = torch.cat((row_k, turn((x @ w["k"].T)[:, None])))
    v = torch.cat((row_v, (x @ w["v"].T)[:, None]))
    ends = (torch.arange(len(rows)) + 1) * ratio - 1
    seen = torch.cat((ends[None] <= torch.arange(tokens)[:, None], allowed & near), 1)
    return attention(q, k.expand(-1, heads, -1), v.expand(-1, heads, -1), seen) @ w["o"].T


def logits(config: EngineConfig, weights: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """Of every position, float64 (tokens, vocabulary)."""
    x = weights["embed"].double()[torch.tensor(tokens)]
    position = torch.arange(len(tokens))
    causal = position[None] <= position[:, None]
    near = position[None] > position[:, None] - config.window
    for layer, kind in enumerate(config.kinds):
        prefix = f"layers.{layer}."
        w = {name.removeprefix(prefix): t.double() for name, t in weights.items() if name.startswith(prefix)}
        if kind == "compressed":
            x = x + compressed(config, config.ratios[layer], w, norm(x), causal, near)
        else:
            attend = mla if kind == "mla" else gqa
            x = x + attend(config, w, norm(x), causal & near if kind == "sliding" else causal)
        y = norm(x)
        x = x + (torch.nn.functional.silu(y @ w["gate"].T) * (y @ w["up"].T)) @ w["down"].T
    return norm(x) @ weights["head"].double().T
