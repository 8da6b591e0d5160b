"""Which vLLM this is, and whether the connector knows it."""

from __future__ import annotations

import re

from layerflow.errors import Unsupported

OLDEST, NEWEST = (0, 27), (0, 32)
"""The versions that the tests run are 0.27.1 and 0.32.0; what lies between has the same interface."""


def check_version(version: str) -> None:
    """:raises Unsupported: a vLLM that the connector was not tested with."""
    if not OLDEST <= release(version) <= NEWEST:
        raise Unsupported(
            f"vLLM {version}: this layerflow connector knows vLLM 0.27 to 0.32; install one of these, or a layerflow "
            "that knows yours"
        )


def release(version: str) -> tuple[int, int]:
    """Its first two numbers.

    :raises Unsupported: it has none.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise Unsupported(f"vLLM calls itself {version!r}; the connector needs a release from 0.27 to 0.32")
    return int(found[1]), int(found[2])
