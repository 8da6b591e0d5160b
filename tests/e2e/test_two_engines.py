"""Engine processes share what they cache, on one machine; others only look, over tcp with CURVE."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from e2e.children import Child, save_once, tokens_of
from e2e.known import KnownWorker, eventually, small_spec
from layerflow.agent import ClientKeys, Control
from layerflow.agent.handshake import Handshake, dial
from layerflow.errors import DeadlineExceeded, RemoteError
from layerflow.keys import Chain, root_digest
from layerflow.wire import messages as wire
from layerflow_cli.bench.harness import ServerProcess
from layerflow_testing.ports import held_ports

LAYERS, TOKENS, SEED = 4, 150, 77


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(*arguments: object) -> Child:
        children.append(Child(*arguments))
        return children[-1]

    yield start
    for process in children:
        process.close()


def test_one_engine_loads_what_another_has_saved(
    serve: Callable[..., ServerProcess], child: Callable[..., Child]
) -> None:
    server = serve()
    first = child(save_once, server.endpoint, LAYERS, TOKENS, SEED)
    hit, saved = first.hear()
    assert hit == 0 and len(saved) == 1
    with KnownWorker(server.endpoint, small_spec(LAYERS), engine="second") as second:
        assert second.serve(second.agent.chain(tokens_of(SEED, TOKENS))).hit.tokens == TOKENS - 1
        # Its objects outlive it.
        first.pipe.send("end")
        first.process.join(20)
        assert second.serve(second.agent.chain(tokens_of(SEED, TOKENS))).hit.tokens == TOKENS - 1
    # Another model's keys are its own, whatever the tokens.
    with KnownWorker(server.endpoint, small_spec(LAYERS, content="other"), engine="third") as third:
        assert third.serve(third.agent.chain(tokens_of(SEED, TOKENS))).hit.tokens == 0


@pytest.fixture
def curve(serve: Callable[..., ServerProcess], tmp_path: Path) -> tuple[ServerProcess, str, ClientKeys, ClientKeys]:
    """A server on tcp, its endpoint, the keys of an allowed client and those of a stranger."""
    public, secret = zmq.curve_keypair()
    allowed, stranger = zmq.curve_keypair(), zmq.curve_keypair()
    (tmp_path / "secret").write_bytes(secret + b"\n")
    (tmp_path / "allowed").write_bytes(b"# those who may\n" + allowed[0] + b"  # one\n")
    endpoint = f"tcp://127.0.0.1:{held_ports(1)[0]}"
    server = serve(
        server__tcp_endpoint=endpoint,
        server__curve_secret_key_file=tmp_path / "secret",
        server__curve_allowed_keys_file=tmp_path / "allowed",
    )
    return server, endpoint, ClientKeys(public, *allowed), ClientKeys(public, *stranger)


def test_tcp_with_an_allowed_key(curve: tuple[ServerProcess, str, ClientKeys, ClientKeys]) -> None:
    server, endpoint, allowed, _ = curve
    spec = small_spec(LAYERS)
    with KnownWorker(server.endpoint, spec) as worker:
        chain = worker.agent.chain(tokens_of(SEED, TOKENS))
        worker.serve(chain)
        control = Control(endpoint, "remote", spec, keys=allowed, lookup_timeout_s=5)
        assert control.status()["healthy"]
        same = Chain(root_digest(spec.fingerprint), tokens_of(SEED, TOKENS), spec.chunk_tokens)
        assert control.lookup("remote-request", same).tokens == TOKENS - 1
        assert control.status()["pool"]["pinned"] > 0
        control.drop_lease("remote-request")
        assert eventually(lambda: control.status()["pool"]["pinned"] == 0)
        control.close()


def test_memory_over_tcp_is_refused(curve: tuple[ServerProcess, str, ClientKeys, ClientKeys]) -> None:
    _, endpoint, allowed, _ = curve
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    conversation = Handshake(dial(context, endpoint, allowed))
    deadline = time.monotonic() + 10
    welcome = conversation.introduce("remote", "agent", deadline)
    assert welcome.fd_server == ""
    with pytest.raises(RemoteError, match=r"no_arena.*attach without memory"):
        conversation.attach(wire.Attach(small_spec(LAYERS), memory=True), deadline)
    # The refusal has changed nothing: without memory it may attach.
    assert conversation.attach(wire.Attach(small_spec(LAYERS), memory=False), deadline).arena_bytes == 0
    context.destroy(linger=0)


def test_tcp_with_a_strange_key_gets_nothing(curve: tuple[ServerProcess, str, ClientKeys, ClientKeys]) -> None:
    server, endpoint, allowed, stranger = curve
    observer = Control(server.endpoint, "observer")
    sessions = len(observer.status()["sessions"])
    for keys in (stranger, ClientKeys(stranger.public, allowed.public, allowed.secret)):
        control = Control(endpoint, "stranger", keys=keys)
        with pytest.raises(DeadlineExceeded):
            control.status(0.4)
        control.close()
    assert len(observer.status()["sessions"]) == sessions
    control = Control(endpoint, "remote", keys=allowed)
    assert control.status()["healthy"]
    control.close()
    observer.close()
