"""What the keys of SGLang's bytes depend on besides its page hashes: the weights, and what the engine computes with."""

from __future__ import annotations

import gc
import hashlib
import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from layerflow.connectors.common.computation import classes_of, fact, model_facts, model_of, plain, reads
from layerflow.connectors.common.weights import checkpoint, folder_of
from layerflow.content import folder_content
from layerflow.errors import ConfigError, LayerflowError

LENGTH = "context_len"
"""SGLang writes it into the model's configuration. It is a size, unless some class of the model reads it."""

_KNOWN_CODE = ("torch", "sglang")

_ATTENTION = ("RadixAttention", "RadixLinearAttention")


def loaded_modules() -> list[nn.Module]:
    """All modules of the models that this process has loaded; SGLang hands linkers their pools only."""
    # By type(): isinstance() asks an object for its __class__, at which lazy ones import and warn.
    layers = [
        each for each in gc.get_objects() if type(each).__name__ in _ATTENTION and issubclass(type(each), nn.Module)
    ]
    return model_of(layers)


def reading_of(cfg: Any, adapters: Iterable[Any], named: str) -> Callable[[threading.Event], tuple[str, str]]:
    """What reads the files that SGLang has loaded: returns the content of its weights, and of its adapters.

    :param cfg: its ServerArgs. :param adapters: its LoRARefs of ``--lora-paths``.
    :param named: the operator's own name for the weights.
    :raises ConfigError: they are not safetensors files that can be found here, and they have no name. What is returned
        raises it for adapters that cannot be read.
    """
    load_format = str(getattr(cfg.load_format, "value", cfg.load_format))
    found = checkpoint(cfg.model_path, load_format, revision=cfg.revision, seed=cfg.random_seed or 0, named=named)
    return lambda stop: (found.content(stop), adapters_content(adapters, stop))


def adapters_content(adapters: Iterable[Any], stop: threading.Event | None = None) -> str:
    """Digests of the adapters that SGLang was started with; "" = there are none.

    SGLang makes their ids, which are in its page hashes, of their names and paths. So a file that is replaced between
    two starts would be found under its predecessor's keys. Adapters that are loaded later have random ids.

    :param adapters: LoRARefs.
    :raises ConfigError: one is not in safetensors files that can be found here.
    """
    digests = {}
    for each in adapters:
        try:
            digests[each.lora_id] = folder_content(folder_of(each.lora_path, None), "adapter_config.json", stop)
        except (LayerflowError, OSError, ValueError) as error:  # the hub's client has a ValueError for what is no name
            raise ConfigError(
                f"--lora-paths: the content of adapter {each.lora_name!r} cannot be told: {error}; load it by "
                "/load_lora_adapter instead"
            ) from error
    return json.dumps(digests, sort_keys=True) if digests else ""


def arithmetic_of(cfg: Any, release: str, modules: list[nn.Module], dtypes: Iterable[str]) -> str:
    """What besides the weights decides the cached numbers, the same on every host and rank.

    :param release: SGLang's: a disk outlives upgrades, and releases mend rotary and scale bugs.
    :param dtypes: of the cache's tensors.
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
    return json.dumps(facts, sort_keys=True)


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
