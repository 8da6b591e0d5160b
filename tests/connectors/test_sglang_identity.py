"""The key holds what SGLang computes with: each fact changes it, and nothing else does."""

from __future__ import annotations

import copy
import gc
import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from layerflow.connectors.sglang import identity
from layerflow.connectors.sglang.identity import LoadedAdapters, arithmetic_of, checkpoint_of, loaded_modules
from layerflow.errors import ConfigError, Unsupported

CONFIG = {"architectures": ["TinyForCausalLM"], "hidden_size": 64, "rope_theta": 1e4, "context_len": 4096}


class Config:
    """One of transformers'."""

    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts)

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.__dict__)


class RotaryEmbedding(nn.Module):
    """SGLang's; its table has a row for each position."""

    def __init__(self, base: float, max_position_embeddings: int) -> None:
        super().__init__()
        self.base, self.max_position_embeddings = base, max_position_embeddings
        self.register_buffer("cos_sin_cache", torch.zeros(max_position_embeddings, 2))


class RadixAttention(nn.Module):
    """SGLang's."""

    def __init__(self, layer_id: int, k_scale: float | None = None) -> None:
        super().__init__()
        self.layer_id, self.k_scale_float, self.v_scale_float = layer_id, k_scale, None


class Model(nn.Module):
    """Has layers with attention, and its configuration."""

    def __init__(self, *, base: float = 1e4, positions: int = 32, k_scale: float | None = None, **config: Any) -> None:
        super().__init__()
        self.config = Config(**(CONFIG | config))
        self.rotary = RotaryEmbedding(base, positions)
        self.layers = nn.ModuleList(RadixAttention(layer, k_scale) for layer in range(2))


class LengthReader(Model):
    """Scales its attention by the context length."""

    def forward(self) -> int:
        return self.config.context_len  # type: ignore[attr-defined,no-any-return]


def server_args(**changed: Any) -> Any:
    facts = {
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "quantization": None,
        "torchao_config": "",
        "json_model_override_args": "{}",
        "context_length": None,
        "model_path": "/models/tiny",
        "load_format": "dummy",
        "revision": None,
        "random_seed": 5,
        "port": 30000,
        "served_model_name": "tiny",
        "mem_fraction_static": 0.8,
        "attention_backend": "triton",
    }
    return SimpleNamespace(**(facts | changed))


def key(
    model: nn.Module | None = None, release: str = "0.5.23", dtypes: Any = ("torch.bfloat16",), **changed: Any
) -> str:
    modules = list((model or Model()).modules())
    return arithmetic_of(server_args(**changed), release, modules, dtypes)


@pytest.mark.parametrize(
    "other",
    [
        lambda: key(release="0.5.24"),
        lambda: key(dtypes=["torch.float8_e4m3fn"]),
        lambda: key(dtype="float16"),
        lambda: key(kv_cache_dtype="fp8_e4m3"),
        lambda: key(quantization="fp8"),
        lambda: key(torchao_config="int8wo"),
        lambda: key(json_model_override_args='{"rope_theta": 1e6}'),
        lambda: key(Model(rope_theta=1e6)),
        lambda: key(Model(base=1e6)),
        lambda: key(Model(k_scale=0.5)),
        lambda: key(LengthReader()),
    ],
)
def test_what_changes_the_cached_numbers_changes_the_key(other: Callable[[], str]) -> None:
    assert other() != key()


@pytest.mark.parametrize(
    "other",
    [
        key,
        lambda: key(port=30001, served_model_name="other", model_path="/elsewhere/tiny"),
        lambda: key(mem_fraction_static=0.4, attention_backend="flashinfer"),
        lambda: key(dtypes=["torch.bfloat16", "torch.bfloat16"]),
        lambda: key(context_length=1024),
        lambda: key(Model(context_len=1024)),
        lambda: key(Model(positions=64)),
        lambda: key(Model(_name_or_path="/elsewhere", transformers_version="9", eos_token_id=7)),
    ],
)
def test_nothing_else_does(other: Callable[[], str]) -> None:
    assert other() == key()


