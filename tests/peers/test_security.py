"""Servers that read from each other over tcp: CURVE, and only keys on the allow-list."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from e2e.known import eventually

from layerflow.config.settings import Settings
from layerflow.errors import ConfigError
from layerflow.links import links
from layerflow_cli.bench.harness import ServerProcess
from layerflow_testing.ports import held_ports
from peers.conftest import Pair


def keys(folder: Path, name: str) -> tuple[Path, str]:
    """A secret key file, and the public key."""
    public, secret = zmq.curve_keypair()
    path = folder / f"{name}.key"
    path.write_text(secret.decode())
    path.chmod(0o600)
    return path, public.decode()


@pytest.mark.parametrize("allowed", [True, False])
def test_a_reader_needs_a_key_on_the_allow_list(pair: Callable[..., Pair], tmp_path: Path, allowed: bool) -> None:
    (own, public), (reader_key, reader_public) = keys(tmp_path, "owner"), keys(tmp_path, "reader")
    allow = tmp_path / "allowed"
    allow.write_text(f"{reader_public if allowed else public}\n")
    [port] = held_ports(1)
    tcp = f"tcp://127.0.0.1:{port}"
    attach = json.dumps([{"name": "owner", "address": tcp, "server_key": public}])
    owner = {
        "server.tcp_endpoint": tcp,
        "server.curve_secret_key_file": own,
        "server.curve_allowed_keys_file": allow,
    }
    reader = {"server.curve_secret_key_file": reader_key, "peers.attach": attach}
    if not allowed:
        made = Pair(owner, reader)
        try:
            assert eventually(lambda: made.reads["peers"][0]["attempts"] > 1)
            assert "allow-list" in made.reads["peers"][0]["reason"] and not made.lends["who"]
        finally:
            made.close()
        return
    two = pair(owner, reader)
    assert two.lends["who"][0]["door"] == "tcp"
    with two.workers() as (p, d):
        chain = p.prompt(100)
        p.serve(chain)
        assert d.serve(d.agent.chain(chain.tokens)).hit.tokens == 99
    assert eventually(two.settled)


@pytest.mark.parametrize(
    ("peer", "wrong"),
    [
        ({"name": "a", "address": "tcp://h:1"}, "needs its server_key"),
        ({"name": "a", "address": "http://h:1"}, "should be"),
        ({"name": "a", "address": "tcp://h:1", "server_key": "short"}, "40 Z85 characters"),
    ],
)
def test_what_is_not_secure_or_not_there_is_refused(peer: dict[str, str], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        Settings(peers={"attach": [peer]})


def test_a_tcp_peer_needs_a_key_of_ones_own() -> None:
    public = zmq.curve_keypair()[0].decode()
    attach = json.dumps([{"name": "a", "address": "tcp://127.0.0.1:1", "server_key": public}])
    with pytest.raises(Exception, match="ended with code"):
        ServerProcess({"peers.attach": attach})


@pytest.mark.parametrize("link", [name for name, plugin in links().items() if plugin.trusts_network])
@pytest.mark.parametrize("side", [{"serve": True}, {"learn": True}, {"attach": [{"name": "a", "address": "ipc:///a"}]}])
def test_a_link_that_knows_no_keys_is_off_until_its_network_is_trusted(link: str, side: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="trusted_network"):
        Settings(peers={"link": link} | side)
    assert Settings(peers={"link": link, "trusted_network": True} | side).peers.link == link


def test_a_link_that_copies_through_the_descriptor_is_refused_with_huge_pages() -> None:
    with pytest.raises(ConfigError, match="hugepages"):
        Settings(peers={"link": "nixl", "trusted_network": True, "serve": True}, pool={"hugepages": True})


def test_a_link_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="there are mooncake, nixl, tcp"):
        Settings(peers={"link": "pigeon"})
