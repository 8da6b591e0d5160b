"""The key holds what the worker computes with: each fact changes it, and nothing else does."""

from __future__ import annotations

import copy
import enum
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from layerflow.connectors.common.computation import plain
from layerflow.connectors.vllm.identity.computation import computation_of
from layerflow.connectors.vllm.identity.identity import arithmetic_of, checkpoint_of
from layerflow.errors import ConfigError

LAYER = "model.layers.0.self_attn.attn"
CONFIG = {
    "architectures": ["TinyForCausalLM"],
    "hidden_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "vision_config": {"depth": 2, "_name_or_path": "somebody/vision"},
    "transformers_version": "5.1",
    "_name_or_path": "/models/tiny",
    "eos_token_id": [2, 7],
    "id2label": {"0": "spam"},
    "auto_map": {"AutoModel": "somebody/tiny--code.Tiny"},
}


class Config:
    """One of transformers'."""

    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts)

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.__dict__)


class RotaryEmbedding(nn.Module):
    """vLLM's; its table has a row for each position."""

    def __init__(self, head_size: int, max_position_embeddings: int, base: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_size, self.base, self.dtype = head_size, base, dtype
        self.max_position_embeddings = max_position_embeddings
        self.register_buffer("cos_sin_cache", torch.zeros(max_position_embeddings, 2))


class ScaledRotaryEmbedding(RotaryEmbedding):
    """Its frequencies follow from the table's length."""


class Phi3LongRoPEScaledRotaryEmbedding(nn.Module):
    """LongRoPE as vLLM has it: the factors are chosen once, by the longest prompt."""

    def __init__(self, model_config: Any, short_factor: list[float], long_factor: list[float]) -> None:
        super().__init__()
        self.short_factor, self.long_factor = short_factor, long_factor
        self.use_long_rope = model_config.max_model_len > 4096
        self.register_buffer("long_short_cos_sin_cache", torch.zeros(model_config.max_model_len, 2))


class Layer(nn.Module):
    """With an attention layer, which is all that vLLM's forward context knows, and a rotary embedding."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.attn, self.rotary_emb = nn.Identity(), rotary


class Model(nn.Module):
    """What vLLM has loaded."""

    def __init__(self, model_config: Any, rotary: nn.Module) -> None:
        super().__init__()
        self.config = model_config.hf_config
        self.layers = nn.ModuleList([Layer(rotary)])


def computed(
    model: Callable[..., nn.Module] = Model,
    rotary: Callable[[Any], nn.Module] = lambda _: RotaryEmbedding(8, 4096, 1e4, torch.float32),
    max_model_len: int = 4096,
    **changed: Any,
) -> frozenset[str]:
    """Facts of a model that was loaded with this configuration."""
    hf_config = Config(**(copy.deepcopy(CONFIG) | changed))
    model_config = SimpleNamespace(hf_config=hf_config, hf_text_config=hf_config, max_model_len=max_model_len)
    loaded = model(model_config, rotary(model_config))
    context = {LAYER: loaded.layers[0].attn, "model.layers.1.mlp": object()}  # type: ignore[index, union-attr]
    vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    return computation_of(vllm_config, model_config, list(context))


class TestConfiguration:
    @pytest.mark.parametrize(
        "changed",
        [
            {"hidden_size": 128},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}},
            {"vision_config": {"depth": 3}},
            {"attn_temperature_tuning": True},
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
            {"architectures": ["OtherForCausalLM"]},
        ],
    )
    def test_what_shapes_the_numbers_changes_it(self, changed: dict[str, Any]) -> None:
        assert computed(**changed) != computed()

    @pytest.mark.parametrize(
        "changed",
        [
            {"transformers_version": "5.2", "_name_or_path": "/elsewhere", "_commit_hash": "abc"},
            {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
            {"id2label": {"0": "ham"}, "label2id": {"ham": 0}},
            {"vision_config": {"depth": 2, "_name_or_path": "else"}},
            {"auto_map": {}},
            {"max_model_len": 9000},
        ],
    )
    def test_names_paths_token_ids_and_versions_do_not(self, changed: dict[str, Any]) -> None:
        assert computed(**{"max_model_len": 4096} | changed) == computed()

    def test_what_every_configuration_of_transformers_has_does_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Other versions have other such fields."""
        usual = types.SimpleNamespace(PretrainedConfig=lambda: Config(output_attentions=False, chunk_size=0))
        monkeypatch.setitem(sys.modules, "transformers", usual)
        assert computed(output_attentions=False) == computed()
        assert computed(output_attentions=True) != computed()

    def test_what_a_constructor_makes_of_it_counts(self) -> None:
        """As Llama-4's does, by the length and by --override-generation-config."""

        class Tuned(Model):
            def __init__(self, model_config: Any, rotary: nn.Module) -> None:
                model_config.hf_config.attn_temperature_tuning = True
                super().__init__(model_config, rotary)

        assert computed(Tuned) != computed()

    def test_a_configuration_of_its_own_that_the_model_was_built_with_counts(self) -> None:
        class Inner(Model):
            def __init__(self, model_config: Any, rotary: nn.Module) -> None:
                super().__init__(model_config, rotary)
                self.config = Config(**CONFIG, attn_temperature_tuning=True)

        assert computed(Inner) != computed()


class TestLength:
    def test_a_model_that_does_not_read_it_is_the_same_at_any(self) -> None:
        longer = computed(rotary=lambda _: RotaryEmbedding(8, 131072, 1e4, torch.float32), max_model_len=131072)
        assert longer == computed()

    @pytest.mark.parametrize(
        "rotary",
        [
            lambda _: RotaryEmbedding(8, 4096, 5e5, torch.float32),
            lambda _: RotaryEmbedding(16, 4096, 1e4, torch.float32),
            lambda _: ScaledRotaryEmbedding(8, 4096, 1e4, torch.float32),
        ],
    )
    def test_the_rotary_parameters_count(self, rotary: Callable[[Any], nn.Module]) -> None:
        assert computed(rotary=rotary) != computed()

    def test_a_tables_bits_and_type_do_not(self) -> None:
        def on_another_device(_: Any) -> nn.Module:
            made = RotaryEmbedding(8, 4096, 1e4, torch.bfloat16)
            made.cos_sin_cache += 1e-7
            return made

        assert computed(rotary=on_another_device) == computed()

    def test_a_tables_length_counts_where_its_rows_may_follow_from_it(self) -> None:
        one, two = ({"rotary": lambda _, n=n: ScaledRotaryEmbedding(8, n, 1e4, torch.float32)} for n in (4096, 8192))
        assert computed(**one) != computed(**two)

    def test_longrope_is_keyed_by_the_factors_that_were_chosen(self) -> None:
        def facts(length: int, factor: float = 40.0) -> frozenset[str]:
            made = lambda config: Phi3LongRoPEScaledRotaryEmbedding(config, [1.0] * 4, [factor] * 4)  # noqa: E731
            return computed(rotary=made, max_model_len=length)

        assert facts(2048) == facts(4096)
        assert facts(8192) == facts(131072)
        assert facts(4096) != facts(8192)
        assert facts(8192) != facts(8192, 32.0)

    @pytest.mark.parametrize("tells", [True, False])
    def test_what_llama4_makes_of_it_is_keyed_as_far_as_it_can_be_seen(self, tells: bool) -> None:
        class Llama4ForCausalLM(Model):
            def __init__(self, model_config: Any, rotary: nn.Module) -> None:
                if tells:
                    model_config.hf_config.attn_temperature_tuning = model_config.max_model_len > 32768
                super().__init__(model_config, rotary)

            def forward(self) -> None:
                _ = self.vllm_config.model_config.max_model_len

        facts = {length: computed(Llama4ForCausalLM, max_model_len=length) for length in (4096, 32768, 65536, 131072)}
        assert (facts[4096] == facts[32768]) is tells
        assert (facts[65536] == facts[131072]) is tells
        assert facts[32768] != facts[65536]

    def test_code_that_reads_it_and_is_not_known_has_it_in_its_key(self) -> None:
        class Windowed(Model):
            def forward(self, positions: torch.Tensor) -> torch.Tensor:
                return positions.clamp(max=self.vllm_config.model_config.max_model_len)

        assert computed(Windowed, max_model_len=4096) != computed(Windowed, max_model_len=8192)
        assert computed(Windowed, max_model_len=4096) == computed(Windowed, max_model_len=4096)

    def test_code_that_is_wrapped_is_seen(self) -> None:
        """vLLM's decorators replace constructors."""

        class Wrapped(Model):
            pass

        inner = Model.__init__

        def reading(self: Any, model_config: Any, rotary: nn.Module) -> None:
            inner(self, model_config, rotary)
            self.long = getattr(model_config, "max_model_len", 0) > 8192

        def wrapper(self: Any, *args: Any) -> None:
            reading(self, *args)

        Wrapped.__init__ = wrapper  # type: ignore[method-assign]
        assert computed(Wrapped, max_model_len=4096) != computed(Wrapped, max_model_len=8192)

    def test_code_that_tells_how_large_an_input_may_be_is_no_computation(self) -> None:
        class Seeing(Model):
            def get_max_frames_per_video(self) -> int:
                return self.config.max_model_len // 100  # type: ignore[no-any-return]

        assert computed(Seeing, max_model_len=4096) == computed(Seeing, max_model_len=8192)

    def test_a_model_that_is_not_found_has_it_in_its_key(self) -> None:
        config = Config(**CONFIG)

        def unseen(length: int) -> frozenset[str]:
            model = SimpleNamespace(hf_config=config, hf_text_config=config, max_model_len=length)
            context = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
            return computation_of(context, model, [LAYER])

        assert unseen(4096) != unseen(8192)


def test_a_checkpoints_own_code_is_keyed_by_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(folder: str, text: str) -> frozenset[str]:
        file = tmp_path / folder / "modeling_tiny.py"
        file.parent.mkdir()
        file.write_text(text)
        module = types.ModuleType("transformers_modules.tiny.modeling_tiny")
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return computed()

    assert loaded("one", "x = 1") == loaded("elsewhere", "x = 1") != loaded("changed", "x = 2")


def test_other_models_of_the_process_do_not_count() -> None:
    others = [Model(SimpleNamespace(hf_config=Config(hidden_size=1)), nn.Identity()) for _ in range(2)]
    assert computed() == computed()
    assert len(others) == 2


class TestPlain:
    def test_objects_are_told_by_class_and_fields(self) -> None:
        class Kind(enum.Enum):
            FP8 = 1

        class Quantised:
            def __init__(self, **fields: Any) -> None:
                self.__dict__.update(fields)

        one = Quantised(kind=Kind.FP8, dtype=torch.float16, ignored={"b", "a"}, get=len, inner=Quantised(n=1))
        same = Quantised(kind=Kind.FP8, dtype=torch.float16, ignored={"a", "b"}, get=len, inner=Quantised(n=1))
        other = Quantised(kind=Kind.FP8, dtype=torch.float16, ignored={"a", "b"}, get=len, inner=Quantised(n=2))
        assert plain(one) == plain(same) != plain(other)
        assert "0x" not in str(plain(one))

    def test_a_circle_ends(self) -> None:
        around: dict[str, Any] = {}
        around["again"] = around
        assert plain(around)


def engine(**changed: Any) -> Any:
    """vLLM's configuration, without a model."""
    model = {"quantization": None, "quantization_config": None, "dtype": torch.bfloat16, "multimodal_config": None}
    model = {key: changed.pop(key, value) for key, value in model.items()}
    made = {"cache_config": SimpleNamespace(cache_dtype="auto"), "quant_config": None, "lora_config": None} | changed
    return SimpleNamespace(model_config=SimpleNamespace(**model), **made)


def test_every_fact_of_the_arithmetic_changes_it() -> None:
    base = arithmetic_of(engine(), "0.32", ["a", "b"])
    assert arithmetic_of(engine(), "0.32", ["b", "a"]) == base, "facts of pipeline stages come in any order"
    others = [
        arithmetic_of(engine(), "0.31", ["a", "b"]),
        arithmetic_of(engine(), "0.32", ["a"]),
        arithmetic_of(engine(quantization="fp8"), "0.32", ["a", "b"]),
        arithmetic_of(engine(quantization_config={"linear": {"weight": "fp8"}}), "0.32", ["a", "b"]),
        arithmetic_of(engine(quant_config=SimpleNamespace(scheme="static")), "0.32", ["a", "b"]),
        arithmetic_of(engine(dtype=torch.float16), "0.32", ["a", "b"]),
        arithmetic_of(engine(cache_config=SimpleNamespace(cache_dtype="fp8")), "0.32", ["a", "b"]),
    ]
    assert len({base, *others}) == 8


class TestCheckpoint:
    def model(self, path: Path | str) -> Any:
        return SimpleNamespace(model=str(path), seed=0, revision=None)

    def test_weights_are_told_by_their_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        load, contents = SimpleNamespace(load_format="auto"), []
        for folder, raw in (("a", b"one"), ("b", b"one"), ("c", b"two")):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "model.safetensors").write_bytes(raw)
            contents.append(checkpoint_of(self.model(tmp_path / folder), load).content())
        assert contents[0] == contents[1] != contents[2]

    def test_made_up_weights_are_told_by_their_seed(self) -> None:
        load = SimpleNamespace(load_format="dummy")
        one, other = self.model("/nowhere"), self.model("/nowhere")
        other.seed = 1
        assert checkpoint_of(one, load).content() != checkpoint_of(other, load).content()

    def test_weights_that_cannot_be_read_need_a_name(self, tmp_path: Path) -> None:
        load = SimpleNamespace(load_format="auto")
        with pytest.raises(ConfigError, match="model_content"):
            checkpoint_of(self.model(tmp_path), load)
        assert checkpoint_of(self.model(tmp_path), load, "step-1").content() == "named:step-1"
