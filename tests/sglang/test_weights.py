"""A weight update changes the keys: nothing of the old weights is hit under the new ones, nor the other way round."""

from __future__ import annotations

from engines import EXPECTED, Engine
from models import PROMPT
from servers import Servers, pages


def test_new_weights_from_disk(new_pair: list[Engine], servers: Servers) -> None:
    a, b = new_pair
    assert servers.store(a, PROMPT).tokens == EXPECTED["llama"]
    b.spoiled = True
    assert b.generate(PROMPT).host == pages(b, len(PROMPT))
    b.update_weights_from_disk("llama-other")
    updated = servers.store(b, PROMPT)
    assert updated.tokens == EXPECTED["llama-other"]
    # What it has stored since is its own.
    b.flush()
    again = b.generate(PROMPT)
    assert (again.tokens, again.host) == (EXPECTED["llama-other"], pages(b, len(PROMPT)))
    a.flush()
    old = a.generate(PROMPT)
    assert (old.tokens, old.host) == (EXPECTED["llama"], pages(a, len(PROMPT)))
