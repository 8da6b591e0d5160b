"""What makes cached bytes of vLLM's what they are: the model's content, adapters, salts, multimodal inputs."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from layerflow.content import folder_content, model_content, renewed_content
from layerflow.errors import ConfigError, LayerflowError
from layerflow.keys import Chain, Media, root_digest
from layerflow.spec import ModelSpec


def content_of(vllm_config: Any, named: str = "") -> str:
    """Digest of the checkpoint that vLLM loaded; the same wherever it lies.

    :param named: the operator's own name for the content, see :class:`.options.Options`.
    :raises ConfigError: the weights are not safetensors files that can be read here, and they have no name.
    """
    if named:
        return renewed_content("", name_of(named))
    model = vllm_config.model_config
    overrides = getattr(model, "hf_overrides", None)
    if overrides and not isinstance(overrides, dict):
        raise ConfigError("hf_overrides is a function: name what it makes of the model with model_content")
    extra = f"+{json.dumps(overrides, sort_keys=True, default=str)}" if overrides else ""
    if str(vllm_config.load_config.load_format) == "dummy":
        facts = model.hf_config.to_json_string(use_diff=False)
        return f"dummy:{model.seed}:{facts}{extra}"
    try:
        return model_content(_folder(model.model, getattr(model, "revision", None))) + extra
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
    """What besides the weights decides the cached numbers: quantisation, dtypes and the cache's own scales."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    facts = {
        "quantization": str(model.quantization or ""),
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "scales": bool(getattr(cache, "calculate_kv_scales", False)),
    }
    return json.dumps(facts, sort_keys=True)


def chain_of(spec: ModelSpec, request: Any) -> Chain:
    """A request's digests: its tokens, adapter, salt and multimodal inputs.

    :param request: vLLM's Request.
    :raises LayerflowError: its adapter's files cannot be read.
    """
    media = [
        Media(feature.mm_position.offset, feature.mm_position.length, str(feature.identifier).encode())
        for feature in request.mm_features
    ]
    adapter = adapter_of(request.lora_request) if request.lora_request is not None else ""
    root = root_digest(spec.fingerprint, adapter=adapter, salt=request.cache_salt or "")
    return Chain(root, request.prompt_token_ids, spec.chunk_tokens, media)


def adapter_of(lora: Any) -> str:
    """A LoRA adapter by its content, never by its slot or name."""
    if lora.load_inplace:
        raise ConfigError(f"adapter {lora.lora_name!r} is replaced in place: its content cannot be told")
    path = _folder(lora.lora_path, None)
    stamps = tuple(sorted((file.name, file.stat().st_mtime_ns) for file in path.iterdir() if file.is_file()))
    return _adapter_content(path, stamps)


@functools.lru_cache(maxsize=256)
def _adapter_content(path: Path, stamps: tuple[tuple[str, int], ...]) -> str:
    return folder_content(path, "adapter_config.json")


def _folder(name: str, revision: str | None) -> Path:
    """A checkpoint's folder: a path, or a hub's name of something vLLM has downloaded already."""
    path = Path(name)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download  # noqa: PLC0415  vLLM brings it; nothing else needs it

    return Path(snapshot_download(name, revision=revision, local_files_only=True))
