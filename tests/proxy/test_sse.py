"""Events are found whatever pieces the network makes of a stream."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerflow.errors import UpstreamError
from layerflow.proxy.answers import DONE, Event, EventParser, make_event

LINES = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=20)


@given(
    st.lists(st.tuples(st.lists(LINES, min_size=1, max_size=3), st.sampled_from(["\n", "\r\n", "\r"])), max_size=8),
    st.lists(st.integers(1, 9), min_size=1),
)
def test_cuts_change_nothing(events, cuts):
    stream = b"".join("".join(f"data: {line}{end}" for line in lines).encode() + end.encode() for lines, end in events)
    parser, found, at = EventParser(10_000), [], 0
    number = 0
    while at < len(stream):
        size = cuts[number % len(cuts)]
        found += parser.feed(stream[at : at + size])
        at, number = at + size, number + 1
    assert [event.data for event in found] == ["\n".join(lines).encode() for lines, _ in events]
    assert parser.unfinished == b""


def test_engines_events_pass_byte_by_byte_as_they_came():
    stream = b'data: {"a": 1}\n\n: a comment\n\nevent: x\ndata: 1\ndata:2\n\ndata: [DONE]\n\n'
    found = EventParser(100).feed(stream)
    assert b"".join(event.raw for event in found) == stream
    assert [event.data for event in found] == [b'{"a": 1}', None, b"1\n2", DONE]


def test_what_is_not_complete_is_kept_and_told():
    parser = EventParser(100)
    assert parser.feed(b"data: 1\n") == []
    assert parser.unfinished == b"data: 1"
    assert parser.feed(b"\ndata") == [Event(b"data: 1\n\n", b"1")]
    assert parser.unfinished == b"data"


def test_an_event_without_an_end_is_refused():
    parser = EventParser(100)
    with pytest.raises(UpstreamError, match="more than 100 bytes"):
        for _ in range(20):
            parser.feed(b"data: 1234")


def test_a_made_event_is_one():
    assert EventParser(100).feed(make_event(b"{}").raw) == [make_event(b"{}")]
