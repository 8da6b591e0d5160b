"""What the models of the running server share with engines of other tensor sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from layerflow.findings import Finding, ok, warning


def examine_sharing(running: dict[str, Any] | None) -> Iterator[Finding]:
    """A line for each model that engine workers of the running server have.

    :param running: its status; None = no server runs, and no model is known.
    """
    models: dict[str, dict[str, Any]] = {}
    for session in (running or {}).get("sessions", []):
        if session["memory"] and session["fingerprint"]:
            models[session["fingerprint"]] = session
    for session in models.values():
        check = f"model {session['model']}"
        if bound := session.get("bound_to_size"):
            size = session["tp"].rpartition("/")[2]
            yield warning(
                check,
                f"only engines of tensor size {size} hit what it stores: {'; '.join(bound)}",
                "where engines of other sizes are to share it, choose an attention backend with a head-major layout",
            )
        else:
            yield ok(check, "engines of all tensor sizes share what it stores")
