"""What models cache, by their configuration alone, against figures that their makers and vLLM have published."""

import contextlib
import json
import math

import pytest

from layerflow.errors import ConfigError
from layerflow.pool.slots import Slots
from layerflow.sizing import capacity_of, model_of, read_config, shape_of
from sizing.models import MODELS

BF16 = 2


def sized(name, *, kv_dtype="auto", block_tokens=16, **ranks):
    return capacity_of(shape_of(MODELS[name], kv_dtype), block_tokens=block_tokens, **ranks)


def row_bytes(capacity):
    """Bytes of one token's row (one state) in one layer, by group."""
    return [group.group.bytes_per_block // group.group.entries for group in capacity.groups]


@pytest.mark.parametrize(
    ("name", "kv_dtype", "nbytes"),
    [
        ("Llama-3.1-8B", "auto", 32 * 2 * 8 * 128 * BF16),
        ("Qwen2.5-72B", "auto", 80 * 2 * 8 * 128 * BF16),
        ("Qwen3-235B-A22B", "auto", 94 * 2 * 4 * 128 * BF16),
        ("Qwen3-235B-A22B", "fp8", 94 * 2 * 4 * 128),
        ("DeepSeek-V3", "auto", 70_272),
        ("DeepSeek-V3.2", "auto", 61 * (576 * BF16 + 132)),
        ("DeepSeek-V3.2", "fp8", 61 * (656 + 132)),
        ("gpt-oss-120b", "auto", 36 * 2 * 8 * 64 * BF16),
        ("Gemma-3-27B", "auto", 62 * 2 * 16 * 128 * BF16),
    ],
)
def test_bytes_of_a_token(name, kv_dtype, nbytes):
    capacity = sized(name, kv_dtype=kv_dtype)
    headers = sum(group.copies * 64 for group in capacity.groups) / capacity.chunk_tokens
    assert capacity.token_bytes == pytest.approx(nbytes + headers)


def test_float32_is_computed_in_16_bits_unless_the_engine_is_told():
    given = MODELS["Llama-3.1-8B"]
    wide = given | {"torch_dtype": "float32"}
    assert shape_of(wide).caches == shape_of(given).caches and "--dtype float32" in shape_of(wide).notes[0]
    assert not shape_of(given).notes and not shape_of(wide, dtype="float32").notes
    assert shape_of(wide, dtype="float32").caches[0].planes["k"] == ("float32", 8, 128)
    assert shape_of(given, dtype="half").caches[0].planes["k"] == ("float16", 8, 128)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
        {"quant_method": "modelopt_fp4", "quantization": {"kv_cache_quant_algo": "fp8"}},
        {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
    ],
)
def test_a_checkpoint_that_asks_for_an_fp8_cache_gets_it(quantization):
    given = MODELS["Llama-3.1-8B"]
    quantised = given | {"quantization_config": quantization}
    assert shape_of(quantised).caches == shape_of(given, "fp8").caches and "fp8" in shape_of(quantised).notes[0]
    assert shape_of(quantised, "bfloat16") == shape_of(given)


