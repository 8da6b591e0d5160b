"""What the keys of SGLang's bytes depend on besides its page hashes: the weights, and what the engine computes with."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from layerflow.connectors.common.computation import (
    classes_of,
    fact,
    model_facts,
    model_of,
    plain,
    reads,
    tracked_objects,
)
from layerflow.connectors.common.weights import Checkpoint, WeightsReading, checkpoint, folder_of
from layerflow.content import content_of_tensors, folder_content
from layerflow.errors import ConfigError, LayerflowError, Unsupported

LENGTH = "context_len"
"""SGLang writes it into the model's configuration. It is a size, unless some class of the model reads it."""

ADAPTER_WAIT_S = 10.0
"""How long a scheduler stands for an adapter's digest, where SGLang computes a prompt that could have waited for it."""

_KNOWN_CODE = ("torch", "sglang")


def loaded_modules() -> list[nn.Module]:
    """All modules of the models that this process has loaded; SGLang hands linkers their pools only."""
    layers = [each for each in tracked_objects() if issubclass(type(each), nn.Module) and _is_attention(each)]
    return model_of(layers)


def _is_attention(module: nn.Module) -> bool:
    return type(module).__name__ in ("RadixAttention", "RadixLinearAttention")


def checkpoint_of(cfg: Any, named: str) -> Checkpoint:
    """Which weights SGLang has loaded.

    :param cfg: its ServerArgs. :param named: the operator's own name for them.
    :raises ConfigError: they are not safetensors files that can be found here, and they have no name.
    """
    load_format = str(getattr(cfg.load_format, "value", cfg.load_format))
    return checkpoint(cfg.model_path, load_format, revision=cfg.revision, seed=cfg.random_seed or 0, named=named)


def draft_checkpoint_of(cfg: Any, spec: Any) -> Checkpoint:
    """Which weights SGLang's draft model was loaded from.

    :param cfg: its ServerArgs. :param spec: of these, what is about speculative decoding, aliases resolved.
    :raises ConfigError: they are not safetensors files that can be found here.
    """
    load_format = spec.speculative_draft_load_format or cfg.load_format
    return checkpoint(
        spec.speculative_draft_model_path or cfg.model_path,
        str(getattr(load_format, "value", load_format)),
        revision=spec.speculative_draft_model_revision,
        seed=cfg.random_seed or 0,
    )


def drafting_of(cfg: Any, spec: Any) -> str:
    """What besides the weights of model and draft model decides the rows of the latter's cache; arguments as of
    :func:`draft_checkpoint_of`.
    """
    quantization = spec.speculative_draft_model_quantization or cfg.quantization or ""
    return json.dumps([str(spec.speculative_algorithm), bool(spec.enable_multi_layer_eagle), str(quantization)])


def arithmetic_of(
    cfg: Any,
    release: str,
    modules: list[nn.Module],
    dtypes: Iterable[str],
    adapters: Iterable[Any] = (),
    *,
    drafting: str = "",
) -> str:
    """What besides the weights decides the cached numbers, the same on every host and rank.

    :param release: SGLang's: a disk outlives upgrades, and releases mend rotary and scale bugs.
    :param dtypes: of the cache's tensors.
    :param adapters: what SGLang has loaded at its start, its LoRARefs.
    :param drafting: of :func:`drafting_of`, where a draft model's cache is stored too.
    :raises ConfigError: an adapter's files cannot be read.
    """
    computed = model_facts(modules, (), _KNOWN_CODE, frozenset({LENGTH}))
    readers = sorted(kind.__name__ for kind in classes_of(modules) if reads(kind, LENGTH))
    if readers or not modules:
        computed.add(fact(LENGTH, [readers, cfg.context_length]))
    facts = {
        "engine": f"sglang {release}",
        "dtype": str(cfg.dtype),
        "cache_dtype": [str(cfg.kv_cache_dtype), sorted(set(dtypes))],
        "quantization": [str(cfg.quantization or ""), plain(getattr(cfg, "torchao_config", None))],
        "overrides": str(cfg.json_model_override_args),
        "scales": _scales(modules),
        "computation": hashlib.blake2b("\n".join(sorted(computed)).encode(), digest_size=16).hexdigest(),
    }
    if contents := _adapters(adapters):
        facts["adapters"] = contents
    if drafting:
        facts["drafting"] = drafting
    return json.dumps(facts, sort_keys=True)


