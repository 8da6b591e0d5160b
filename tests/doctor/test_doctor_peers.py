"""What the doctor says of peers: real servers, right and wrong keys, links that are there and that are not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq
from e2e.known import PATIENCE_S, eventually

from layerflow.agent.observer import fetch_status
from layerflow.config.settings import Settings
from layerflow.doctor import Finding, Severity, peers
from layerflow.doctor.peers import examine_peers
from layerflow.links import LinkPlugin, links
from layerflow_cli.bench.harness import ServerProcess
from layerflow_testing.ports import held_ports


@dataclass
class Owner:
    """A server that lends its arena over tcp, and the keys of one that may read."""

    server: ServerProcess
    address: str
    public: str
    reader_key: Path

    def said(self, **changed: object) -> list[Finding]:
        """Of a configuration that reads from it."""
        peer = {"name": "owner", "address": self.address, "server_key": self.public} | changed
        return list(
            examine_peers(Settings(server={"curve_secret_key_file": self.reader_key}, peers={"attach": [peer]}), None)
        )


def key_file(folder: Path, name: str) -> tuple[Path, str]:
    public, secret = zmq.curve_keypair()
    path = folder / name
    path.write_text(secret.decode())
    path.chmod(0o600)
    return path, public.decode()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    (own, public), (reader_key, reader_public) = key_file(tmp_path, "own"), key_file(tmp_path, "reader")
    (tmp_path / "allowed").write_text(f"{reader_public}\n")
    [port] = held_ports(1)
    address = f"tcp://127.0.0.1:{port}"
    settings = {"server.tcp_endpoint": address, "server.curve_secret_key_file": own, "peers.serve": "true"}
    settings |= {"server.curve_allowed_keys_file": tmp_path / "allowed", "pool.size": "8MiB", "pool.warm": "false"}
    server = ServerProcess(settings)
    assert eventually(lambda: fetch_status(server.endpoint, PATIENCE_S)["peers"]["lends"]["endpoints"])
    yield Owner(server, address, public, reader_key)
    server.close()


def problems(found: list[Finding]) -> list[str]:
    return [finding.found for finding in found if finding.state is Severity.PROBLEM]


def test_a_peer_that_answers_is_named_with_version_and_exporter(owner: Owner) -> None:
    found = owner.said()
    assert not problems(found), found
    told = " / ".join(finding.found for finding in found)
    assert "incarnation" in told and "its exporter answers at 127.0.0.1:" in told


def test_a_key_that_is_not_allowed_is_named(owner: Owner, tmp_path: Path) -> None:
    other, public = key_file(tmp_path, "other")
    peer = {"name": "owner", "address": owner.address, "server_key": owner.public}
    settings = Settings(server={"curve_secret_key_file": other}, peers={"attach": [peer]})
    (why,) = problems(list(examine_peers(settings, None)))
    assert "allow-list" in why and public in why


def test_a_wrong_server_key_is_told(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ANSWER_MS", 1000)  # nothing ever answers
    (why,) = problems(owner.said(server_key=zmq.curve_keypair()[0].decode()))
    assert "is server_key its public key?" in why


def test_nobody_there_is_told(owner: Owner, closed_port: int) -> None:
    (why,) = problems(owner.said(address=f"tcp://127.0.0.1:{closed_port}"))
    assert "cannot connect" in why


def test_links_that_differ_are_told(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(links()) | {"other": LinkPlugin(reader="", lender="")}
    for module in ("config.peers", "config.settings", "doctor.peers"):
        monkeypatch.setattr(f"layerflow.{module}.links", lambda: known)
    monkeypatch.setattr("layerflow.config.peers.link_names", lambda: tuple(known))
    peer = {"name": "owner", "address": owner.address, "server_key": owner.public}
    settings = Settings(server={"curve_secret_key_file": owner.reader_key}, peers={"attach": [peer], "link": "other"})
    (why,) = problems(list(examine_peers(settings, None)))
    assert "it lends over tcp; peers.link here is other" in why


def test_a_library_that_is_missing_is_told_and_trust_is_recalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerflow.findings.has_module", lambda name: False)
    settings = Settings(peers={"serve": True, "link": "nixl", "trusted_network": True})
    found = list(examine_peers(settings, None))
    assert problems(found) == ["nixl is not installed"]
    assert any("trusted_network" in finding.found for finding in found if finding.state is Severity.WARNING)


def test_a_running_server_tells_of_its_peers(owner: Owner) -> None:
    status = fetch_status(owner.server.endpoint, PATIENCE_S)
    settings = Settings(peers={"serve": True})
    found = list(examine_peers(settings, status))
    assert any("tcp://127.0.0.1:" in finding.found for finding in found), json.dumps(status["peers"])
