"""Small JSON answers."""

from __future__ import annotations

from starlette.responses import Response

from layerflow.errors import ProxyError
from layerflow.proxy.outlet import error_body


def refusal(error: ProxyError) -> Response:
    """The error as every path tells it."""
    headers = {"retry-after": "1"} if error.status == 503 else None
    return Response(error_body(error), error.status, headers, media_type="application/json")