def _adapters(adapters: Iterable[Any]) -> list[list[str]]:
    """SGLang's page hashes tell an adapter of ``--lora-paths`` by its name and path, whatever lies there: its content
    has to be told besides. One that is loaded later has a random id in them, which no other engine has.
    """
    found = []
    for each in adapters:
        try:
            content = folder_content(folder_of(each.lora_path, None), "adapter_config.json")
        except (LayerflowError, OSError, ValueError) as error:  # the hub's client has a ValueError for what is no name
            raise ConfigError(f"adapter {each.lora_name!r}: its content cannot be told: {error}") from error
        found.append([each.lora_id, content])
    return sorted(found)


class LoadedAdapters:
    """The LoRA adapters that SGLang holds in the host's memory, by their content: the same in each engine that has
    loaded the same one, whatever its name, and from wherever. Used on the scheduler's thread.

    All bytes of an adapter are read, 1 to 2 GB/s, on a thread of their own: other requests go on meanwhile. SGLang
    computes with these bytes, also where other files have taken the place of theirs, and never puts others under an id.

    :param manager: SGLang's LoRAManager; None = it serves no adapters.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._readings: WeakKeyDictionary[Any, WeightsReading[str]] = WeakKeyDictionary()
        self._turn = threading.Lock()

    def is_read(self, lora_id: str) -> bool:
        """Does :meth:`content` answer at once? The first call for an adapter has it read.

        :param lora_id: SGLang's; also of one that is not loaded.
        """
        adapter = self._loaded(lora_id)
        return adapter is None or self._reading(adapter).wait(0)

    def content(self, lora_id: str) -> str:
        """Digest of an adapter; where it :meth:`is_read` not yet, this waits for it.

        :param lora_id: SGLang's.
        :raises Unsupported: it is not loaded, or not read after :data:`ADAPTER_WAIT_S`.
        :raises ConfigError: it could not be read.
        """
        adapter = self._loaded(lora_id)
        if adapter is None:
            raise Unsupported(f"SGLang holds no adapter with the id {lora_id}; load it on both servers")
        reading = self._reading(adapter)
        if not reading.wait(ADAPTER_WAIT_S):
            raise Unsupported(f"the adapter with the id {lora_id} is still being read; send the request again")
        return reading.found

    def _loaded(self, lora_id: str) -> Any:
        return self._manager.loras.get(lora_id) if self._manager is not None else None

    def _reading(self, adapter: Any) -> WeightsReading[str]:
        if adapter not in self._readings:
            weights = [layer.weights for layer in adapter.layers]
            weights += [adapter.embedding_layers, adapter.added_tokens_embeddings]
            named = {name: tensor for each in weights for name, tensor in each.items()}
            facts = {"rank": adapter.config.r, "scaling": adapter.scaling}
            # What is kept here holds no adapter, which would never go then.
            self._readings[adapter] = WeightsReading(lambda _: self._read(facts, named))
        return self._readings[adapter]

    def _read(self, facts: dict[str, Any], named: dict[str, Any]) -> str:
        with self._turn:  # each reader takes a core, and an engine may be asked for many new adapters at once
            try:
                return content_of_tensors(facts, named)
            finally:
                named.clear()  # SGLang may let go of tensors before it lets go of the adapter


def _scales(modules: list[nn.Module]) -> list[Any]:
    """Of a quantised cache: by layer, what keys and values were divided by."""
    layers: list[Any] = [module for module in modules if type(module).__name__ == "RadixAttention"]
    found = {
        (int(layer.layer_id), scale, float(value))
        for layer in layers
        for scale in ("k_scale_float", "v_scale_float")
        if (value := getattr(layer, scale, None)) is not None
    }
    return [list(each) for each in sorted(found)]
