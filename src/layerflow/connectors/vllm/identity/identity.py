"""What makes cached bytes of vLLM's what they are: the model's content, adapters, salts, multimodal inputs."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from layerflow.connectors.common.computation import plain
from layerflow.connectors.common.weights import Checkpoint, checkpoint
from layerflow.connectors.vllm.identity.adapters import Adapters
from layerflow.content import tensor_bytes
from layerflow.errors import Unsupported
from layerflow.keys import Chain, Media, root_digest
from layerflow.spec import ModelSpec

# What multimodal inputs are called in keys: by the data that the encoder reads, never by their identifier.
#
# vLLM's identifier is a hash of the input or, verbatim, the ``uuid`` that a client gave it. vLLM finds the encoder's
# outputs and its own cached blocks by the identifier. So where one identifier has stood for two contents, it is not
# known which of them vLLM computes with, and prompts end for layerflow before such an input.


MOST_BYTES = 512 << 20
"""Of one input: hashing more would hold the scheduler up, and such an input is of unknown content."""

MOST_KNOWN = 1 << 17
"""Identifiers whose content is remembered. vLLM's caches hold fewer inputs."""

UNKNOWN = b""


class MediaInputs:
    """The inputs of one engine's requests, for its scheduler's thread."""

    def __init__(self) -> None:
        self._contents: OrderedDict[str, bytes] = OrderedDict()  #: by vLLM's identifier; UNKNOWN = of several contents
        self._hashed: dict[int, tuple[weakref.ref[Any], bytes]] = {}  #: data that vLLM's cache hands out again

    def read(self, features: Iterable[Any]) -> tuple[list[Media], int | None]:
        """A prompt's inputs, and how many of its tokens come before the first one of unknown content (None = all).

        :param features: vLLM's MultiModalFeatureSpecs.
        """
        media: list[Media] = []
        end: int | None = None
        for feature in features:
            where, content = feature.mm_position, self._content(feature)
            if content != UNKNOWN:
                media.append(Media(where.offset, where.length, content))
            else:
                end = where.offset if end is None else min(end, where.offset)
        return [each for each in media if end is None or each.start < end], end

    def _content(self, feature: Any) -> bytes:
        content = self._data_digest(feature.modality, feature.data)
        if self._contents.setdefault(feature.identifier, content) != content:
            self._contents[feature.identifier] = content = UNKNOWN
        self._contents.move_to_end(feature.identifier)
        if len(self._contents) > MOST_KNOWN:
            self._contents.popitem(last=False)
        return content

    def _data_digest(self, modality: str, data: Any) -> bytes:
        """Digest of what the encoder reads; UNKNOWN where vLLM's scheduler has nothing of it, or its address."""
        if data is None:
            return UNKNOWN
        known = self._hashed.get(id(data))
        if known is not None and known[0]() is data:
            return known[1]
        leaves = [(key, leaf) for key in sorted(data) for leaf in _leaves(data[key].data)]
        tensors = [leaf for _, leaf in leaves if isinstance(leaf, torch.Tensor)]
        readable = all(isinstance(leaf, torch.Tensor | bool | int | float) for _, leaf in leaves)
        on_host = all(leaf.device.type == "cpu" for leaf in tensors)
        if not tensors or not readable or not on_host or sum(leaf.nbytes for leaf in tensors) > MOST_BYTES:
            return UNKNOWN
        hasher = hashlib.sha256(modality.encode())
        for key, leaf in leaves:
            is_tensor = isinstance(leaf, torch.Tensor)
            head = f"\0{key}\0{leaf.dtype} {list(leaf.shape)}" if is_tensor else f"\0{key}\0{leaf!r}"
            hasher.update(head.encode())
            if is_tensor:
                hasher.update(tensor_bytes(leaf))
        number, hashed = id(data), self._hashed
        gone = weakref.ref(data, lambda _: hashed.pop(number, None))
        hashed[number] = gone, hasher.digest()
        return hashed[number][1]


