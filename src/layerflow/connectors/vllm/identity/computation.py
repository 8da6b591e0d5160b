"""What a worker computes with besides its weights, read from the model that vLLM has loaded.

The configuration is taken as it is once the model is loaded: after ``--hf-config-path``, ``--hf-overrides``,
``params.json``, vLLM's own patches and those that a model's constructor makes. What a model is called, where it lies,
which tokens end a text and which library wrote the file is left out.

``max_model_len`` is a size, and engines of other lengths share what they store. But some code computes otherwise beyond
some length (LongRoPE's factors, Llama-4's attention temperature). Which code that is, is seen in the loaded classes:
where none of them reads the length, nothing follows from it. Where one does, its parameter enters the key if it is
known; else the length itself does.
"""

from __future__ import annotations

import dataclasses
import enum
import gc
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import structlog
import torch
from torch import nn

from layerflow.content import VOLATILE_KEYS

LENGTH = "max_model_len"

_FOLLOWS = {
    "Phi3LongRoPEScaledRotaryEmbedding": ("use_long_rope",),
    "Llama4ForCausalLM": ("config.attn_temperature_tuning",),
}
"""Classes that read the length, and the parameters that they make of it."""

_SIZES = frozenset({"Indexer", "DeepseekV32Indexer", "SparseAttnIndexer"})
"""Classes of vLLM's that read the length for the size of their buffers only."""

MISSING = "missing"
"""In place of a parameter that a class of :data:`_FOLLOWS` does not have in this vLLM."""

_ASKED = "get_"
"""Functions of models that are called so tell how large an input may get; no forward pass calls them."""

_BY_POSITION = frozenset(
    {"RotaryEmbedding", "LinearScalingRotaryEmbedding", "Llama3RotaryEmbedding", "Gemma4RotaryEmbedding"}
)
"""Rotary embeddings whose row of a position depends on nothing but that: how long their table is does not matter."""

_UNUSED = VOLATILE_KEYS | {
    LENGTH, "auto_map", "id2label", "label2id", "task_specific_params", "finetuning_task", "problem_type",
    "tokenizer_class", "prefix", "dtype", "torch_dtype", "_attn_implementation", "_attn_implementation_internal",
}  # fmt: skip
"""Of a configuration: names, and what stands elsewhere in the key (the dtype, the code, a draft model's weights)."""

_TOKENS = ("_token_id", "_token_ids")
_KNOWN_CODE = ("torch", "vllm", "vllm_ascend")
"""Packages whose version is in the key; other code of a model is keyed by its text."""

_DEPTH = 8

log = structlog.get_logger("layerflow.vllm")


def computation_of(vllm_config: Any, model_config: Any, layers: Collection[str]) -> frozenset[str]:
    """Facts that decide the numbers which these layers cache, the same on every host and rank.

    :param model_config: vLLM's ModelConfig of the model that they belong to.
    :param layers: their names in vLLM's forward context.
    """
    context = vllm_config.compilation_config.static_forward_context
    modules = model_of([context[name] for name in layers if isinstance(context.get(name), nn.Module)])
    facts = {_fact("config", config_facts(config)) for config in _configs(model_config, modules)}
    classes = {base for module in modules for base in type(module).__mro__ if issubclass(base, nn.Module)}
    facts |= {_fact("code", [file.name, _text_digest(file)]) for file in _foreign_code(classes)}
    facts |= {_fact("rotary", rotary_facts(module)) for module in modules if _is_rotary(module)}
    return frozenset(facts | set(_length_facts(model_config, modules, classes)))


def model_of(layers: Collection[nn.Module]) -> list[nn.Module]:
    """All modules of the models that these are layers of; vLLM hands connectors the layers only."""
    parents: dict[int, list[nn.Module]] = {}
    for found in gc.get_objects():
        if issubclass(type(found), nn.Module):
            for child in found.__dict__.get("_modules", {}).values():
                parents.setdefault(id(child), []).append(found)
    seen: dict[int, nn.Module] = {}
    waiting, roots = list(layers), list[nn.Module]()
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen[id(module)] = module
        waiting += (above := parents.get(id(module), []))
        if not above:
            roots.append(module)
    return list({id(module): module for root in roots for module in root.modules()}.values())


def config_facts(config: Any) -> Any:
    """What decides numbers in a configuration of transformers', without what every configuration has by default."""
    told = config if isinstance(config, Mapping) else config.to_dict()
    usual = _usual() if not isinstance(config, Mapping) else {}
    return {
        str(key): config_facts(value) if isinstance(value, Mapping) or hasattr(value, "to_dict") else plain(value)
        for key, value in told.items()
        if key not in _UNUSED and not str(key).endswith(_TOKENS) and not (key in usual and usual[key] == value)
    }


