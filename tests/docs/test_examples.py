"""The examples run as they are."""

import os
import re
import runpy
import subprocess
import sys

import pytest
from pages import ROOT

from layerflow import EmbeddedServer, Settings
from layerflow.wire import codec

EXAMPLES = ROOT / "examples"


def test_embedded_saves_and_loads_the_same_bytes():
    done = subprocess.run(
        [sys.executable, EXAMPLES / "embedded.py"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "loaded 299 tokens" in done.stdout


@pytest.fixture(scope="module")
def server():
    # The client does not beat: a server that is less patient loses it where the machine is busy.
    with EmbeddedServer(Settings(pool={"size": "1MiB"}, server={"liveness_ms": 60_000})) as server:
        yield server


class TestRawClient:
    source = (EXAMPLES / "raw_protocol_client.py").read_text()
    names = runpy.run_path(str(EXAMPLES / "raw_protocol_client.py"))

    def test_without_an_endpoint_it_says_how_it_is_called(self, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["raw_protocol_client.py"])
        with pytest.raises(SystemExit, match=r"^usage: raw_protocol_client.py ENDPOINT"):
            self.names["main"]()

    @pytest.fixture
    def client(self, server, monkeypatch):
        monkeypatch.setitem(self.names["Client"].receive.__globals__, "TIMEOUT_MS", 60_000)
        client = self.names["Client"](server.endpoint, server.context)
        yield client
        client.socket.close()

    def test_it_knows_nothing_of_layerflow(self):
        assert not re.search(r"^\s*(import|from) layerflow", self.source, re.M)
        assert codec.greeting() == self.names["GREETING"]

    def test_it_greets_says_hello_and_reads_the_status(self, client):
        client.greet()
        number, session, *_, lease_ms, _ = client.hello("raw")
        assert (number, lease_ms) == (101, 10_000)
        status = client.status()
        assert [(s["session"], s["engine"]) for s in status["sessions"]] == [(session, "raw")]
        assert status["pool"]["objects"] == 0

    def test_without_a_greeting_it_is_refused(self, client):
        with pytest.raises(RuntimeError, match="refused, stranger"):
            client.hello()

    def test_another_fingerprint_is_refused_and_answered_with_the_servers(self, client):
        client.socket.send(self.names["GREETING"][:8] + bytes(16))
        assert client.receive() == codec.greeting()
        with pytest.raises(RuntimeError, match="refused, version"):
            client.ask([1, "raw", "example", 1], 101)