def test_the_context_length_is_in_the_key_of_a_model_that_reads_it() -> None:
    lengths = {key(LengthReader(), context_length=length) for length in (None, 1024, 4096)}
    assert len(lengths) == 3


def test_it_is_in_the_key_where_no_model_was_found() -> None:
    assert arithmetic_of(server_args(), "0.5.23", [], []) != arithmetic_of(
        server_args(context_length=9), "0.5.23", [], []
    )


@pytest.mark.parametrize("frozen", [False, True])
def test_the_loaded_model_is_found_by_its_attention_layers(frozen: bool) -> None:
    """Also when the garbage collector was frozen, as engines do once they have started."""
    before, model = gc.get_freeze_count(), Model()
    if frozen:
        gc.freeze()
    try:
        found = {id(module) for module in loaded_modules()}
        assert found >= {id(module) for module in model.modules()}
        assert bool(gc.get_freeze_count()) is (frozen or bool(before)), "what was frozen stays so"
    finally:
        if not before:
            gc.unfreeze()


# -- files ----------------------------------------------------------------------------------------


def checkpoint(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def adapter(folder: Path, weights: bytes = b"lora", rank: int = 8) -> Any:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return SimpleNamespace(lora_id="4f", lora_name="tone", lora_path=str(folder))


def content(cfg: Any, named: str = "") -> str:
    return checkpoint_of(cfg, named).content()


def test_weights_are_what_their_files_hold(tmp_path: Path) -> None:
    one = server_args(load_format="auto", model_path=str(checkpoint(tmp_path / "one")))
    same = server_args(load_format="safetensors", model_path=str(checkpoint(tmp_path / "same")))
    other = server_args(load_format="auto", model_path=str(checkpoint(tmp_path / "other", b"others")))
    assert content(one) == content(same)
    assert content(one) != content(other)


def test_made_up_weights_are_their_seed_and_a_name_is_itself() -> None:
    assert content(server_args()) == content(server_args())
    assert content(server_args()) != content(server_args(random_seed=6))
    assert content(server_args(load_format="gguf"), "a") == content(server_args(load_format="gguf"), "a")
    assert content(server_args(), "a") != content(server_args(), "b")


def test_weights_that_are_not_there_are_refused_with_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set model_content"):
        content(server_args(load_format="auto", model_path=str(tmp_path)))


def with_adapters(*adapters: Any) -> str:
    return arithmetic_of(server_args(), "0.5.23", list(Model().modules()), ["torch.bfloat16"], adapters)


def test_an_adapter_of_the_start_is_what_its_files_hold(tmp_path: Path) -> None:
    """SGLang makes its id of name and path: of files that are replaced between two starts the id is the same."""
    before = with_adapters(adapter(tmp_path))
    assert before == with_adapters(adapter(tmp_path))
    assert before != with_adapters(adapter(tmp_path, b"trained on"))
    assert before != with_adapters(adapter(tmp_path, rank=16))
    assert with_adapters() == key() != before


def test_an_adapter_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    missing = SimpleNamespace(lora_id="4f", lora_name="tone", lora_path=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"adapter 'tone': its content cannot be told"):
        with_adapters(missing)


# -- adapters in memory ---------------------------------------------------------------------------


class LoRAAdapter(nn.Module):
    """SGLang's, as it holds one in the host's memory."""

    def __init__(
        self,
        weight: float = 1.0,
        *,
        embedding: float = 0.0,
        added: float = 0.0,
        rank: int = 2,
        scaling: float = 2.0,
    ) -> None:
        super().__init__()
        self.config, self.scaling = SimpleNamespace(r=rank), scaling
        name = "layers.0.q_proj.lora_A.weight"
        self.layers = [SimpleNamespace(weights={name: torch.full((2, 4), weight, dtype=torch.bfloat16)})]
        self.embedding_layers = {"embed_tokens.lora_A.weight": torch.full((2, 4), embedding)}
        self.added_tokens_embeddings = {"input_embeddings": torch.full((1, 4), added)}


def loaded(**adapters: LoRAAdapter) -> LoadedAdapters:
    return LoadedAdapters(SimpleNamespace(loras=adapters))


def test_a_loaded_adapter_is_what_its_bytes_are_and_not_its_id() -> None:
    here = loaded(
        a=LoRAAdapter(),
        trained=LoRAAdapter(1.5),
        embeds=LoRAAdapter(embedding=1.0),
        adds=LoRAAdapter(added=1.0),
        ranked=LoRAAdapter(rank=4),
        scaled=LoRAAdapter(scaling=4.0),
    )
    assert len({here.content(each) for each in ("a", "trained", "embeds", "adds", "ranked", "scaled")}) == 6
    assert loaded(other=LoRAAdapter()).content("other") == here.content("a")


def test_a_loaded_adapter_is_read_once_and_forgotten_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Any] = []

    def read(facts: Any, tensors: Any) -> str:
        reads.append(tensors)
        return str(len(reads))

    monkeypatch.setattr(identity, "content_of_tensors", read)
    held = {"a": LoRAAdapter()}
    here = LoadedAdapters(SimpleNamespace(loras=held))
    assert [here.content("a"), here.content("a")] == ["1", "1"]
    held["a"] = LoRAAdapter(1.5)  # under an id that is given again, should SGLang ever do it
    assert [here.content("a"), len(reads)] == ["2", 2]


