"""What makes cached bytes of vLLM's what they are: the model's content, adapters, salts, multimodal inputs."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from layerflow.connectors.vllm.identity.adapters import Adapters, folder_of
from layerflow.content import model_content, renewed_content
from layerflow.errors import ConfigError, LayerflowError, Unsupported
from layerflow.keys import Chain, Media, root_digest
from layerflow.spec import ModelSpec

_ADAPTERS = ("target_modules", "enable_tower_connector_lora", "enable_moe_shared_loras", "enable_mixed_moe_lora_format")
"""Of vLLM's LoRAConfig: what changes the numbers that an adapter's files give."""

_MEDIA = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "video_pruning_rate",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
)
"""Of vLLM's MultiModalConfig: what changes an input's embeddings, and is not in the identifier that vLLM gives it."""


def content_of(vllm_config: Any, named: str = "") -> str:
    """Digest of the checkpoint that vLLM loaded; the same wherever it lies.

    :param named: the operator's own name for the content, see :class:`.options.Options`.
    :raises ConfigError: the weights are not safetensors files that can be read here, and they have no name.
    """
    if named:
        return renewed_content("", name_of(named))
    overrides = getattr(vllm_config.model_config, "hf_overrides", None)
    if overrides and not isinstance(overrides, dict):
        raise ConfigError("hf_overrides is a function: name what it makes of the model with model_content")
    return checkpoint_content(vllm_config.model_config, vllm_config.load_config, overrides)


def checkpoint_content(model: Any, load_config: Any, overrides: dict[str, Any] | None = None) -> str:
    """The same of one of its models.

    :param model: vLLM's ModelConfig. :param load_config: its LoadConfig.
    :param overrides: of the checkpoint's configuration.
    :raises ConfigError: as :func:`content_of`.
    """
    extra = f"+{json.dumps(overrides, sort_keys=True, default=str)}" if overrides else ""
    if str(load_config.load_format) == "dummy":
        facts = model.hf_config.to_json_string(use_diff=False)
        return f"dummy:{model.seed}:{facts}{extra}"
    try:
        return model_content(folder_of(model.model, getattr(model, "revision", None))) + extra
    except (LayerflowError, OSError, ValueError) as error:
        raise ConfigError(
            f"the model's content cannot be told from {model.model}: {error}; set model_content in "
            "kv_connector_extra_config to a name that changes whenever the weights do"
        ) from error


def name_of(written: str) -> str:
    """The name that `model_content` gives to the weights: itself, or after an @ what that file holds now.

    :raises ConfigError: the file cannot be read, or is empty.
    """
    if not written.startswith("@"):
        return written
    try:
        name = Path(written[1:]).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model_content = {written!r}: the file cannot be read: {error}") from error
    if not name:
        raise ConfigError(f"model_content = {written!r}: the file is empty; write the weights' name into it")
    return name


def arithmetic_of(vllm_config: Any) -> str:
    """What besides the weights decides the cached numbers: quantisation, dtypes, the cache's own scales.

    And how adapters are applied and multimodal inputs are read, where that is not vLLM's default.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    facts: dict[str, Any] = {
        "quantization": str(model.quantization or ""),
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "scales": bool(getattr(cache, "calculate_kv_scales", False)),
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


class RequestKeys:
    """The digests of requests of one engine.

    :param media_salt: makes multimodal inputs this engine's own, see :func:`media_salt_of`.
    """

    def __init__(self, adapters: Adapters | None = None, media_salt: str = "") -> None:
        self.adapters = adapters or Adapters()
        self._media_salt = media_salt

    def chain(self, spec: ModelSpec, request: Any) -> Chain:
        """A request's digests: its tokens, adapter, salt and multimodal inputs.

        :param request: vLLM's Request.
        :raises LayerflowError: its adapter's content cannot be told, or its prompt is not final.
        """
        if getattr(request, "resumable", False):
            raise Unsupported("a streaming session is not cached: its prompt and its multimodal inputs go on to change")
        media = [
            Media(
                feature.mm_position.offset,
                feature.mm_position.length,
                f"{self._media_salt}{feature.identifier}".encode(),
            )
            for feature in request.mm_features
        ]
        adapter = self.adapters.content(request.lora_request)
        root = root_digest(spec.fingerprint, adapter=adapter, salt=request.cache_salt or "")
        return Chain(root, request.prompt_token_ids, spec.chunk_tokens, media)


def media_salt_of(vllm_config: Any) -> str:
    """What keeps one engine's multimodal inputs apart from another's, "" where vLLM names them by their content.

    Without its processor's cache and its prefix cache vLLM only counts them: each engine has a first image.
    """
    media = vllm_config.model_config.multimodal_config
    counted = (
        media is not None and not media.mm_processor_cache_gb and not vllm_config.cache_config.enable_prefix_caching
    )
    return f"{secrets.token_hex(16)}:" if counted else ""
