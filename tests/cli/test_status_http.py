"""``layerflow status --http`` asks the server itself, whatever proxies the environment names."""

import http.server
import json
import socket
import threading

import pytest

from layerflow.errors import SessionError
from layerflow_cli.commands import status
from layerflow_cli.commands.status import fetch_http
from layerflow_testing.ports import HeldPort


class Answering(http.server.BaseHTTPRequestHandler):
    """Says which URL it was asked for."""

    def do_GET(self) -> None:
        content = json.dumps({"asked": self.path}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def port(monkeypatch):
    monkeypatch.setattr(status, "TIMEOUT_S", 60.0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_this_machine_is_asked_directly(port, host, name, monkeypatch):
    with HeldPort() as nobody:
        monkeypatch.setenv(name, nobody.url)
        assert fetch_http(f"http://{host}:{port}") == {"asked": "/status"}


def test_another_machine_may_be_asked_through_a_proxy_of_the_environment(port, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
    assert fetch_http("http://layerflow.example:9464") == {"asked": "http://layerflow.example:9464/status"}


def test_a_server_that_is_not_there_is_told():
    with HeldPort() as nobody, pytest.raises(SessionError, match="no answer"):
        fetch_http(nobody.url)


def test_a_port_that_speaks_another_language_is_told():
    """The control socket's, say."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(1000)
                client.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(SessionError, match="no answer"):
            fetch_http(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
