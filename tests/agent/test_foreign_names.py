"""Names that come from elsewhere (a request's id may be its client's) cost no other request of a step anything."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerflow import Agent, EmbeddedServer, GroupSpec, ModelSpec, Plane, Settings, StepRequest
from layerflow.errors import ProtocolError
from layerflow.wire import codec
from layerflow.wire import messages as wire
from layerflow.wire.messages import MAX_NAME, MAX_PARTS

LAYERS, BLOCKS, SIZE = 2, 64, 16
PLANES = (Plane("k", "float16", (2, 64)), Plane("v", "float16", (2, 64)))
SPEC = ModelSpec(
    "example", content="w", groups=(GroupSpec("full", SIZE, tuple(range(LAYERS)), PLANES),), attention="example/NHD"
)
PROMPT = list(range(256))


@pytest.fixture
def agent() -> Iterator[Agent]:
    tensors = {
        layer: {plane.name: torch.randn(BLOCKS, SIZE, 2, 64).half() for plane in PLANES} for layer in range(LAYERS)
    }
    with (
        EmbeddedServer(Settings(pool={"size": "64MiB", "warm": False})) as server,
        Agent(server.endpoint, SPEC, tensors, context=server.context, lookup_timeout_s=20) as made,
    ):
        assert made.wait_attached(20)
        yield made


def run(agent: Agent, requests: list[StepRequest]) -> bool:
    """Did every layer come?"""
    with agent.open_step(requests, 60) as step:
        ready = True
        for layer in range(LAYERS):
            ready &= bool(step.wait_layer(layer))
            step.layer_done(layer)
    assert all(agent.wait_idle(request.request, 20) for request in requests)
    return ready


def blocks(first: int) -> tuple[np.ndarray]:
    return (np.arange(first, first + 16, dtype=np.int64),)


@pytest.mark.parametrize("name", ["plain", "x" * 5000, "é" * 1025])
def test_a_neighbour_s_name_costs_nothing(agent: Agent, name: str) -> None:
    first, second, third = (agent.chain([token + 1000 * number for token in PROMPT]) for number in range(3))
    assert run(agent, [StepRequest("first", first, blocks(0), save=(0, 256))])
    hit = agent.lookup("again", first)
    step = [
        StepRequest("again", first, blocks(16), load=(0, hit.tokens), hit=hit),
        StepRequest("neighbour", second, blocks(32), save=(0, 256)),
        StepRequest(name, third, blocks(48), save=(0, 256)),
    ]
    assert run(agent, step)
    for prompt in (second, third):
        assert agent.lookup("later", agent.chain([*prompt.tokens, 1])).tokens == 256
    found = agent.lookup(name, third)
    assert found.tokens > 0, "its own lookups, too"
    agent.drop_lease(name)
    agent.abort(name)
    assert agent.attached


names = st.text(st.characters(exclude_categories=()), max_size=40) | st.builds(
    str.__mul__, st.text(st.characters(exclude_categories=()), min_size=1, max_size=3), st.integers(300, 2000)
)


@given(names, names)
def test_any_name_can_be_sent_and_is_told_apart(one: str, other: str) -> None:
    for name in (one, other):
        sent = wire.Lookup(1, name, bytes(16), b"", 5, 1000, b"", handoff=name, follow_ms=1)
        heard = codec.decode_request(codec.encode_request(sent))
        assert isinstance(heard, wire.Lookup)
        assert heard.request == heard.handoff == codec.short_name(name)
        assert len(heard.request) <= MAX_NAME
        step = wire.OpenStep(1, 1.0, 1.0, [wire.LoadPart(name, 0, b"", b"", 0, b"")], [])
        assert isinstance(codec.decode_request(codec.encode_request(step)), wire.OpenStep)
        assert codec.decode_request(codec.encode_request(wire.Abort(["a", name])))
    assert (codec.short_name(one) == codec.short_name(other)) == (one == other)


def test_a_message_with_too_many_parts_is_its_sender_s_error() -> None:
    part = wire.LoadPart("r", 0, b"", b"", 0, b"")
    with pytest.raises(ProtocolError, match="do less in one step"):
        codec.encode_request(wire.OpenStep(1, 1.0, 1.0, [part] * (MAX_PARTS + 1), []))


def test_a_refusal_names_its_step(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a server refuses what an agent may send all the same, the step ends at once, not at its deadline."""
    monkeypatch.setattr(codec, "encode_request", codec.encode)
    chain = agent.chain(PROMPT)
    assert run(agent, [StepRequest("x" * 5000, chain, blocks(0), save=(0, 256))])


@pytest.mark.parametrize(
    ("frame", "number"),
    [
        (codec.encode(wire.StatusRequest(7)), 7),
        (codec.encode(wire.OpenStep(9, 1.0, 1.0, [], [])), 9),
        (codec.encode(wire.StatusRequest((1 << 64) - 1)), (1 << 64) - 1),
        (codec.encode(wire.Abort(["r"])), -1),
        (b"\x92\x04\xff", -1),
        (b"\xc1", -1),
        (b"\x91" * 5000, -1),
    ],
)
def test_what_is_refused_unread_is_told_by_its_number(frame: bytes, number: int) -> None:
    assert codec.number_of(frame) == number


@pytest.mark.parametrize("value", [b"\x90", b"\x80", b"\xa0"])
def test_what_is_refused_unread_is_not_built_for_its_number(value: bytes) -> None:
    """A client's frame of a million empty lists is a hundred times as large as Python's objects."""
    [kind] = msgspec.msgpack.encode(wire.OpenStep.__struct_config__.tag)
    frame = b"\xdd" + (1 << 20).to_bytes(4, "big") + bytes((kind, 9)) + value * ((1 << 20) - 2)
    tracemalloc.start()
    try:
        assert codec.number_of(frame) == 9
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()
