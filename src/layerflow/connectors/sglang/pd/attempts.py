"""Attempts at a request: decode has prefill compute one once more, under the same room, after it has retracted it.

SGLang's ``/pause_generation`` with ``retract`` does so when generation goes on. Each attempt is a hand-off of its own,
whose name decode tells prefill with the request.
"""

from __future__ import annotations

from typing import Any

KEY = "__layerflow_attempt"
"""In the ``custom_params`` of what prefill is asked, which SGLang leaves to others."""


def next_attempt(request: Any) -> int:
    """Count one more attempt at decode's request."""
    request.layerflow_attempt = current_attempt(request) + 1
    return current_attempt(request)


def current_attempt(request: Any) -> int:
    """Which attempt decode's request is at; 0 = the first."""
    return getattr(request, "layerflow_attempt", 0)


def tell_attempt(payload: dict[str, Any], request: Any, *args: Any, **kwargs: Any) -> None:
    """Put the attempt into what prefill is asked."""
    sampling = payload["sampling_params"]
    sampling["custom_params"] = {**(sampling.get("custom_params") or {}), KEY: current_attempt(request)}


def asked_attempt(custom_params: Any) -> int:
    """The attempt that prefill is asked for; 0 = the first, which a router asks for."""
    found = custom_params.get(KEY, 0) if isinstance(custom_params, dict) else 0
    return found if isinstance(found, int) and found > 0 else 0
