"""Which vLLM this is, and whether the connector knows it."""

from __future__ import annotations

import re

import structlog

from layerflow.errors import Unsupported

OLDEST, NEWEST = (0, 27), (0, 33)
"""The versions that the tests run are 0.27.1, 0.30.0 (beneath vLLM-Ascend), 0.32.0 and 0.33.0; what lies between has
the same interface."""

ALLOW_UNKNOWN = "allow_unknown_vllm"
"""The key of ``kv_connector_extra_config`` that lets a newer vLLM in."""

log = structlog.get_logger("layerflow.vllm")


def check_version(version: str, *, allow_unknown: bool = False) -> None:
    """Refuse a vLLM that the connector was not tested with.

    :param allow_unknown: let a newer one in, with a warning in the log.
    :raises Unsupported: it is older, or newer and not allowed.
    """
    found = release(version)
    if found > NEWEST and allow_unknown:
        log.warning("vllm_unknown", version=version, known=_RANGE, effect="the connector was not tested with it")
    elif not OLDEST <= found <= NEWEST:
        newer = f", or set {ALLOW_UNKNOWN} = true in kv_connector_extra_config to try it" if found > NEWEST else ""
        raise Unsupported(
            f"vLLM {version}: this layerflow connector knows vLLM {_RANGE}; install one of these, or a layerflow "
            f"that knows yours{newer}"
        )


def release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version.

    :raises Unsupported: it has none.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise Unsupported(f"vLLM calls itself {version!r}; the connector needs a release from {_RANGE}")
    return int(found[1]), int(found[2])


_RANGE = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
