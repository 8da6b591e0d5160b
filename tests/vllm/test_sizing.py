"""What ``layerflow plan`` computes from a ``config.json``, against the specs that vLLM itself makes of it.

Attention: vLLM's model configuration says heads and head size. Recurrent state: the model's class says shapes and
dtypes. DeepSeek's packed rows: vLLM's specs. And the tiny models' layers, made by vLLM, say all of theirs.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import VERSION
from models import MODELS as TINY
from sizing.models import MODELS

from layerflow.connectors.vllm.options import Options
from layerflow.errors import ConfigError
from layerflow.sizing import capacity_of, model_of, shape_of
from layerflow.spec import GroupSpec, ModelSpec

if VERSION < (0, 32):
    pytest.skip("sizes follow vLLM 0.32", allow_module_level=True)
from vllm.model_executor.models import ModelRegistry
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec

STATES = {
    # Its own class calls the same functions, but is loaded only where torchvision is.
    "Qwen3.5": "Qwen3NextForCausalLM",
    "Qwen3-Next-80B-A3B": "Qwen3NextForCausalLM",
    "Granite-4.0-H-Small": "GraniteMoeHybridForCausalLM",
    "Nemotron-H": "NemotronHForCausalLM",
    "Jamba": "JambaForCausalLM",
}
HYBRIDS = {
    **MODELS,
    "Qwen3.5": {
        "model_type": "qwen3_5_text", "num_hidden_layers": 8, "full_attention_interval": 4, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32", "torch_dtype": "bfloat16",
    },
    "Nemotron-H": {
        "model_type": "nemotron_h", "hybrid_override_pattern": "M-M-M-M*-M-M-M*-", "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 80, "n_groups": 8,
        "ssm_state_size": 128, "conv_kernel": 4, "torch_dtype": "bfloat16",
    },
    "Jamba": {
        "model_type": "jamba", "num_hidden_layers": 16, "attn_layer_period": 8, "attn_layer_offset": 4,
        "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "mamba_d_state": 16,
        "mamba_d_conv": 4, "mamba_expand": 2, "torch_dtype": "bfloat16",
    },
}  # fmt: skip


def told(config: dict[str, Any], tp: int) -> Any:
    """As much of vLLM's configuration as a model's class looks at."""
    fields = SimpleNamespace(**config)
    matrix = "float32" if config["model_type"] in ("nemotron_h", "qwen3_5_text") else "auto"
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=fields, hf_text_config=fields, dtype=torch.bfloat16),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp),
        cache_config=SimpleNamespace(
            mamba_cache_dtype="auto", mamba_ssm_cache_dtype=matrix, use_replayssm=False, mamba_backend=None
        ),
        speculative_config=None,
        num_speculative_tokens=0,
    )


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("name", STATES)
def test_recurrent_states_are_as_large_as_the_models_class_says(name: str, tp: int) -> None:
    made = told(HYBRIDS[name], tp)
    (model,) = (ModelRegistry._try_load_model_cls(STATES[name]),)
    assert model is not None
    spec = MambaSpec(
        shapes=model.get_mamba_state_shape_from_config(made),
        dtypes=model.get_mamba_state_dtype_from_config(made),
        block_size=16,
    )
    (state,) = (
        group for group in model_of(shape_of(HYBRIDS[name]), tp=tp).groups if group.kind == "state"
    )  # one kind of state
    assert state.bytes_per_block == spec.page_size_bytes


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_sparse_latents_and_their_indexer(kv_dtype: str) -> None:
    packed = {"dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 656}
    plain = {"dtype": torch.bfloat16}
    latent = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, **(packed if kv_dtype == "fp8" else plain))
    indexer = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    groups = model_of(shape_of(MODELS["DeepSeek-V3.2"], kv_dtype), block_tokens=64).groups
    assert [group.bytes_per_block for group in groups] == [
        latent.unpadded_page_size_bytes,
        indexer.unpadded_page_size_bytes,
    ]


def test_deepseek_v4s_groups_are_those_of_vllms_specs() -> None:
    from test_compressed import caches

    theirs = Counter(
        (
            type(spec).__name__.startswith("Sliding"),
            spec.block_size,
            spec.sliding_window or 0,
            int(spec.tokens_per_state),
            spec.unpadded_page_size_bytes,
        )
        for spec in caches().values()
    )
    ours = Counter[tuple[bool, int, int, int, int]]()
    for group in model_of(shape_of(MODELS["DeepSeek-V4-Flash"])).groups:
        row = group.kind == "sliding", group.block_size, group.window, group.ratio, group.bytes_per_block
        ours[row] += len(group.layers)
    assert ours == theirs


def test_deepseek_v4s_read_states_are_those_of_the_connector() -> None:
    from test_compressed import laid_out

    def rows(spec: ModelSpec) -> Counter[tuple[str, int, int, int, int]]:
        found = Counter[tuple[str, int, int, int, int]]()
        for group in spec.groups:
            found[group.kind, group.block_size, group.window, group.ratio, group.bytes_per_block] += len(group.layers)
        return found

    planned = model_of(shape_of(MODELS["DeepSeek-V4-Flash"], compressor_states="read"))
    assert rows(planned) == rows(laid_out(Options(compressor_states="read")).spec)


@pytest.mark.parametrize("told", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Gemma-3-27B"])
def test_auto_dtypes_are_as_wide_as_vllms(name: str, told: str) -> None:
    from vllm.config.model import _resolve_auto_dtype

    theirs = _resolve_auto_dtype(MODELS[name]["model_type"], getattr(torch, told), is_pooling_model=False)
    planes = shape_of(MODELS[name] | {"torch_dtype": told}).caches[0].planes
    assert {getattr(torch, dtype).itemsize for dtype, _, _ in planes.values()} == {theirs.itemsize}


@pytest.mark.parametrize(
    "asked",
    [
        {"kv_cache_quant_algo": "FP8"}, {"kv_cache_quant_algo": "fp8"}, {"kv_cache_quant_algo": "NVFP4"},
        {"kv_cache_quant_algo": None}, {"quantization": {"kv_cache_quant_algo": "FP8"}},
        {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
        {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, {"kv_cache_scheme": {"num_bits": 4, "type": "float"}},
    ],
)  # fmt: skip
def test_modelopts_caches_are_those_that_vllm_resolves(asked: dict[str, Any]) -> None:
    """Or refused: vLLM warns, and takes the model's dtype."""
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, get_kv_cache_quant_algo_string

    quantization = {"quant_method": "modelopt", **asked}
    theirs = get_kv_cache_quant_algo_string(quantization)
    try:
        planes = shape_of(MODELS["Llama-3.1-8B"] | {"quantization_config": quantization}).caches[0].planes
    except ConfigError:
        assert theirs in ("auto", "nvfp4")
        return
    dtype = torch.bfloat16 if theirs is None else STR_DTYPE_TO_TORCH_DTYPE[theirs]
    assert {getattr(torch, each).itemsize for each, _, _ in planes.values()} == {dtype.itemsize}


