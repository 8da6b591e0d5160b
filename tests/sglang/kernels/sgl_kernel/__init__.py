"""A stand-in for SGLang's kernel package, which has no build for a CPU without AMX.

SGLang imports about fifteen operators from here when ``SGLANG_USE_CPU_ENGINE=1``, and calls one of them outside
speculative decoding. That one is written out, and in :mod:`.speculative` those that chains of drafted tokens need;
every other name imports, and raises when it is called.
``torch.ops.sgl_kernel.convert_weight_packed`` must stay absent: SGLang takes it as a sign that AMX is there.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from sgl_kernel import mamba
from sgl_kernel.speculative import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]

mamba.register()


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new token slots into its row of the table, from its start to its end."""
    taken = 0
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in bounds:
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start]
        taken += end - start


def __getattr__(name: str) -> Any:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def absent(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on this machine")

    return absent
