"""Qwen3.5: attention and recurrent states. A hit ends where a state was stored, at the end of a prompt or an answer."""

from __future__ import annotations

from engines import EXPECTED, Shape
from models import PROMPT
from servers import Servers

A, B = (Shape(f"hybrid-{name}", "qwen35", page=1, overlap=False) for name in "ab")


def test_a_continuation_restores_the_state(servers: Servers) -> None:
    servers.stop_serving()
    servers.serve()
    a, b = servers.start(A, B)
    first = servers.store(a, PROMPT)
    assert first.tokens == EXPECTED["qwen35"]
    # The state of an answer's last token is not there: that token has never been computed with.
    conversation = [*PROMPT, *first.tokens[:-1]]
    asked = [*conversation, 9, 8, 7, 6, 5]
    loaded = b.generate(asked)
    assert loaded.host == len(conversation)
    assert loaded.device == 0
    a.flush()
    again = a.generate(asked)
    assert (again.tokens, again.host) == (loaded.tokens, len(conversation))
    # What it is without any hit.
    servers.settled()
    servers.stop_serving()
    servers.serve()
    servers.attached(a, b)
    a.flush()
    computed = a.generate(asked)
    assert (computed.host, computed.device) == (0, 0)
    assert computed.tokens == loaded.tokens
    # transformers' tokens of this prompt come whatever was loaded before it.
    assert b.generate(PROMPT).tokens == EXPECTED["qwen35"]
