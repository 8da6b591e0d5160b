"""Peers: is the link there and allowed, is the exporter's port free, does each peer answer to this server's key?

A peer is asked as a server that reads would ask it, up to the greeting of its exporter; nothing is leased.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from typing import Any

import zmq

from layerflow import findings
from layerflow._version import __version__
from layerflow.config.peers import PeerAddress
from layerflow.config.settings import Settings
from layerflow.errors import ConfigError, LayerflowError, VersionMismatch
from layerflow.findings import Finding, ok, problem, warning
from layerflow.hosts.peer.link import LinkFailed, greeted
from layerflow.links import links
from layerflow.server.transport.security import read_keys
from layerflow.wire import codec
from layerflow.wire import messages as wire
from layerflow.wire.client_connection import ClientConnection, ClientState

ANSWER_MS = 2000


def examine_peers(settings: Settings, running: dict[str, Any] | None) -> Iterator[Finding]:
    """Nothing where the configuration neither lends nor reads.

    :param running: status of the server that runs with it; None = none does.
    """
    if not settings.peers.used:
        return
    yield from _link(settings)
    if settings.peers.serve:
        yield _exporter(settings, running)
    seen = ((running or {}).get("peers") or {}).get("reads") or {}
    states = {row["address"]: row for row in seen.get("peers", [])}
    for peer in settings.peers.attach:
        yield from _peer(settings, peer, states.get(peer.address))


def _link(settings: Settings) -> Iterator[Finding]:
    name = settings.peers.link
    plugin, check = links()[name], f"link {name}"
    if plugin.library:
        found = findings.installed(plugin.package) or ""
        if not findings.has_module(plugin.library):
            yield problem(check, f"{plugin.library} is not installed", f"pip install '{plugin.package}' on both sides")
        elif why := findings.child(f"import {plugin.probe}"):
            yield problem(check, f"{plugin.probe} cannot be imported: {why}", "install what it lacks")
        elif found and findings.release(found) < findings.release(plugin.version):
            yield problem(
                check, f"{plugin.package} {found} is too old", f"pip install '{plugin.package}>={plugin.version}'"
            )
        else:
            yield ok(check, f"{plugin.package} {found}".rstrip())
    else:
        yield ok(check, "needs no library")
    if plugin.trusts_network:
        yield warning(
            check,
            "peers.trusted_network: whoever reaches its ports may read and write the window that bytes pass through",
            "keep those ports to a network that nobody else is on",
        )


def _exporter(settings: Settings, running: dict[str, Any] | None) -> Finding:
    check, given = "peers may read", settings.peers.link_address
    lends = ((running or {}).get("peers") or {}).get("lends")
    if lends:
        told = ", ".join(lends["endpoints"])
        if told:
            return ok(check, f"over {told}; {lends['readers']} servers do, {lends['leases']} leases")
        return problem(check, f"the exporter is {lends['exporter']['state']}: {lends['exporter']['reason']}",
                       "see the server's log")  # fmt: skip
    if not given or given.endswith(":0"):
        return ok(check, "the exporter takes any free port; open it to the readers, or set peers.link_address")
    host, _, port = given.rpartition(":")
    try:
        with socket.create_server((host.strip("[]"), int(port))):
            return ok(check, f"{given} is free")
    except OSError as error:
        return problem(check, f"{given}: {error.strerror or error}", "set peers.link_address to another one")


def _peer(settings: Settings, peer: PeerAddress, state: dict[str, Any] | None) -> Iterator[Finding]:
    check = f"peer {peer.name}"
    try:
        welcome = _greet(settings, peer)
    except (LayerflowError, OSError) as error:
        advice = "is it running with peers.serve = true, and is this its address?"
        if isinstance(error, VersionMismatch):
            advice = "upgrade one of them"
        yield problem(check, f"{peer.address}: {error}", advice)
        return
    offered = {one.link: one for one in welcome.endpoints}
    mine = settings.peers.link
    told = f"layerflow {welcome.version}, incarnation {welcome.incarnation.hex()[:8]}"
    yield ok(check, f"{told}, arena of {welcome.arena_bytes / (1 << 30):.1f} GiB at {peer.address}")
    if mine not in offered:
        lends = f"it lends over {', '.join(offered)}" if offered else "its exporter is not up"
        yield problem(check, f"{lends}; peers.link here is {mine}", "set the same peers.link at both ends")
        return
    where = offered[mine].address
    if where.startswith(":"):
        host = (
            peer.address.removeprefix("tcp://").rpartition(":")[0] if peer.address.startswith("tcp://") else "127.0.0.1"
        )
        where = host + where
    yield _link_greeted(check, where, offered[mine])
    if state is not None:
        seen = f"the running server has it {state['state']}, at {state['gbps'] or '?'} GB/s"
        differs = "; ".join(f"model {name}: {what}" for name, what in state["differs"].items())
        if state["state"] != "up" or differs:
            yield warning(check, f"{seen} {state['reason']} {differs}".rstrip(), "see docs/peers.md")
        else:
            yield ok(check, seen)


def _greet(settings: Settings, peer: PeerAddress) -> wire.PeerWelcome:
    """What the server answers to one that wants to read.

    :raises LayerflowError: why there is no answer.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        public = ""
        if peer.address.startswith("tcp://"):
            path = settings.server.curve_secret_key_file
            if path is None:
                raise ConfigError("tcp needs server.curve_secret_key_file, this server's own key")
            secret = read_keys(path)[0]
            public = zmq.curve_public(secret).decode()
            dealer.curve_serverkey, dealer.curve_secretkey = peer.server_key.encode(), secret
            dealer.curve_publickey = public.encode()
            _check_reachable(peer.address)
        with dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
            dealer.connect(peer.address)
            hello = wire.PeerHello("layerflow doctor", secrets.token_bytes(16), os.getpid(), __version__)
            protocol = ClientConnection(hello)
            dealer.send(protocol.greeting)
            try:
                while protocol.state is ClientState.GREETING:
                    if answer := protocol.greeted(_answer(dealer, monitor, public)):
                        dealer.send(answer)
                said = codec.decode_reply(_answer(dealer, monitor, public))
                dealer.send(codec.encode(wire.Bye()))
            finally:
                dealer.disable_monitor()
    if isinstance(said, wire.Problem):
        raise ConfigError(f"it refuses: {said.message}")
    if not isinstance(said, wire.PeerWelcome):
        raise ConfigError(f"it answers with {type(said).__name__}")
    return said