def _leaves(value: Any) -> Iterator[Any]:
    """Tensors and numbers of a value, in order; a list's length counts as one of them."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from _leaves(value[key])
    elif isinstance(value, list | tuple):
        yield len(value)
        for each in value:
            yield from _leaves(each)
    else:
        yield value


_ADAPTERS = ("target_modules", "enable_tower_connector_lora", "enable_moe_shared_loras", "enable_mixed_moe_lora_format")
"""Of vLLM's LoRAConfig: what changes the numbers that an adapter's files give."""

_MEDIA = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "video_pruning_rate",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
)
"""Of vLLM's MultiModalConfig: what changes an input's embeddings, and is not in its processed data."""


def checkpoint_of(model: Any, load_config: Any, named: str = "") -> Checkpoint:
    """Which weights vLLM has loaded for a model.

    :param model: vLLM's ModelConfig. :param load_config: its LoadConfig.
    :param named: the operator's own name for the content, see :class:`.options.Options`.
    :raises ConfigError: the weights are not safetensors files that can be found here, and they have no name.
    """
    revision = getattr(model, "revision", None)
    return checkpoint(model.model, str(load_config.load_format), revision=revision, seed=model.seed, named=named)


def arithmetic_of(vllm_config: Any, engine: str, computation: Collection[str] = ()) -> str:
    """What besides the weights decides the cached numbers.

    Quantisation, dtypes, the engine's release, how adapters are applied and multimodal inputs are read, and what the
    loaded model computes with.

    :param engine: vLLM's release, "0.32": a disk tier outlives upgrades, and releases mend rotary and scale bugs.
    :param computation: of :func:`.computation.computation_of`, of all pipeline stages.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    facts: dict[str, Any] = {
        "engine": f"vllm {engine}",
        "quantization": quantization_of(model, getattr(vllm_config, "quant_config", None)),
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "computation": hashlib.blake2b("\n".join(sorted(computation)).encode(), digest_size=16).hexdigest(),
    }
    lora = vllm_config.lora_config
    for name in _ADAPTERS:
        if value := getattr(lora, name, None):
            facts[name] = sorted(value) if isinstance(value, list) else value
    if lora is not None and str(lora.lora_dtype) not in ("auto", str(model.dtype)):
        facts["lora_dtype"] = str(lora.lora_dtype)
    for name in _MEDIA:
        if value := getattr(model.multimodal_config, name, None):
            facts[name] = value
    return json.dumps(facts, sort_keys=True, default=str)


def quantization_of(model: Any, resolved: Any = None) -> list[Any]:
    """How a model's weights are quantised: the method, and its configuration as vLLM has resolved it.

    :param model: vLLM's ModelConfig. :param resolved: its QuantizationConfig.
    """
    return [str(model.quantization or ""), plain(getattr(model, "quantization_config", None)), plain(resolved)]


class RequestKeys:
    """The digests of requests of one engine."""

    def __init__(self, adapters: Adapters | None = None) -> None:
        self.adapters = adapters or Adapters()
        self.inputs = MediaInputs()

    def chain(self, spec: ModelSpec, request: Any) -> Chain:
        """A request's digests: its tokens, adapter, salt and multimodal inputs.

        It ends before the first input whose content is not known: what lies behind has no key.

        :param request: vLLM's Request.
        :raises LayerflowError: its adapter's content cannot be told, or its prompt is not final.
        """
        if getattr(request, "resumable", False):
            raise Unsupported("a streaming session is not cached: its prompt and its multimodal inputs go on to change")
        media, known = self.inputs.read(request.mm_features)
        adapter = self.adapters.content(request.lora_request)
        root = root_digest(spec.fingerprint, adapter=adapter, salt=request.cache_salt or "")
        return Chain(root, request.prompt_token_ids[:known], spec.chunk_tokens, media)