@pytest.mark.parametrize("name", ["llama", "mla", "gemma3", "gptoss", "qwen3moe", "qwen3next", "phi3"])
def test_tiny_models_cache_what_their_layers_say(name: str, tmp_path: Path) -> None:
    """The engine's own layers, made without weights, against their configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform

    model = TINY[name]()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    arguments = EngineArgs(
        model=str(tmp_path),
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_model_len=2048,
        enforce_eager=True,
    )
    made = arguments.create_engine_config()
    with set_current_vllm_config(made):
        init_distributed_environment(1, 0, f"file://{tmp_path}/ranks", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        try:
            with torch.device("meta"):
                initialize_model(vllm_config=made)
            current_platform.update_block_size_for_backend(made)
            layers = made.compilation_config.static_forward_context.values()
            specs = [layer.get_kv_cache_spec(made) for layer in layers if isinstance(layer, AttentionLayerBase)]
        finally:
            cleanup_dist_env_and_memory()
    theirs = Counter(_described(spec) for spec in specs if spec is not None)
    # A file that says no dtype is one of float32.
    shape = shape_of({"torch_dtype": "float32", **config}, state_dtype=made.cache_config.mamba_ssm_cache_dtype)
    capacity = capacity_of(shape, block_tokens=made.cache_config.block_size)
    assert Counter({_of_group(size.group): size.layers for size in capacity.groups}) == theirs


def _described(spec: Any) -> tuple[str, int, int]:
    """Kind, window, and bytes of a token's row, or of a state."""
    if isinstance(spec, MambaSpec):
        parts = zip(spec.shapes, spec.dtypes, strict=True)
        return "state", 0, sum(math.prod(shape) * torch.empty((), dtype=dtype).element_size() for shape, dtype in parts)
    kind = {"FullAttentionSpec": "full", "SlidingWindowSpec": "sliding", "MLAAttentionSpec": "mla"}[type(spec).__name__]
    window = (spec.sliding_window or 0) if kind == "sliding" else 0
    return kind, window, spec.unpadded_page_size_bytes // spec.block_size


def _of_group(group: GroupSpec) -> tuple[str, int, int]:
    return group.kind, group.window, group.bytes_per_block // (1 if group.kind == "state" else group.block_size)
