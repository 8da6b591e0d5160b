"""DeepSeek-V4's caches: vLLM's own specs and packed layout over CPU buffers, saved and loaded, every byte compared.

The model itself does not run here: its kernels need a GPU. What its layers would write is written by the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from e2e.known import KnownWorker
from engines import VERSION

from layerflow.connectors.vllm import layout as layouts
from layerflow.connectors.vllm.options import Options
from layerflow.errors import Unsupported
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
READ = Options(compressor_states="read")
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


def state_layers() -> dict[str, Any]:
    """The model's compressor states, as vLLM's own class."""
    compressor = pytest.importorskip("vllm.models.deepseek_v4.compressor")
    context: dict[str, Any] = {}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    with patch.object(compressor, "get_current_vllm_config", lambda: config):
        for name, spec in caches().items():
            if name.endswith(".state_cache"):
                ratio = 4 if spec.sliding_window == 8 else 128
                compressor.CompressorStateCache(spec.head_size, spec.dtype, ratio, name)
    return context


@pytest.fixture(scope="module")
def layout() -> layouts.Layout:
    """As the connector sees it, over 400 packed blocks."""
    return laid_out(Options())


@pytest.fixture(scope="module")
def lean() -> layouts.Layout:
    """The same, where of compressor states only those that are read behind a hit are stored."""
    return laid_out(READ)


def laid_out(options: Options, context: dict[str, Any] | None = None, without: tuple[str, ...] = ()) -> layouts.Layout:
    """Lay the model's caches out.

    :param context: vLLM's layers by name; None = all compressor states. :param without: ends of names of
        caches that the model has not.
    """
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
        device_config=SimpleNamespace(device_type="cuda"),
        compilation_config=SimpleNamespace(static_forward_context=state_layers() if context is None else context),
    )
    named = {name: spec for name, spec in caches().items() if not name.endswith(without)}
    groups = get_kv_cache_groups(config, named)
    cache = get_kv_cache_config_from_groups(config, groups, 4 << 30)
    raw = torch.zeros(cache.kv_cache_tensors[0].size, dtype=torch.int8)
    specs = {name: spec for group in groups for name, spec in _members(group)}
    views: dict[str, torch.Tensor] = {}
    for part in cache.kv_cache_tensors:
        made = create_kv_cache_views(raw, specs[part.layers[0]], cache.num_blocks, KVCacheLayout.BLHNC, part)
        views |= dict(zip(part.layers, made, strict=True))
    return _translated(config, cache, views, options)


def _members(group: Any) -> Iterator[tuple[str, Any]]:
    for name in group.layer_names:
        yield name, layouts._layer_spec(group.kv_cache_spec, name)


def _translated(config: Any, cache: Any, views: dict[str, torch.Tensor], options: Options) -> layouts.Layout:
    with pytest.MonkeyPatch.context() as patch:
        # There is no model here whose weights or backends could be asked.
        patch.setattr(layouts, "checkpoint_of", lambda *_: layouts.Checkpoint("deepseek-v4-flash"))
        patch.setattr(layouts, "_arithmetic", lambda *_: "")
        patch.setattr(layouts, "_packing", lambda *_: "packed")
        config.model_config = SimpleNamespace(served_model_name="v4", model="v4", get_total_num_kv_heads=lambda: 1)
        config.load_config = None
        return layouts.layout_of(config, cache, views, options).with_content()


def shapes(layout: layouts.Layout) -> dict[tuple[int, ...], int]:
    """How many layers have a cache of each shape."""
    by_shape: dict[tuple[int, ...], int] = {}
    for group in layout.spec.groups:
        shape = (group.kind == "mla", group.ratio, group.block_size, group.window, group.bytes_per_block)
        by_shape[shape] = by_shape.get(shape, 0) + len(group.layers)
    return by_shape


def test_the_groups_are_those_of_the_model(layout: layouts.Layout) -> None:
    spec = layout.spec
    assert spec.num_layers == 43 + 21 * 4 + 20 * 2 and spec.alignment == 128 and spec.chunk_tokens == 256
    assert shapes(layout) == {
        (True, 4, 256, 0, 64 * 584): 21,
        (True, 4, 256, 0, 64 * 132): 21,
        (True, 128, 256, 0, 2 * 584): 20,
        (False, 1, 64, 128, 64 * 584): 43,
        (False, 1, 4, 8, 32768): 21,
        (False, 1, 4, 8, 8192): 21,
        (False, 1, 8, 128, 32768): 20,
    }


def test_of_states_those_that_are_read_behind_a_hit(layout: layouts.Layout, lean: layouts.Layout) -> None:
    """None of ratio 128, of ratio 4 one block; all else, and where hits end, is as with all states."""
    every, few = shapes(layout), shapes(lean)
    assert few == {shape: n for shape, n in every.items() if shape[2] > 8} | {
        (False, 1, 4, 4, 32768): 21,
        (False, 1, 4, 4, 8192): 21,
    }
    assert (lean.spec.alignment, lean.spec.chunk_tokens) == (layout.spec.alignment, layout.spec.chunk_tokens)
    assert lean.spec.fingerprint != layout.spec.fingerprint, "keys are others: the objects are"
    assert set(lean.vllm_groups) < set(layout.vllm_groups), "some of vLLM's tables hold nothing that is moved"


@pytest.mark.parametrize("context", [{}, {name: object() for name in caches()}], ids=["none", "others"])
def test_states_that_are_not_vllms_own_are_all_stored(layout: layouts.Layout, context: dict[str, Any]) -> None:
    """An engine's own compressor may keep a running state, which every token behind a hit reads."""
    assert shapes(laid_out(READ, context)) == shapes(layout)