def test_weights_alone_that_are_quantised_change_no_cache():
    given = MODELS["DeepSeek-V3"]
    assert shape_of(given | {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": None}}) == shape_of(
        given
    )


def test_the_compressed_groups_of_deepseek_v4():
    """Blocks as vLLM 0.32 has them for V4-Flash; most of what is stored is compressor states."""
    capacity = sized("DeepSeek-V4-Flash")
    found = {
        (group.group.kind, group.group.ratio, group.group.window, group.group.bytes_per_block): group.layers
        for group in capacity.groups
    }
    assert found == {
        ("sliding", 1, 128, 37_376): 43,
        ("mla", 4, 0, 37_376): 21,
        ("mla", 4, 0, 8_448): 21,
        ("mla", 128, 0, 1_168): 20,
        ("sliding", 1, 8, 32_768): 21,
        ("sliding", 1, 8, 8_192): 21,
        ("sliding", 1, 128, 32_768): 20,
    }
    states = sum(group.chunk_bytes for group in capacity.groups if group.group.planes[0].name == "state")
    assert capacity.chunk_tokens == 256
    assert (round(capacity.token_bytes / 1e3), int(states / 256 / 1e3)) == (64, 47)


def test_compressor_states_that_are_read_behind_a_hit():
    """None of ratio 128; of ratio 4 those of one block."""
    name = "DeepSeek-V4-Flash"
    every = sized(name)
    few = capacity_of(shape_of(MODELS[name], compressor_states="read"), block_tokens=16)
    states = {
        group.group.bytes_per_block: (group.layers, group.group.window, list(group.group.rules.keep(few.chunk_tokens)))
        for group in few.groups
        if group.group.planes[0].name == "state"
    }
    assert states == {32_768: (21, 4, [63]), 8_192: (21, 4, [63])}, "the last block of a chunk"
    assert len(few.groups) == len(every.groups) - 1 and few.chunk_tokens == every.chunk_tokens
    assert (round(every.token_bytes / 1e3), round(few.token_bytes / 1e3)) == (64, 20)


def test_windows_are_loaded_up_to_their_length():
    capacity = sized("gpt-oss-120b")
    full, windowed = capacity.groups
    assert (full.layers, windowed.layers, windowed.group.window) == (18, 18, 128)
    token = 2 * 8 * 64 * BF16
    assert capacity.load_bytes(32_768) == 18 * 32_768 * token + 18 * 128 * token
    assert capacity.chunk_tokens == 128  # no longer than the window, so that hits end at a block


def test_gemmas_windows_follow_its_pattern():
    full, windowed = sized("Gemma-3-27B").groups
    assert (full.layers, windowed.layers, windowed.group.window) == (10, 52, 1024)


@pytest.mark.parametrize(("tp", "block"), [(1, 544), (2, 544)])
def test_qwen3_next_keeps_a_state_at_each_long_block(tp, block):
    """544 tokens is what vLLM's log says of it ("Setting attention block size to 544 tokens")."""
    capacity = sized("Qwen3-Next-80B-A3B", tp=tp)
    attention, state = capacity.groups
    assert (attention.layers, state.layers, state.group.block_size, capacity.chunk_tokens) == (12, 36, block, block)
    conv, ssm = 3 * (2 * 16 * 128 + 32 * 128) * BF16, 32 * 128 * 128 * BF16
    assert state.group.bytes_per_block * tp == conv + ssm == 1_097_728
    assert capacity.load_bytes(32_768) * tp >= 36 * 1_097_728


def test_heads_are_stored_once_however_many_ranks_hold_them():
    one, eight, sixteen = (sized("Qwen3-235B-A22B", tp=tp) for tp in (1, 8, 16))
    assert one.token_bytes == pytest.approx(eight.token_bytes, rel=1e-3)
    assert [capacity.groups[0].copies for capacity in (one, eight, sixteen)] == [1, 4, 4]
    assert eight.load_bytes(1000 * 16) == sixteen.load_bytes(1000 * 16) == one.load_bytes(1000 * 16) // 4


def test_latents_are_stored_once_and_loaded_by_every_rank():
    one, eight = sized("DeepSeek-V3"), sized("DeepSeek-V3", tp=8)
    assert eight.token_bytes == one.token_bytes and eight.load_bytes(4096) == one.load_bytes(4096)


def test_pipeline_stages_share_the_layers():
    capacity = sized("Qwen3-235B-A22B", pp=4)
    assert [len(stage.groups[0].layers) for stage in capacity.stages] == [23, 24, 24, 23]
    assert capacity.stages[0].shard.stages == ((23, 24, 24, 23),)
    assert capacity.token_bytes == pytest.approx(sized("Qwen3-235B-A22B").token_bytes, rel=1e-3)


def test_partial_chunks_count_whole_blocks():
    capacity = sized("Llama-3.1-8B")
    block = 16 * 32 * 2 * 8 * 128 * BF16
    assert capacity.prompt_bytes(257) - capacity.prompt_bytes(256) == block + 64


@pytest.mark.parametrize("arena_bytes", [8 << 30, 100 << 30])
@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("name", MODELS)
def test_an_arena_holds_what_is_told_of_it(name, tp, arena_bytes):
    """The server's own allocator, filled chunk by chunk."""
    capacity, slots, chunks = sized(name, tp=tp), Slots(arena_bytes), 0
    sizes = [(size.chunk_bytes // size.copies, size.copies) for size in capacity.groups]
    while all(len(slots.alloc(nbytes, copies)) == copies for nbytes, copies in sizes):
        chunks += 1
    # Where objects are of several sizes, each size's last extent is not full.
    assert 0.92 < chunks * capacity.chunk_tokens / capacity.tokens_in(arena_bytes) < 1.01


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [1, 8])
def test_every_known_model_makes_a_spec_that_a_server_takes(name, tp):
    spec = model_of(shape_of(MODELS[name]), tp=tp)
    assert spec.fingerprint and spec.num_layers == sum(len(group.layers) for group in spec.groups)


class TestRefusals:
    """One sentence, which says what is missing; nothing is guessed."""

    @staticmethod
    def said(config, **options) -> str:
        with pytest.raises(ConfigError) as refused:
            shape_of(config, **options)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    def test_an_unknown_architecture(self):
        said = self.said({"model_type": "newest", "num_hidden_layers": 4, "hidden_size": 64, "torch_dtype": "float16"})
        assert "'newest'" in said and "lacks num_attention_heads, num_key_value_heads, head_dim" in said
        assert "--like" in said

    def test_what_it_is_like_may_be_said(self):
        config = MODELS["Llama-3.1-8B"] | {"model_type": "newest"}
        assert shape_of(config, like="llama").caches == shape_of(MODELS["Llama-3.1-8B"]).caches
        assert "no such model_type; there are" in self.said(config, like="lama")

    @pytest.mark.parametrize(
        ("name", "field"),
        [
            ("Llama-3.1-8B", "num_hidden_layers"),
            ("Llama-3.1-8B", "num_attention_heads"),
            ("Llama-3.1-8B", "hidden_size"),
            ("Llama-3.1-8B", "torch_dtype"),
            ("DeepSeek-V3", "kv_lora_rank"),
            ("DeepSeek-V3.2", "index_head_dim"),
            ("DeepSeek-V4-Flash", "compress_ratios"),
            ("gpt-oss-120b", "sliding_window"),
            ("Qwen3-Next-80B-A3B", "linear_num_value_heads"),
            ("Granite-4.0-H-Small", "layer_types"),
            ("Granite-4.0-H-Small", "mamba_d_state"),
        ],
    )
    def test_a_missing_field_is_named(self, name, field):
        config = {key: value for key, value in MODELS[name].items() if key != field}
        assert field in self.said(config)

    def test_caches_that_are_not_moved(self):
        config = MODELS["Llama-3.1-8B"] | {"layer_types": ["chunked_attention"] * 32}
        assert "chunked_attention" in self.said(config)
        assert "lists 3 layers" in self.said(MODELS["gpt-oss-120b"] | {"layer_types": ["full_attention"] * 3})
        assert "compress_ratios [16]" in self.said(MODELS["DeepSeek-V4-Flash"] | {"compress_ratios": [16] * 43})

    def test_ranks_that_cannot_be(self):
        with pytest.raises(ConfigError, match="8 heads of plane k cannot be spread over --tp 3"):
            model_of(shape_of(MODELS["Llama-3.1-8B"]), tp=3)
        with pytest.raises(ConfigError, match="a stage has no layer with a cache of kind full"):
            model_of(shape_of(MODELS["Granite-4.0-H-Small"]), pp=8)

    @pytest.mark.parametrize("name", MODELS)
    def test_no_field_of_any_model_is_taken_for_another_than_it_is(self, name):
        wrong = ("x", "7", 0, -1, 1.5, True, False, math.nan, math.inf, 10**9, 10**400, [1], ["x"], [[]], {}, "", None)
        for field in MODELS[name]:
            for value in wrong:
                with contextlib.suppress(ConfigError):
                    capacity_of(shape_of(MODELS[name] | {field: value}), block_tokens=16)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("num_key_value_heads", 0), ("num_key_value_heads", "x"), ("head_dim", 1.5), ("head_dim", True),
            ("num_hidden_layers", 10**9), ("num_hidden_layers", "32"), ("hidden_size", math.nan),
            ("sliding_window", "a"), ("num_attention_heads", 10**400),
        ],
    )  # fmt: skip
    def test_a_wrong_number_is_named(self, field, value):
        said = self.said(MODELS["Llama-3.1-8B"] | {field: value})
        assert said.startswith(f"config.json: {field} = ") and "should be a whole number" in said and len(said) < 150

    @pytest.mark.parametrize(
        ("name", "quantization"),
        [
            ("Llama-3.1-8B", {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 4, "type": "int"}}),
            ("Llama-3.1-8B", {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}),
            ("Llama-3.1-8B", {"quant_method": "newest", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}),
            (
                "DeepSeek-V3",
                {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
            ),
        ],
    )
    def test_a_cache_that_is_quantised_in_another_way(self, name, quantization):
        config = MODELS[name] | {"quantization_config": quantization}
        assert "--kv-dtype" in self.said(config)
        assert shape_of(config, "bfloat16").caches == shape_of(MODELS[name]).caches

    def test_what_is_no_configuration(self, tmp_path):
        with pytest.raises(ConfigError, match=r"config\.json: No such file"):
            read_config(tmp_path)
        (tmp_path / "config.json").write_text("[1]")
        with pytest.raises(ConfigError, match="JSON object"):
            read_config(tmp_path)
        (tmp_path / "config.json").write_text("[" * 100_000)
        with pytest.raises(ConfigError, match="not JSON"):
            read_config(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        assert read_config(tmp_path) == read_config(tmp_path / "config.json") == {"model_type": "llama"}