def rotary_facts(module: nn.Module) -> Any:
    """The parameters that a rotary embedding was made with; not its table, whose last bits are the device's."""
    name = type(module).__name__
    taken = [each for each in inspect.signature(type(module).__init__).parameters if each in vars(module)]
    left_out = {"dtype"} | ({"max_position_embeddings"} if name in _BY_POSITION else set())
    return [name, {each: plain(vars(module)[each]) for each in taken if each not in left_out}]


def plain(value: Any, depth: int = _DEPTH) -> Any:
    """A value as JSON that is the same in every process: objects by their class and fields, never by their address."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    within = partial(plain, depth=depth - 1)
    if depth <= 0:
        return type(value).__qualname__
    if isinstance(value, Mapping):
        return {str(key): within(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [within(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted((within(each) for each in value), key=_json)
    return _plain_object(value, within)


def _plain_object(value: Any, within: Callable[[Any], Any]) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, type) or callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if dataclasses.is_dataclass(value):
        fields = {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)}
    else:
        fields = {key: each for key, each in getattr(value, "__dict__", {}).items() if not key.startswith("__")}
    return [type(value).__qualname__, within(fields)]


def _configs(model_config: Any, modules: Collection[nn.Module]) -> Iterator[Any]:
    found = [model_config.hf_config, model_config.hf_text_config]
    found += [module.__dict__.get("config") for module in modules]
    yield from {id(config): config for config in found if hasattr(config, "to_dict")}.values()


def _usual() -> Mapping[str, Any]:
    """Every configuration of this transformers has these: its own are added and dropped from version to version."""
    transformers = sys.modules.get("transformers")
    kind = getattr(transformers, "PretrainedConfig", None) if transformers is not None else None
    return kind().to_dict() if kind is not None else {}


def _is_rotary(module: nn.Module) -> bool:
    return any("cos_sin_cache" in name for name in module._buffers)


def _length_facts(model_config: Any, modules: Collection[nn.Module], classes: Collection[type]) -> Iterator[str]:
    unknown: list[str] = []
    for kind in sorted((kind for kind in classes if _reads_length(kind)), key=lambda kind: kind.__name__):
        made = [
            (path, [_at(module, path) for module in modules if isinstance(module, kind)])
            for path in _FOLLOWS.get(kind.__name__, ())
        ]
        is_known = made and all(MISSING not in values for _, values in made)
        if not is_known and not (kind.__name__ in _SIZES and kind.__module__.startswith("vllm.")):
            unknown.append(kind.__name__)
        for path, values in made:
            yield _fact("length", [kind.__name__, path, sorted({_json(plain(value)) for value in values})])
    if unknown or not modules:
        reason = (
            f"{', '.join(unknown)} may compute otherwise beyond some length" if modules else "the model was not found"
        )
        log.info("max_model_len_in_key", max_model_len=model_config.max_model_len, reason=reason)
        yield _fact(LENGTH, model_config.max_model_len)


def _at(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, MISSING)
    return module


def _reads_length(kind: type) -> bool:
    if kind.__module__.partition(".")[0] == "torch":
        return False
    return any(LENGTH in _names(each) for name, each in vars(kind).items() if not name.startswith(_ASKED))


def _names(value: Any, seen: set[int] | None = None) -> set[str]:
    """Every attribute and global that a function reads, with what it wraps and encloses."""
    seen = seen if seen is not None else set()
    value = getattr(value, "__func__", getattr(value, "fget", value))
    if not isinstance(value, FunctionType) or id(value) in seen:
        return set()
    seen.add(id(value))
    names = _code_names(value.__code__)
    inner = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    for each in [*inner, getattr(value, "__wrapped__", None)]:
        names |= _names(each, seen)
    return names


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _code_names(code: CodeType) -> set[str]:
    names = {*code.co_names, *(each for each in code.co_consts if isinstance(each, str) and each == LENGTH)}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _code_names(constant)
    return names


def _foreign_code(classes: Collection[type]) -> set[Path]:
    """Files of classes that neither vLLM nor torch brings: a checkpoint's own code, or a plugin's."""
    modules = {kind.__module__ for kind in classes if kind.__module__.partition(".")[0] not in _KNOWN_CODE}
    modules |= {name for name in list(sys.modules) if name.startswith("transformers_modules.")}
    files = {getattr(sys.modules.get(name), "__file__", None) for name in modules}
    return {Path(file) for file in files if file and Path(file).is_file()}


def _text_digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32]


def _fact(kind: str, value: Any) -> str:
    return f"{kind} {_json(value)}"


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