def test_states_are_left_out_only_where_hits_end_with_their_rows() -> None:
    """A model of which only the rows of 4 tokens are cached: hits end at multiples of 4, inside of rows of 128."""
    rows_of_128 = tuple(f".{layer}.attn.mla_attn" for layer, ratio in enumerate(RATIOS) if ratio == 128)
    with pytest.raises(Unsupported, match="hits of this model end at multiples of 4 tokens"):
        laid_out(READ, without=rows_of_128)


@dataclass
class Compressor:
    """One of vLLM's compressors, its states and rows as two tensors in which a request's blocks follow each other."""

    ratio: int
    width: int

    def __post_init__(self) -> None:
        self.overlap = self.ratio == 4
        self.block = 4 if self.overlap else 8
        self.window = self.ratio * (1 + self.overlap)

    def rows(self, states: torch.Tensor, hit: int, upto: int, computed: torch.Tensor) -> torch.Tensor:
        """What vLLM's kernels make of tokens from `hit` on: uint8, their rows.

        :param states: of the tokens before, shape ``(tokens, values)``.
        :param computed: of the tokens from `hit` on, before the kernels see them.
        """
        cpu = pytest.importorskip("vllm.models.deepseek_v4.cpu.cpu_compressor")
        from vllm.models.deepseek_v4.compressor import CompressorMetadata

        if not hasattr(torch.ops._C, "compress_norm_rope_store_cpu"):
            pytest.skip("this processor has none of vLLM's kernels for DeepSeek-V4")
        whole = upto // SCHEDULER_BLOCK + 1
        cache = torch.zeros(whole * SCHEDULER_BLOCK // self.block, self.block, states.shape[1])
        cache.view(-1, states.shape[1])[:hit] = states[:hit]
        row_bytes = 584 if self.width == 512 else 132
        rows = torch.zeros((whole, SCHEDULER_BLOCK // self.ratio, row_bytes), dtype=torch.uint8)
        positions = torch.arange(hit, upto)
        ends = (positions + 1) % self.ratio == 0
        tables = torch.arange(len(cache), dtype=torch.int32)[None]
        told = {
            "states": CompressorMetadata(tables, positions, self.block, torch.zeros(upto - hit, dtype=torch.int32)),
            "rows": SimpleNamespace(slot_mapping=torch.where(ends, positions // self.ratio, -1)),
        }
        compressor: Any = SimpleNamespace(
            coff=1 + self.overlap,
            head_dim=self.width,
            ape=torch.zeros(self.ratio, self.width * (1 + self.overlap)),
            state_cache=SimpleNamespace(prefix="states", kv_cache=cache),
            overlap=self.overlap,
            compress_ratio=self.ratio,
            k_cache_prefix="rows",
            _static_forward_context={"rows": SimpleNamespace(kv_cache=rows)},
            _norm_weight_fp32=torch.ones(self.width),
            rms_norm_eps=1e-6,
        )
        with patch.object(cpu, "get_forward_context", lambda: SimpleNamespace(attn_metadata=told)):
            rotary = SimpleNamespace(cos_sin_cache=torch.ones(upto, 64))
            cpu.DeepseekV4CPUCompressor.forward(compressor, computed, positions, rotary)
        return rows


@pytest.mark.parametrize(("ratio", "width"), [(4, 512), (4, 128), (128, 512)])
def test_the_stored_states_are_those_that_vllms_kernels_read(lean: layouts.Layout, ratio: int, width: int) -> None:
    """Each state before a hit in turn is garbage: rows change with those that are stored, and with no other."""
    compressor, hit, upto = Compressor(ratio, width), 256, 512
    values = torch.Generator().manual_seed(ratio + width)
    states = torch.randn(hit, 2 * width * (1 + compressor.overlap), generator=values)
    computed = torch.randn(upto - hit, states.shape[1], generator=values)
    right = compressor.rows(states, hit, upto, computed)

    def matters(token: int, end: int) -> bool:
        garbage = states.clone()
        garbage[token] = 50 * torch.randn(states.shape[1], generator=values)
        told = [compressor.rows(each, end, upto, torch.cat((states[end:hit], computed))) for each in (states, garbage)]
        return not torch.equal(*told)

    assert matters(253, 254), "a hit inside of a row reads its states"
    read = {token for token in range(hit - compressor.window - 8, hit) if matters(token, hit)}
    nothing = torch.full_like(states, float("nan"))
    stored = {
        token
        for group in lean.spec.groups
        if (group.kind, group.block_size, group.bytes_per_block)
        == ("sliding", compressor.block, compressor.block * states.shape[1] * 4)
        for token in range(group.rules.first_token(hit) // group.block_size * group.block_size, hit)
    }
    assert read == stored and len(read) == compressor.window - ratio
    nothing[sorted(stored)] = states[sorted(stored)]
    assert torch.equal(compressor.rows(nothing, hit, upto, computed), right)


@pytest.mark.parametrize("states", ["all", "read"])
def test_every_byte_at_every_alignment(states: str, request: pytest.FixtureRequest, embed: Any) -> None:
    """Saved whole, found again at each multiple that was kept; a continuation, an early end, an evicted pool."""
    layout: layouts.Layout = request.getfixturevalue("layout" if states == "all" else "lean")
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


def test_bytes_per_token(layout: layouts.Layout, lean: layouts.Layout) -> None:
    """Windows are stored as the tail of a chunk only: 5.1 times less than all that vLLM ever has in them."""

    def stored(group: GroupSpec, blocks: int) -> float:
        return blocks * group.bytes_per_block * len(group.layers) / layout.spec.chunk_tokens

    few = sum(stored(group, len(group.rules.keep(256))) for group in lean.spec.groups)
    assert few == 19766.25, "3.2 times less again, without the states that nothing reads"
    groups = layout.spec.groups
    whole = sum(stored(group, 256 // group.block_size) for group in groups)
    kept = sum(stored(group, len(group.rules.keep(256))) for group in groups)
    states = sum(stored(group, len(group.rules.keep(256))) for group in groups if group.block_size < 64)
    assert (kept, states, round(whole)) == (64086.25, 47680.0, 325922)
