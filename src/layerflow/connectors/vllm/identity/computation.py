"""What a worker computes with besides its weights, read from the model that vLLM has loaded.

The configuration is the one after ``--hf-config-path``, ``--hf-overrides``, ``params.json`` and vLLM's own patches.
``max_model_len`` is a size, and engines of other lengths share what they store. But some code computes otherwise beyond
some length (LongRoPE's factors, Llama-4's attention temperature). Which code that is, is seen in the loaded classes:
where none of them reads the length, nothing follows from it. Where one does, its parameter enters the key if it is
known; else the length itself does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import structlog
from torch import nn

from layerflow.connectors.common.computation import as_json, classes_of, fact, model_facts, model_of, plain, reads

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

_KNOWN_CODE = ("torch", "vllm", "vllm_ascend")
"""Packages whose version is in the key; other code of a model is keyed by its text."""

log = structlog.get_logger("layerflow.vllm")


def computation_of(vllm_config: Any, model_config: Any, layers: Collection[str]) -> frozenset[str]:
    """Facts that decide the numbers which these layers cache, the same on every host and rank.

    :param model_config: vLLM's ModelConfig of the model that they belong to.
    :param layers: their names in vLLM's forward context.
    """
    context = vllm_config.compilation_config.static_forward_context
    modules = model_of([context[name] for name in layers if isinstance(context.get(name), nn.Module)])
    facts = model_facts(modules, (model_config.hf_config, model_config.hf_text_config), _KNOWN_CODE)
    return frozenset(facts | set(_length_facts(model_config, modules)))


def _length_facts(model_config: Any, modules: Collection[nn.Module]) -> Iterator[str]:
    unknown: list[str] = []
    readers = [kind for kind in classes_of(modules) if reads(kind, LENGTH)]
    for kind in sorted(readers, key=lambda kind: kind.__name__):
        made = [
            (path, [_at(module, path) for module in modules if isinstance(module, kind)])
            for path in _FOLLOWS.get(kind.__name__, ())
        ]
        is_known = made and all(MISSING not in values for _, values in made)
        if not is_known and not (kind.__name__ in _SIZES and kind.__module__.startswith("vllm.")):
            unknown.append(kind.__name__)
        for path, values in made:
            yield fact("length", [kind.__name__, path, sorted({as_json(plain(value)) for value in values})])
    if unknown or not modules:
        reason = (
            f"{', '.join(unknown)} may compute otherwise beyond some length" if modules else "the model was not found"
        )
        log.info("max_model_len_in_key", max_model_len=model_config.max_model_len, reason=reason)
        yield fact(LENGTH, model_config.max_model_len)


def _at(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, MISSING)
    return module
