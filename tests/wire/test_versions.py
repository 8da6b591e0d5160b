"""Two versions of the protocol: what the next one may change, and how its ends greet each other."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import msgspec
import pytest

from layerflow.errors import InvalidTransition, ProtocolError, VersionMismatch
from layerflow.wire import codec
from layerflow.wire import messages as wire
from layerflow.wire.client_connection import ClientConnection, ClientState

PREDECESSOR = codec.PROTOCOL_VERSION - 1
SCHEMA = Path(__file__).parent / "schemas" / f"{PREDECESSOR}.txt"
HELLO = wire.Hello("engine", "control", 1)


def shapes(schema: str) -> dict[str, tuple[str, list[str]]]:
    """By message: its number, and its fields with their types."""
    found = {}
    for line in schema.splitlines():
        number, name, fields = re.fullmatch(r"(\S+) (\w+)\((.*)\)", line).groups()
        found[name] = number, re.findall(r"\w+: [^:]+(?=, \w+:|$)", fields)
    return found


def test_what_the_version_before_has_is_written_down() -> None:
    digest = hashlib.blake2b(SCHEMA.read_text().rstrip("\n").encode(), digest_size=16, person=b"layerflow-wire")
    assert digest.digest() == codec.PREDECESSOR


def test_a_version_only_adds_to_the_one_before() -> None:
    before, after = shapes(SCHEMA.read_text()), shapes(codec.schema())
    for name, (number, fields) in before.items():
        number_now, fields_now = after[name]
        assert (number_now, fields_now[: len(fields)]) == (number, fields), f"{name} is not what it was"
        added = msgspec.structs.fields(getattr(wire, name))[len(fields) :]
        assert not any(field.required for field in added), f"{name} has new fields without a default"
    for name in after.keys() - before.keys():
        needed = getattr(wire, name).needs_version
        assert needed == codec.PROTOCOL_VERSION or after[name][0] == "-", f"{name} needs a newer server"
    numbers = [number for number, _ in before.values() if number != "-"]
    assert not {after[name][0] for name in after.keys() - before.keys()} & set(numbers)


def test_a_server_of_the_version_before_is_greeted_again_in_its_own() -> None:
    protocol = ClientConnection(HELLO)
    assert codec.check_greeting(protocol.greeting) == codec.PROTOCOL_VERSION
    older = codec.greeting(PREDECESSOR)
    assert protocol.greeted(older) == older
    refused = codec.encode(wire.Problem(-1, wire.VERSION, "the other end speaks something else"))
    assert protocol.greeted(refused) == b""
    assert codec.decode_request(protocol.greeted(older)) == HELLO
    assert (protocol.state, protocol.version) == (ClientState.HELLO, PREDECESSOR)


def test_a_server_that_changes_its_mind_is_no_server() -> None:
    for frame in (codec.encode(wire.Beat(1.0)), codec.encode(wire.Problem(-1, wire.STRANGER, "?")), b"", b"LFLW"):
        protocol = ClientConnection(HELLO)
        protocol.greeted(codec.greeting(PREDECESSOR))
        with pytest.raises(ProtocolError):
            protocol.greeted(frame)
        assert protocol.state is ClientState.CLOSED


def test_versions_that_are_further_apart_are_told_both() -> None:
    further = codec.MAGIC + (7).to_bytes(2, "little") + bytes(18)
    with pytest.raises(
        VersionMismatch, match=rf"protocol 7/00000000, this end {codec.PROTOCOL_VERSION}/.* at most one"
    ):
        codec.check_greeting(further)
    with pytest.raises(VersionMismatch):
        ClientConnection(HELLO).greeted(further)


def test_a_server_that_wavers_is_left() -> None:
    """It could keep a client greeting for ever."""
    older, refused = codec.greeting(PREDECESSOR), codec.encode(wire.Problem(-1, wire.VERSION, "no"))
    for second in ([codec.greeting()], [refused, codec.greeting()], [refused, refused]):
        protocol = ClientConnection(HELLO)
        assert protocol.greeted(older) == older
        assert [protocol.greeted(frame) for frame in second[:-1]] == [b""] * (len(second) - 1)
        with pytest.raises(ProtocolError):
            protocol.greeted(second[-1])
        assert protocol.state is ClientState.CLOSED


def test_nobody_is_greeted_twice() -> None:
    protocol = ClientConnection(HELLO)
    protocol.greeted(codec.greeting())
    with pytest.raises(InvalidTransition, match="greeted"):
        protocol.greeted(codec.greeting())