class Reads:
    """Reads of adapters that end when they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_end = {weight: threading.Event() for weight in (1.0, 1.5)}
        self.begun = {weight: threading.Event() for weight in (1.0, 1.5)}
        monkeypatch.setattr(identity, "content_of_tensors", self._read)

    def _read(self, facts: Any, tensors: dict[str, torch.Tensor]) -> str:
        weight = float(tensors["layers.0.q_proj.lora_A.weight"][0, 0])
        self.begun[weight].set()
        assert self.may_end[weight].wait(30)
        return f"{weight}"


def test_loaded_adapters_are_read_beside_the_scheduler_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, here = Reads(monkeypatch), loaded(a=LoRAAdapter(), b=LoRAAdapter(1.5))
    assert not here.is_read("a")
    assert reads.begun[1.0].wait(30)
    assert [here.is_read("b"), here.is_read("a"), here.is_read("b")] == [False] * 3
    assert not reads.begun[1.5].is_set()
    reads.may_end[1.0].set()
    assert here.content("a") == "1.0" and here.is_read("a")
    assert not here.is_read("b")
    reads.may_end[1.5].set()
    assert here.content("b") == "1.5" and here.is_read("b")


def test_a_loaded_adapter_that_takes_too_long_is_refused_and_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "ADAPTER_WAIT_S", 0.0)
    reads, here = Reads(monkeypatch), loaded(a=LoRAAdapter())
    with pytest.raises(Unsupported, match="adapter with the id a is still being read"):
        here.content("a")
    monkeypatch.setattr(identity, "ADAPTER_WAIT_S", 30.0)
    reads.may_end[1.0].set()
    assert here.content("a") == "1.0"


def test_an_adapter_that_is_not_needed_any_more_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"a": LoRAAdapter()}
    here = LoadedAdapters(SimpleNamespace(loras=held))
    here.content("a")
    tensor = weakref.ref(held["a"].layers[0].weights["layers.0.q_proj.lora_A.weight"])
    held["a"].layers[0].weights.clear()
    assert tensor() is None
    adapter = weakref.ref(held.pop("a"))
    gc.collect()
    assert adapter() is None


@pytest.mark.parametrize("adapters", [loaded(), LoadedAdapters(None)], ids=["unloaded", "serves none"])
def test_an_adapter_that_is_not_loaded_is_refused(adapters: LoadedAdapters) -> None:
    with pytest.raises(Unsupported, match="no adapter with the id 4f"):
        adapters.content("4f")
    assert adapters.is_read("4f")  # there is nothing to wait for
