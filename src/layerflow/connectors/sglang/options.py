"""What ``linker_extra_config`` may hold."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layerflow.connectors.common.options import WrittenOptions
from layerflow.connectors.sglang.versions import ALLOW_UNKNOWN
from layerflow.endpoint import default_endpoint
from layerflow.errors import ConfigError

DEFAULT_LOOKUP_TIMEOUT_MS = 50.0
"""How long SGLang's scheduler may stand still for one lookup. A server on this machine answers in one or two."""

DEFAULT_HANDOFF_DEADLINE_S = 120.0

ENVIRONMENT = "LAYERFLOW_SGLANG_OPTIONS"
"""The transfer backend's options, JSON: SGLang has no argument that reaches it."""

_KEYS = (
    "endpoint", "name", "load", "save", "save_by_layer", "model_content", "lookup_timeout_ms", "load_timeout_ms",
    "handoff_deadline_s", ALLOW_UNKNOWN,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions:
    """The connector's settings, checked.

    :param endpoint: of a running ``layerflow run`` on this machine.
    :param name: what this engine is called in status, logs and metrics; "" = model, host and port.
    :param load: look prompts up and load hits.
    :param save: store what is computed.
    :param save_by_layer: while a batch computes, each layer behind its attention. Else all layers behind the pass.
    :param model_content: names the weights where they are not safetensors files; "" = digest of the checkpoint.
        ``@FILE`` = the name is what that file holds, at the start and after each flush that follows new weights.
    :param lookup_timeout_s: a server that has not answered a lookup after so long has nothing.
    :param load_timeout_s: a load that is not in place so long after its batch began has failed; None = the server's
        ``transfer.step_timeout_ms``.
    :param handoff_deadline_s: a prompt that another engine computes has failed if it is not here so long after its
        pages were.
    :param allow_unknown: run in an SGLang that the connector was not tested with.
    """

    endpoint: str = ""
    name: str = ""
    load: bool = True
    save: bool = True
    save_by_layer: bool = True
    model_content: str = ""
    lookup_timeout_s: float = DEFAULT_LOOKUP_TIMEOUT_MS / 1e3
    load_timeout_s: float | None = None
    handoff_deadline_s: float = DEFAULT_HANDOFF_DEADLINE_S
    allow_unknown: bool = False


def options_of_environment() -> SglangOptions:
    """The transfer backend's.

    :raises ConfigError: as :func:`parse_options`, or they are no JSON object.
    """
    try:
        written = json.loads(os.environ.get(ENVIRONMENT) or "{}")
    except ValueError as error:
        raise ConfigError(f"{ENVIRONMENT}: {error}") from None
    if not isinstance(written, dict):
        raise ConfigError(f'{ENVIRONMENT} should be a JSON object, such as {{"endpoint": "ipc:///path"}}')
    return parse_options(written, ENVIRONMENT)


def parse_options(extra: Mapping[str, Any], where: str = "linker_extra_config") -> SglangOptions:
    """Check and translate an extra config.

    :param where: what it is called, for errors.
    :raises ConfigError: unknown keys, or a value of the wrong kind.
    """
    written = WrittenOptions(where, extra)
    written.refuse_unknown(_KEYS)
    load_timeout = None
    if "load_timeout_ms" in written:
        load_timeout = written.number("load_timeout_ms", 0, least=1, most=3_600_000) / 1e3
    return SglangOptions(
        endpoint=written.endpoint() or default_endpoint(),
        name=written.text("name"),
        load=written.switch("load", True),
        save=written.switch("save", True),
        save_by_layer=written.switch("save_by_layer", True),
        model_content=written.text("model_content"),
        lookup_timeout_s=written.number("lookup_timeout_ms", DEFAULT_LOOKUP_TIMEOUT_MS, least=1, most=10_000) / 1e3,
        load_timeout_s=load_timeout,
        handoff_deadline_s=written.number("handoff_deadline_s", DEFAULT_HANDOFF_DEADLINE_S, least=1, most=86_400),
        allow_unknown=written.switch(ALLOW_UNKNOWN, False),
    )
