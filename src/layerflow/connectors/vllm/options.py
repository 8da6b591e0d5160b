"""What ``kv_connector_extra_config`` may hold, and what the keys of the systems people come from mean here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from layerflow.backends import installed
from layerflow.config.pool import usable_backend
from layerflow.config.settings import Settings
from layerflow.config.sources import LAYERWISE_MODES
from layerflow.connectors.common.options import WrittenOptions
from layerflow.connectors.vllm.pd.options import PdOptions, parse_pd
from layerflow.connectors.vllm.versions import ALLOW_UNKNOWN
from layerflow.errors import ConfigError

ModeSetting = Literal["auto", "layerwise", "bulk"]
StatesSetting = Literal["all", "read"]

DEFAULT_LOOKUP_WAIT_MS = 2.0
"""How long the scheduler waits for a lookup before it asks again in its next pass."""

# Settings of the server: with an endpoint they are the operator's, embedded they are taken from here.
_SERVER_KEYS = {
    "layerwise_prefetch_layers": "transfer.prefetch_layers",
    "layerwise_max_transfer_blocks": "transfer.max_transfer_blocks",
    "layerwise_max_transfer_bytes": "transfer.max_transfer_bytes",
    "h2d_stagger_us": "transfer.h2d_stagger_us",
    "pool_size": "pool.size",
}
# Tables of the server's TOML file, below [pool]; with an endpoint they are the operator's as well.
_POOL_TABLES = tuple(installed())
_OWN_KEYS = (
    "endpoint", "mode", "use_layerwise", "load_async", "backend", "chunk_tokens", "discard_partial_chunks",
    "save_decode_cache", "consumer_is_to_load", "consumer_is_to_put", "lookup_wait_ms", "model_content", "name", "pd",
    "compressor_states", ALLOW_UNKNOWN,
)  # fmt: skip
_WHERE = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The connector's settings, checked.

    :param endpoint: of a running ``layerflow run``; "" = embed a server in the first worker's process.
    :param mode: how hits are loaded; see :mod:`layerflow.connectors.vllm.scheduler.scheduler`.
    :param chunk_tokens: tokens keyed and stored together; 0 = about 256, a multiple of every block size.
    :param load: look prompts up and load hits.
    :param save: store what is computed.
    :param save_decode: also chunks that fill up while decoding.
    :param save_partial: also the prompt's last, partial chunk.
    :param compressor_states: which of DeepSeek-V4's are stored and loaded: all that vLLM's windows hold, or those that
        are read behind a hit.
    :param lookup_wait_s: how long one scheduling pass may wait for a lookup, seconds.
    :param model_content: names the weights where they are not safetensors files; "" = digest of the checkpoint.
        ``@FILE`` = the name is what that file holds, at the start and in the first step after each reset.
    :param name: what this engine is called in status, logs and metrics; "" = model, host and data-parallel rank.
    :param pd: how prompts are handed from prefill to decode engines.
    :param server: settings of the embedded server, ``{"transfer.prefetch_layers": 3, "pool.disk": {"path": "/x"}}``.
    """

    endpoint: str = ""
    mode: ModeSetting = "auto"
    chunk_tokens: int = 0
    load: bool = True
    save: bool = True
    save_decode: bool = False
    save_partial: bool = True
    compressor_states: StatesSetting = "all"
    lookup_wait_s: float = DEFAULT_LOOKUP_WAIT_MS / 1e3
    model_content: str = ""
    name: str = ""
    pd: PdOptions = field(default_factory=PdOptions)
    server: Mapping[str, Any] = field(default_factory=dict)


def parse_options(extra: Mapping[str, Any], *, producer: bool, consumer: bool) -> Options:
    """Check and translate an extra config.

    :param producer: vLLM's ``kv_role`` is ``kv_producer`` or ``kv_both``.
    :param consumer: it is ``kv_consumer`` or ``kv_both``.
    :raises ConfigError: unknown keys, a value of the wrong kind, a contradiction, or a key of another system
        that means nothing here; the message says what to use.
    """
    written = WrittenOptions(_WHERE, extra)
    written.refuse_unknown((*_OWN_KEYS, *_SERVER_KEYS, *_POOL_TABLES))
    endpoint = written.endpoint()
    backend = _backend(written)
    server = {setting: extra[key] for key, setting in _SERVER_KEYS.items() if key in extra}
    server |= {f"pool.{table}": written.table(table, f"[pool.{table}]") for table in _POOL_TABLES if table in extra}
    if endpoint and server:
        keys = ", ".join(key for key in (*_SERVER_KEYS, *_POOL_TABLES) if key in extra)
        raise ConfigError(
            f"{_WHERE}: {keys}: the server at {endpoint} has its own settings; set "
            f"{', '.join(server)} in the config of `layerflow run`"
        )
    if backend and not endpoint:
        server["pool.backend"] = backend
    Settings.load(None, server, called=_WHERE)  # refuses bad values now, with their names
    allows_unknown(extra)
    chunk_tokens = written.number("chunk_tokens", 0)
    if chunk_tokens != int(chunk_tokens) or chunk_tokens < 0:
        raise ConfigError(f"{_WHERE}: chunk_tokens = {chunk_tokens}: should be a whole number")
    wait_ms = written.number("lookup_wait_ms", DEFAULT_LOOKUP_WAIT_MS, least=0, most=1000)
    return Options(
        endpoint=endpoint,
        mode=_mode(written),
        chunk_tokens=int(chunk_tokens),
        load=consumer and written.switch("consumer_is_to_load", True),
        save=producer or written.switch("consumer_is_to_put", False),
        save_decode=written.switch("save_decode_cache", False),
        save_partial=not written.switch("discard_partial_chunks", False),
        compressor_states=_states(written),
        lookup_wait_s=wait_ms / 1e3,
        model_content=written.text("model_content"),
        name=written.text("name"),
        pd=parse_pd(extra),
        server=server,
    )


def allows_unknown(extra: Mapping[str, Any]) -> bool:
    """May the connector run in a vLLM that is newer than those it was tested with?

    :raises ConfigError: the setting is no switch.
    """
    return WrittenOptions(_WHERE, extra).switch(ALLOW_UNKNOWN, False)


def _mode(written: WrittenOptions) -> ModeSetting:
    mode = written.text("mode")
    if mode and mode not in ("auto", "layerwise", "bulk"):
        raise ConfigError(f"{_WHERE}: mode = {mode!r}: should be auto, layerwise or bulk")
    wanted = {mode} if mode else set()
    if "use_layerwise" in written:
        wanted.add(LAYERWISE_MODES[written.switch("use_layerwise", True)])
    if written.switch("load_async", False):
        wanted.add("bulk")  # all of a hit is there before its request is scheduled
    if len(wanted) > 1:
        raise ConfigError(
            "kv_connector_extra_config: mode, use_layerwise and load_async contradict each other; keep only mode = "
            "auto, layerwise or bulk (loads that vLLM does not wait for)"
        )
    return wanted.pop() if wanted else "auto"  # type: ignore[return-value]


def _states(written: WrittenOptions) -> StatesSetting:
    states = written.text("compressor_states") or "all"
    if states not in ("all", "read"):
        raise ConfigError(f"{_WHERE}: compressor_states = {states!r}: should be all or read")
    return states  # type: ignore[return-value]


def _backend(options: WrittenOptions) -> str:
    """The backend by layerflow's name, "" if not given; checked with an endpoint too, though it decides there."""
    written = options.text("backend")
    if not written:
        return ""
    try:
        return usable_backend(written)
    except ValueError as error:
        raise ConfigError(f"{_WHERE}: backend = {written!r}: {error}") from None
