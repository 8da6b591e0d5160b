"""Things for the doctor to look at: ports that answer and ports that do not."""

import functools
import http.server
import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from layerflow import findings
from layerflow.doctor import checks, peers

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    for name in [name for name in os.environ if name.startswith("LAYERFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who answers is heard, however long a busy machine takes for it."""
    monkeypatch.setattr(checks, "STATUS_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(peers, "ANSWER_MS", round(PATIENCE_S * 1e3))
    monkeypatch.setattr(findings, "http_get", functools.partial(findings.http_get, timeout_s=PATIENCE_S))
    monkeypatch.setattr(findings, "child", functools.partial(findings.child, timeout_s=PATIENCE_S))


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that refuses connections for as long as the test runs."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def open_port() -> Iterator[int]:
    """A port that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def health() -> Iterator[Callable[[int, bytes], str]]:
    """Makes HTTP servers: status and body of ``/health`` in, URL out."""
    running: list[tuple[http.server.ThreadingHTTPServer, threading.Thread]] = []

    def serve(status: int, body: bytes) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status if self.path == "/health" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.headers.get("Connection") != "close":  # as memcache's MetaService does it
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    for server, thread in running:
        server.shutdown()
        server.server_close()
        thread.join()
