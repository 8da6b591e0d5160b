"""Which SGLang this is, and whether the connector knows it."""

from __future__ import annotations

import structlog

from layerflow.errors import Unsupported

KNOWN = ("0.5.23",)
"""Releases that the tests run. The linker's interface had three shapes in four releases: others are unknown."""

ALLOW_UNKNOWN = "allow_unknown_sglang"
"""The option that lets another release in."""

log = structlog.get_logger("layerflow.sglang")


def check_version(version: str, *, allow_unknown: bool = False) -> None:
    """Refuse an SGLang that the connector was not tested with.

    :param allow_unknown: let it in, with a warning in the log.
    :raises Unsupported: it is unknown, and not allowed.
    """
    if version in KNOWN:
        return
    known = ", ".join(KNOWN)
    if not allow_unknown:
        raise Unsupported(
            f"SGLang {version}: this layerflow connector knows SGLang {known}; install that, or a layerflow that knows "
            f"yours, or set {ALLOW_UNKNOWN} = true in linker_extra_config to try it"
        )
    log.warning("sglang_unknown", version=version, known=known, effect="the connector was not tested with it")
