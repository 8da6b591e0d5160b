"""What an engine computes with besides its weights, read from the model that it has loaded.

Configurations are taken as they are once the model is loaded: after whatever the engine and the model's constructor
patch. What a model is called, where it lies, which tokens end a text and which library wrote the file is left out.
"""

from __future__ import annotations

import dataclasses
import enum
import gc
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from layerflow.content import VOLATILE_KEYS

_BY_POSITION = frozenset(
    {"RotaryEmbedding", "LinearScalingRotaryEmbedding", "Llama3RotaryEmbedding", "Gemma4RotaryEmbedding"}
)
"""Rotary embeddings whose row of a position depends on nothing but that: how long their table is does not matter."""

_UNUSED = VOLATILE_KEYS | {
    "max_model_len", "auto_map", "id2label", "label2id", "task_specific_params", "finetuning_task", "problem_type",
    "tokenizer_class", "prefix", "dtype", "torch_dtype", "_attn_implementation", "_attn_implementation_internal",
}  # fmt: skip
"""Of a configuration: names, and what stands elsewhere in the key (the dtype, the code, a draft model's weights)."""

_TOKENS = ("_token_id", "_token_ids")

_ASKED = "get_"
"""Functions of models that are called so tell how large an input may get; no forward pass calls them."""

_DEPTH = 8


def model_facts(
    modules: Collection[nn.Module],
    configs: Iterable[Any],
    known_code: Collection[str],
    sizes: frozenset[str] = frozenset(),
) -> set[str]:
    """Facts that decide what a model's layers cache: its configurations, code and rotary embeddings.

    :param modules: all of the loaded model's, see :func:`model_of`.
    :param configs: of transformers' kind; those of the modules are added.
    :param known_code: packages whose version is in the key already; other code of a model is keyed by its text.
    :param sizes: what the engine itself writes into a configuration and no number follows from.
    """
    found = [*configs, *(module.__dict__.get("config") for module in modules)]
    told = {id(config): config for config in found if hasattr(config, "to_dict")}.values()
    facts = {fact("config", config_facts(config, _UNUSED | sizes)) for config in told}
    facts |= {fact("code", [file.name, _text_digest(file)]) for file in _foreign_code(classes_of(modules), known_code)}
    return facts | {fact("rotary", rotary_facts(module)) for module in modules if _is_rotary(module)}


def classes_of(modules: Collection[nn.Module]) -> set[type]:
    """The classes that these are made of, their bases among them."""
    return {base for module in modules for base in type(module).__mro__ if issubclass(base, nn.Module)}


def tracked_objects() -> list[Any]:
    """What the garbage collector knows in this process, also what it leaves alone since an engine froze it.

    vLLM does when it has started, SGLang at ``/freeze_gc``.
    """
    frozen = gc.get_freeze_count()
    if frozen:
        gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        if frozen:
            gc.freeze()


def model_of(layers: Collection[nn.Module]) -> list[nn.Module]:
    """All modules of the models that these are layers of; engines hand connectors the layers only."""
    parents: dict[int, list[nn.Module]] = {}
    for found in tracked_objects():
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


def config_facts(config: Any, unused: frozenset[str] = _UNUSED) -> Any:
    """What decides numbers in a configuration of transformers', without what every configuration has by default."""
    told = config if isinstance(config, Mapping) else config.to_dict()
    usual = _usual() if not isinstance(config, Mapping) else {}
    return {
        str(key): config_facts(value, unused) if _is_config(value) else plain(value)
        for key, value in told.items()
        if key not in unused and not str(key).endswith(_TOKENS) and not (key in usual and usual[key] == value)
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
        return sorted((within(each) for each in value), key=as_json)
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


def reads(kind: type, name: str) -> bool:
    """Does some function of this class look an attribute or a key of this name up? Never of a class of torch."""
    if kind.__module__.partition(".")[0] == "torch":
        return False
    return any(name in _names(each) for own, each in vars(kind).items() if not own.startswith(_ASKED))


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
    names = {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _code_names(constant)
    return names


def _is_config(value: Any) -> bool:
    return isinstance(value, Mapping) or hasattr(value, "to_dict")


def _usual() -> Mapping[str, Any]:
    """Every configuration of this transformers has these: its own are added and dropped from version to version."""
    transformers = sys.modules.get("transformers")
    kind = getattr(transformers, "PretrainedConfig", None) if transformers is not None else None
    return kind().to_dict() if kind is not None else {}


def _is_rotary(module: nn.Module) -> bool:
    return any("cos_sin_cache" in name for name in module._buffers)


def _foreign_code(classes: Collection[type], known: Collection[str]) -> set[Path]:
    """Files of classes that these packages do not bring: a checkpoint's own code, or a plugin's."""
    modules = {kind.__module__ for kind in classes if kind.__module__.partition(".")[0] not in known}
    modules |= {name for name in list(sys.modules) if name.startswith("transformers_modules.")}
    files = {getattr(sys.modules.get(name), "__file__", None) for name in modules}
    return {Path(file) for file in files if file and Path(file).is_file()}


def _text_digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32]


def fact(kind: str, value: Any) -> str:
    return f"{kind} {as_json(value)}"


def as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
