"""Who may say what: roles of keys, and what a client at another host can do to engines of this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
import zmq
from e2e.known import PATIENCE_S, KnownWorker, eventually, small_spec
from structlog.testing import capture_logs

from layerflow.agent import Control
from layerflow.agent.handshake import ClientKeys, Handshake, dial
from layerflow.errors import ConfigError, RemoteError
from layerflow.keys import Chain, root_digest
from layerflow.server import EmbeddedServer
from layerflow.server.transport.security import read_allowed
from layerflow.wire import messages as wire
from layerflow.wire.rights import HERE, NEEDED, Role, parse_rights
from server.support import worker_on

SPEC, TOKENS = small_spec(2), list(range(100))
ROOT = root_digest(SPEC.fingerprint)
CHAIN = Chain(ROOT, TOKENS, SPEC.chunk_tokens)
DIGESTS, TAIL = b"".join(CHAIN.digests), CHAIN.tail
KEY = "k" * 40


def test_every_message_asks_for_a_role_or_says_that_it_asks_for_none() -> None:
    assert set(NEEDED) == set(get_args(wire.ToServer))


def test_clients_of_this_machine_may_say_everything() -> None:
    assert set(Role) == HERE.roles and HERE.acts_for("any engine") and HERE.name_of("vllm-0") == "vllm-0"


@pytest.mark.parametrize(
    ("words", "roles"),
    [
        (["look"], {Role.LOOK}),
        (["read"], {Role.READ}),
        (["peer", "look"], {Role.READ, Role.PEER, Role.LOOK}),
        (["act=vllm-0"], {Role.LOOK, Role.ACT}),
    ],
)
def test_roles_include_others(words: list[str], roles: set[Role]) -> None:
    assert parse_rights(words, KEY).roles == roles


def test_a_key_acts_for_the_engines_that_the_list_names() -> None:
    rights = parse_rights(["act=vllm-0", "act=prefill-*"], KEY)
    assert rights.acts_for("vllm-0") and rights.acts_for("prefill-17") and not rights.acts_for("vllm-1")
    assert rights.name_of("vllm-0") == "vllm-0"
    assert rights.name_of("vllm-1") == "vllm-1@kkkkkkkk", "what it leases is no lease of the engine of that name"


@pytest.mark.parametrize("word", ["admin", "act", "act=", "look=vllm-0", "LOOK", "local"])
def test_what_is_no_role(tmp_path: Path, word: str) -> None:
    (tmp_path / "keys").write_text(f"{KEY} look\n{KEY} {word}\n")
    with pytest.raises(ConfigError, match=r"line 2.*is no role"):
        read_allowed(tmp_path / "keys")


def test_a_key_without_roles_reads_as_before_and_is_warned_of(tmp_path: Path) -> None:
    other = "j" * 40
    (tmp_path / "keys").write_text(f"{KEY}  # p0\n{other} read # act=vllm-0\n{other} act=vllm-1\n")
    with capture_logs() as logs:
        found = read_allowed(tmp_path / "keys")
    assert found[KEY.encode()].roles == {Role.LOOK, Role.READ, Role.PEER}
    assert found[other.encode()].roles == {Role.READ, Role.ACT, Role.LOOK}
    assert found[other.encode()].engines == ("vllm-1",)
    [warned] = [entry for entry in logs if entry["event"] == "curve_keys_without_roles"]
    assert warned["keys"] == ["k" * 8]


class Doors:
    """A server with an engine "vllm-0" of this machine, and keys of clients at other hosts."""

    def __init__(self, embed: Callable[..., EmbeddedServer], folder: Path, **roles: str) -> None:
        public, secret = zmq.curve_keypair()
        pairs = {name: zmq.curve_keypair() for name in roles}
        (folder / "secret").write_bytes(secret)
        (folder / "allowed").write_text("".join(f"{pairs[n][0].decode()} {words}\n" for n, words in roles.items()))
        self.server = embed(
            server__tcp_endpoint="tcp://127.0.0.1:*",
            server__curve_secret_key_file=folder / "secret",
            server__curve_allowed_keys_file=folder / "allowed",
            peers__serve=True,
        )
        self._keys = {name: ClientKeys(public, *pair) for name, pair in pairs.items()}
        self._open: list[zmq.Socket[bytes]] = []
        self.worker: KnownWorker = worker_on(self.server, spec=SPEC, engine="vllm-0")
        self.worker.serve(self.worker.agent.chain(TOKENS))

    def dialled(self, name: str) -> Handshake:
        dealer = dial(self.server.context, self.server.endpoints[1], self._keys[name])
        self._open.append(dealer)
        return Handshake(dealer)

    def attached(self, name: str, engine: str = "vllm-0") -> Handshake:
        """A client of that key that calls itself `engine`."""
        client = self.dialled(name)
        client.introduce(engine, "test", soon())
        client.attach(wire.Attach(SPEC, memory=False), soon())
        return client

    def public(self, name: str) -> str:
        return self._keys[name].public.decode()

    def pinned(self) -> int:
        return int(self.server.call(lambda: self.server.server.pool.statistics().pinned))  # type: ignore[call-overload]

    def handoff(self, name: str) -> str:
        found = self.server.call(lambda: self.server.server.handoffs.get(name))
        return found.story() if found is not None else "unknown"  # type: ignore[attr-defined]

    def close(self) -> None:
        self.worker.agent.close()
        for each in self._open:
            each.close(linger=0)


@pytest.fixture
def doors(embed: Callable[..., EmbeddedServer], tmp_path: Path) -> Iterator[Doors]:
    it = Doors(embed, tmp_path, looks="look", reads="read", peers="peer", acts="act=vllm-0", other="act=vllm-1")
    yield it
    it.close()


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def lookup(number: int, request: str = "r", **more: object) -> wire.Lookup:
    return wire.Lookup(number, request, ROOT, DIGESTS, len(TOKENS), 60_000, TAIL, **more)  # type: ignore[arg-type]


def opening(number: int, name: str) -> wire.OpenHandoff:
    return wire.OpenHandoff(number, name, ROOT, DIGESTS, len(TOKENS), TAIL, 0, 60_000)


STATE_CHANGES = [
    wire.Reset(1),
    wire.Purge(1),
    opening(1, "mine"),
    wire.EndHandoff("theirs", 0, "because I can"),
    wire.ReleaseHandoff("theirs"),
    wire.WatchHandoff(1, "theirs", 1000),
    lookup(1, handoff="theirs", follow_ms=1000),
    lookup(1, servers=["tcp://127.0.0.1:1"]),
]


@pytest.mark.parametrize("who", ["looks", "other"])
def test_who_looks_changes_no_engines_state(doors: Doors, who: str) -> None:
    owner = doors.attached("acts")
    owner.send(opening(5, "theirs"))
    assert owner.expect(wire.HandoffState, soon(), 5).state in ("open", "complete")  # type: ignore[union-attr]
    before = doors.handoff("theirs")
    client = doors.attached(who)
    for number, message in enumerate(STATE_CHANGES, 2):
        client.send(message)
        with pytest.raises(RemoteError, match=rf"{type(message).__name__}.*(role act=|this machine)"):
            client.expect(wire.Status, soon())
        assert doors.handoff("theirs") == before and doors.handoff("mine") == "unknown", message
        client.send(wire.StatusRequest(number))
        assert client.expect(wire.Status, soon(), number)


def test_who_looks_gets_a_lease_of_its_own_and_no_plan(doors: Doors) -> None:
    local, client = doors.attached("acts"), doors.attached("looks")
    for each, plan in ((local, True), (client, False)):
        each.send(lookup(1))
        found = each.expect(wire.Found, soon(), 1)
        assert found.tokens and (found.plan > 0) == plan  # type: ignore[union-attr]
    # Of the same request and the same engine's name: each has its own.
    client.send(wire.DropLease("r"))
    client.send(wire.StatusRequest(2))
    client.expect(wire.Status, soon(), 2)
    assert doors.pinned() > 0
    local.send(wire.DropLease("r"))
    assert eventually(lambda: doors.pinned() == 0)


def test_a_key_that_acts_for_an_engine_resets_it_and_hands_its_prompts_over(doors: Doors) -> None:
    client = doors.attached("acts")
    client.send(opening(1, "xfer"))
    assert client.expect(wire.HandoffState, soon(), 1).state in ("open", "complete")  # type: ignore[union-attr]
    client.send(wire.Reset(2))
    assert client.expect(wire.Status, soon(), 2)
    client.send(wire.Purge(3))
    with pytest.raises(RemoteError, match="local_only"):
        client.expect(wire.Status, soon(), 3)


@pytest.mark.parametrize("who", ["acts", "peers"])
def test_what_a_hand_off_keeps_is_counted_for_the_key_that_opens_it(doors: Doors, who: str) -> None:
    if who == "acts":
        client = doors.attached("acts")
        client.send(opening(1, "xfer"))
    else:
        client = doors.dialled("peers")
        client.greet(PEER_HELLO, soon())
        welcome = client.expect(wire.PeerWelcome, soon())
        assert isinstance(welcome, wire.PeerWelcome)
        asked = wire.PeerOpenHandoff(
            1, welcome.incarnation, "vllm-0", "xfer", ROOT, DIGESTS, len(TOKENS), TAIL, 0, 60_000
        )
        client.send(asked)
    assert eventually(lambda: doors.handoff("xfer") == "open")
    handoffs = doors.server.server.handoffs
    record = doors.server.call(lambda: handoffs.get("xfer"))
    assert record is not None and record.key == doors.public(who)
    with contextlib.closing(Control(doors.server.endpoint, "vllm-0", SPEC, context=doors.server.context)) as control:
        assert control.open_handoff("mine", CHAIN, len(CHAIN)).state == "open"
    mine = doors.server.call(lambda: handoffs.get("mine"))
    assert mine is not None and mine.key == ""


def test_a_key_that_opens_many_clients_costs_no_other_key_s(doors: Doors) -> None:
    owner = doors.attached("acts")
    owner.send(opening(1, "theirs"))
    assert owner.expect(wire.HandoffState, soon(), 1).state == "open"  # type: ignore[union-attr]
    server = doors.server.server
    settings = server.settings.server.model_copy(update={"max_clients": 4})
    doors.server.call(lambda: setattr(server, "settings", server.settings.model_copy(update={"server": settings})))
    greedy = [doors.attached("looks", f"greedy-{number}") for number in range(6)]
    for ended in greedy[:3]:
        with pytest.raises(RemoteError, match=r"server.max_clients = 4.*the key or process with most of them"):
            ended.expect(wire.Status, soon())
    owner.send(wire.StatusRequest(2))
    assert owner.expect(wire.Status, soon(), 2), "it was silent longest, and its key has one client"
    assert doors.handoff("theirs") == "open"


PEER_HELLO = wire.PeerHello("test", b"r" * 16, 1)


@pytest.mark.parametrize("who", ["acts", "other"])
def test_chunks_are_told_to_who_acts_for_an_engine_that_runs_their_model_here(doors: Doors, who: str) -> None:
    here = Control(doors.server.endpoint, "vllm-0", SPEC, context=doors.server.context)
    mine = wire.ChunkDescription(CHAIN.digests[0], b"", bytes(4 * SPEC.chunk_tokens), b"a tenant's salt")
    here.describe_chunks([mine])
    client = doors.attached(who, {"acts": "vllm-0", "other": "vllm-1"}[who])
    forged = wire.ChunkDescription(CHAIN.digests[1], b"", bytes(4 * SPEC.chunk_tokens), b"forged")
    try:
        client.send(wire.ReadChunks(5))
        if who == "acts":
            told = client.expect(wire.ChunkChanges, soon(), 5)
            assert [each.extra for each in told.chunks] == [mine.extra]
            return
        with pytest.raises(RemoteError, match="no worker of an engine that key"):
            client.expect(wire.ChunkChanges, soon(), 5)
        client.send(wire.DescribeChunks([forged]))
        client.send(wire.StatusRequest(6))
        with pytest.raises(RemoteError, match="no worker of an engine that key"):
            client.expect(wire.Status, soon(), 6)
        assert [each.extra for each in here.read_chunks().chunks] == [mine.extra]
    finally:
        here.close()


@pytest.mark.parametrize(("who", "may"), [("looks", False), ("acts", False), ("reads", True), ("peers", True)])
def test_who_may_read_the_arena(doors: Doors, who: str, may: bool) -> None:
    client = doors.dialled(who)
    client.greet(PEER_HELLO, soon())
    if may:
        assert client.expect(wire.PeerWelcome, soon())
    else:
        with pytest.raises(RemoteError, match=r"not_allowed.*role read"):
            client.expect(wire.PeerWelcome, soon())


@pytest.mark.parametrize(("who", "may"), [("reads", False), ("peers", True)])
def test_who_may_release_what_is_kept_for_hand_offs(doors: Doors, who: str, may: bool) -> None:
    owner = doors.attached("acts")
    owner.send(opening(5, "theirs"))
    owner.expect(wire.HandoffState, soon(), 5)
    client = doors.dialled(who)
    client.greet(PEER_HELLO, soon())
    client.expect(wire.PeerWelcome, soon())
    client.send(wire.PeerReleaseHandoff("theirs"))
    if may:
        assert eventually(lambda: doors.handoff("theirs").startswith("released"))
    else:
        with pytest.raises(RemoteError, match="role peer"):
            client.expect(wire.PeerFound, soon())
        assert not doors.handoff("theirs").startswith("released")


def test_a_reader_introduces_itself_as_no_client(doors: Doors) -> None:
    client = doors.dialled("reads")
    with pytest.raises(RemoteError, match=r"not_allowed.*role look"):
        client.introduce("vllm-0", "test", soon())
