"""What SGLang itself has no CPU branch for, set by its plug-in entry point (``sglang.srt.plugins``) in each process.

HiCache, a contender in the tests, pins host memory and copies with kernels; both are plain here.
"""

from __future__ import annotations

from typing import Any

import torch

Tensors = list[torch.Tensor]


def register() -> None:
    """Called by SGLang before anything else."""
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.srt.mem_cache.pool_host import mha
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    layernorm_gated._use_cpu = True  # it asks for AMX; its other branch is a Triton kernel
    HookRegistry.register("sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__", _unpinned, HookType.BEFORE)
    mha.transfer_kv_direct = transfer_kv_direct
    mha.transfer_kv_per_layer_direct_pf_lf = transfer_kv_per_layer_direct_pf_lf
    mha.transfer_kv_all_layer_direct_lf_pf = transfer_kv_all_layer_direct_lf_pf


def _unpinned(self: Any, **geometry: Any) -> tuple[tuple[Any], dict[str, Any]]:
    return (self,), {**geometry, "pin_memory": False}


def transfer_kv_direct(
    *, src_layers: Tensors, dst_layers: Tensors, src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int
) -> None:
    """Token rows, layer by layer."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    *,
    src_ptrs: Tensors,
    dst_ptrs: Tensors,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer from page-first host memory, shape (pages, layers, page, ...), to token rows."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[_pages(src_indices, page_size), layer_id].flatten(0, 1)


def transfer_kv_all_layer_direct_lf_pf(
    *, src_ptrs: Tensors, dst_ptrs: Tensors, src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int
) -> None:
    """All layers from token rows to page-first host memory."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for plane, target in enumerate(dst_ptrs):
        for layer in range(layers):
            rows = src_ptrs[plane * layers + layer][src_indices]
            target[_pages(dst_indices, page_size), layer] = rows.unflatten(0, (-1, page_size))


def _pages(indices: torch.Tensor, page_size: int) -> torch.Tensor:
    return indices.view(-1, page_size)[:, 0] // page_size
