"""A weight update changes the keys: nothing of the old weights is hit under the new ones, nor the other way round."""

from __future__ import annotations

import pytest
from engines import EXPECTED, Engine
from models import PROMPT
from servers import SLOW, A, B, Servers, assert_never_wrong, is_loading, pages, prompt


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


@pytest.mark.campaign
@pytest.mark.parametrize("abort", [False, True], ids=["waits", "aborts"])
def test_new_weights_inside_a_load(abort: bool, servers: Servers) -> None:
    """SGLang lets running requests end first, or ends them: what they loaded is of the old weights."""
    servers.stop_serving()
    servers.serve(**SLOW)
    a, b = servers.start(A, B)
    b.spoiled = True
    asked = [*prompt(1000), *PROMPT]
    wanted = servers.store(a, asked).tokens
    request = b.begin_generate(asked)
    servers.until(is_loading)
    b.update_weights_from_disk("llama-other", abort_all_requests=abort)
    assert_never_wrong(request.result(), wanted)
    assert b.generate(PROMPT).tokens == EXPECTED["llama-other"]
    updated = servers.store(b, asked)
    assert updated.tokens != wanted
    b.flush()
    again = b.generate(asked)
    assert (again.tokens, again.host) == (updated.tokens, pages(b, len(asked)))
    a.flush()
    assert a.generate(asked).tokens == wanted
    servers.until(lambda status: not status["pool"]["pinned"] and not status["flow"]["steps"])
