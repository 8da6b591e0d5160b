"""DeepSeek-V4's caches: vLLM's own specs and packed layout over CPU buffers, saved and loaded, every byte compared.

The model itself does not run here: its kernels need a GPU. What its layers would write is written by the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from e2e.known import KnownWorker
from engines import VERSION

from layerflow.connectors.vllm import layout as layouts
from layerflow.connectors.vllm.options import Options
from layerflow.spec import GroupSpec

if VERSION < (0, 28):
    pytest.skip("this vLLM lays no groups of several sizes into one tensor", allow_module_level=True)
try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout

RATIOS = (0, 0, *(4, 128) * 20, 4)
"""Of the 43 layers of V4-Flash: 0 = a window only."""
SCHEDULER_BLOCK, WINDOW = 256, 128
MLA = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": 576}


def caches() -> dict[str, Any]:
    """What the model's layers answer when vLLM asks them for their caches (fp8_ds_mla, no speculative layer)."""
    found: dict[str, Any] = {}
    packed = {
        **MLA,
        "head_size": 512,
        "dtype": torch.uint8,
        "cache_dtype_str": "fp8_ds_mla",
        "state_content_bytes": 584,
    }
    for layer, ratio in enumerate(RATIOS):
        name = f"model.layers.{layer}.attn"
        found[f"{name}.swa_cache"] = SlidingWindowMLASpec(
            block_size=64, sliding_window=WINDOW, model_version="deepseek_v4", **packed
        )
        if not ratio:
            continue
        found[f"{name}.mla_attn"] = MLAAttentionSpec(
            block_size=SCHEDULER_BLOCK, tokens_per_state=ratio, model_version="deepseek_v4", **packed
        )
        found[f"{name}.compressor.state_cache"] = _state(4, 8, 2048) if ratio == 4 else _state(8, 128, 1024)
        if ratio == 4:
            found[f"{name}.indexer.k_cache"] = MLAAttentionSpec(
                block_size=SCHEDULER_BLOCK, head_size=132, dtype=torch.uint8, tokens_per_state=4, **MLA
            )
            found[f"{name}.indexer.compressor.state_cache"] = _state(4, 8, 512)
    return found


def _state(block: int, window: int, width: int) -> Any:
    return SlidingWindowMLASpec(block_size=block, sliding_window=window, head_size=width, dtype=torch.float32, **MLA)


@pytest.fixture(scope="module")
def layout() -> layouts.Layout:
    """As the connector sees it, over 400 packed blocks."""
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
            prefix_cache_retention_interval=None,
            num_gpu_blocks_override=400,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        parallel_config=SimpleNamespace(
            rank=0, tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1
        ),
        speculative_config=None,
    )
    groups = get_kv_cache_groups(config, caches())
    cache = get_kv_cache_config_from_groups(config, groups, 4 << 30)
    raw = torch.zeros(cache.kv_cache_tensors[0].size, dtype=torch.int8)
    specs = {name: spec for group in groups for name, spec in _members(group)}
    views: dict[str, torch.Tensor] = {}
    for part in cache.kv_cache_tensors:
        made = create_kv_cache_views(raw, specs[part.layers[0]], cache.num_blocks, KVCacheLayout.BLHNC, part)
        views |= dict(zip(part.layers, made, strict=True))
    return _translated(config, cache, views)


def _members(group: Any) -> Iterator[tuple[str, Any]]:
    for name in group.layer_names:
        yield name, layouts._layer_spec(group.kv_cache_spec, name)


def _translated(config: Any, cache: Any, views: dict[str, torch.Tensor]) -> layouts.Layout:
    with pytest.MonkeyPatch.context() as patch:
        # There is no model here whose weights or backends could be asked.
        patch.setattr(layouts, "checkpoint_of", lambda *_: layouts.Checkpoint("deepseek-v4-flash"))
        patch.setattr(layouts, "_arithmetic", lambda *_: "")
        patch.setattr(layouts, "_packing", lambda *_: "packed")
        config.model_config = SimpleNamespace(served_model_name="v4", model="v4", get_total_num_kv_heads=lambda: 1)
        config.load_config = None
        return layouts.layout_of(config, cache, views, Options()).with_content()


def test_the_groups_are_those_of_the_model(layout: layouts.Layout) -> None:
    spec = layout.spec
    assert spec.num_layers == 43 + 21 * 4 + 20 * 2 and spec.alignment == 128 and spec.chunk_tokens == 256
    found = sorted((g.kind, g.ratio, g.block_size, g.window, g.bytes_per_block, len(g.layers)) for g in spec.groups)
    by_shape: dict[tuple[int, ...], int] = {}
    for kind, *shape, layers in found:
        by_shape[(kind == "mla", *shape)] = by_shape.get((kind == "mla", *shape), 0) + layers
    assert by_shape == {
        (True, 4, 256, 0, 64 * 584): 21,
        (True, 4, 256, 0, 64 * 132): 21,
        (True, 128, 256, 0, 2 * 584): 20,
        (False, 1, 64, 128, 64 * 584): 43,
        (False, 1, 4, 8, 32768): 21,
        (False, 1, 4, 8, 8192): 21,
        (False, 1, 8, 128, 32768): 20,
    }


def test_every_byte_at_every_alignment(layout: layouts.Layout, embed: Any) -> None:
    """Saved whole, found again at each multiple that was kept; a continuation, an early end, an evicted pool."""
    server = embed(pool__size="256MiB", transfer__step_timeout_ms=60_000, transfer__save_timeout_ms=60_000)
    more: dict[str, Any] = {"context": server.context, "lookup_timeout_s": 30.0}
    with KnownWorker(server.endpoint, layout.spec, 400, tensors=layout.tensors, aliased=True, **more) as worker:
        stored = worker.prompt(3 * 256 + 128)
        assert worker.serve(stored).hit.tokens == 0
        for extra, hit in ((1, 896), (200, 896)):
            longer = worker.prompt(896 + extra, like=stored, shared=896)
            assert worker.serve(longer).hit.tokens == hit
        for tokens, hit in ((129, 0), (257, 256), (400, 256), (513, 512), (769, 768)):
            early = worker.prompt(tokens, like=stored, shared=tokens - 1)
            assert worker.serve(early).hit.tokens == hit, tokens
        assert worker.serve(stored).hit.tokens == 768, "one token is computed, and no row of 128 is cut"
        for _ in range(8):  # more than the pool holds
            worker.serve(worker.prompt(1024))
        assert worker.serve(stored).hit.tokens in (0, 256, 512, 768)


def test_bytes_per_token(layout: layouts.Layout) -> None:
    """Windows are stored as the tail of a chunk only: 5.1 times less than all that vLLM ever has in them."""

    def stored(group: GroupSpec, blocks: int) -> float:
        return blocks * group.bytes_per_block * len(group.layers) / layout.spec.chunk_tokens

    groups = layout.spec.groups
    whole = sum(stored(group, 256 // group.block_size) for group in groups)
    kept = sum(stored(group, len(group.rules.keep(256))) for group in groups)
    states = sum(stored(group, len(group.rules.keep(256))) for group in groups if group.block_size < 64)
    assert (kept, states, round(whole)) == (64086.25, 47680.0, 325922)
