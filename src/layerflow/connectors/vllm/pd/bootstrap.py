"""``GET /query`` of a prefill engine, for routers that ask for its name and decode engines that ask for its servers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from layerflow.connectors.vllm.pd.conventions.concurrent import QUERY
from layerflow.errors import ConfigError


class BootstrapServer:
    """Answers on a thread of its own until it is closed.

    :param answer: see :func:`.concurrent.query_answer`.
    :raises ConfigError: the port is taken.
    """

    def __init__(self, port: int, answer: Callable[[], dict[str, Any]], host: str = "") -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.split("?")[0] == QUERY
                told = answer() if found else {"error": f"only {QUERY} is served here"}
                body = json.dumps(told).encode()
                self.send_response(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        Handler.timeout = 5.0  # a client that says nothing holds its thread no longer
        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"kv_connector_extra_config: pd: bootstrap_port = {port}: {error.strerror}; choose a free one"
            ) from error
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="layerflow-bootstrap", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