def _check_reachable(address: str) -> None:
    """:raises ConfigError: nobody listens there."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_MS / 1e3).close()
    except OSError as error:
        raise ConfigError(f"cannot connect: {error.strerror or error}") from None


def _answer(dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes], public: str) -> bytes:
    """:param public: this server's key.

    :raises ConfigError: there is none; says whose key is wrong where that can be known.
    """
    poller = zmq.Poller()
    poller.register(dealer, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    shaken = False
    while ready := dict(poller.poll(ANSWER_MS)):
        if dealer in ready:
            return dealer.recv()
        event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise ConfigError(f"this server's public key {public} is not on its allow-list")
        shaken = True
    why = "it says nothing" if shaken else "no handshake: is server_key its public key?"
    raise ConfigError(f"no answer for {ANSWER_MS / 1e3:g} s; {why}")


def _link_greeted(check: str, where: str, endpoint: wire.PeerEndpoint) -> Finding:
    """Does the exporter answer as the one that its server speaks of?"""
    try:
        greeted(where, endpoint.reader, endpoint.reader_key, time.monotonic() + ANSWER_MS / 1e3).close()
    except LinkFailed as error:
        advice = "open that port to this machine; see peers.link_address, and peers.link_advertise there"
        return problem(check, f"its exporter at {where}: {error}", advice)
    return ok(check, f"its exporter answers at {where}")
