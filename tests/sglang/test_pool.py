"""Two SGLang servers share a pool: what one computed the other loads, and tokens are the same."""

from __future__ import annotations

from engines import EXPECTED, Engine
from models import PROMPT
from servers import Servers, pages, prompt


def test_tokens_are_those_of_transformers(new_pair: list[Engine], servers: Servers) -> None:
    a, b = new_pair
    assert servers.store(a, PROMPT).tokens == EXPECTED["llama"]
    answer = b.generate(PROMPT)
    assert (answer.tokens, answer.host) == (EXPECTED["llama"], pages(b, len(PROMPT)))


def test_what_one_computed_the_other_loads(pair: list[Engine], servers: Servers) -> None:
    a, b = pair
    asked = prompt(1000)
    wanted = servers.store(a, asked).tokens
    loaded = b.generate(asked)
    assert loaded.tokens == wanted
    assert loaded.host >= 0.99 * pages(b, len(asked))
    print(f"\n{loaded.host} of {len(asked)} tokens loaded")
    # SGLang's own cache has it now; emptied, it is loaded again.
    again = b.generate(asked)
    assert (again.tokens, again.host, again.device) == (wanted, 0, loaded.host)
    b.flush()
    flushed = b.generate(asked)
    assert (flushed.tokens, flushed.host) == (wanted, loaded.host)


def test_a_shared_beginning_is_loaded(pair: list[Engine], servers: Servers) -> None:
    a, b = pair
    asked = prompt(1000)
    servers.store(a, asked)
    branch = asked[:640] + prompt(60)
    loaded = b.generate(branch)
    assert loaded.host == 640
    assert loaded.tokens == a.generate(branch).tokens
    # What SGLang's own cache has is not loaded, what is behind it is.
    longer = b.generate(asked)
    assert (longer.device, longer.host) == (640, pages(b, len(asked)) - 640)


def test_other_keys_miss(pair: list[Engine], servers: Servers) -> None:
    a, b = pair
    asked = prompt(400)
    wanted = servers.store(a, asked).tokens
    for keys in ({"extra_key": "x"}, {"cache_salt": "x"}, {"extra_key": "y", "cache_salt": "z"}):
        b.flush()
        assert servers.store(b, asked, **keys).tokens == wanted, f"{keys} change no token, and miss"
        a.flush()
        assert a.generate(asked, **keys).host == pages(a, len(asked)), "the same keys hit"
    b.flush()
    assert b.generate(asked).host == pages(b, len(asked))


def test_requests_that_come_together(pair: list[Engine], servers: Servers) -> None:
    a, b = pair
    asked = [prompt(200 + 32 * number) for number in range(6)]
    computed = a.generate_all(asked)
    servers.until(lambda status: status["pool"]["objects"] >= sum(len(each) // 16 for each in asked))
    servers.settled()
    loaded = b.generate_all([*asked, prompt(300)])
    assert [answer.tokens for answer in loaded[:-1]] == [answer.tokens for answer in computed]
    assert [answer.host for answer in loaded] == [*(pages(b, len(each)) for each in asked), 0]


def test_each_layer_is_waited_for_once(pair: list[Engine], servers: Servers) -> None:
    a, b = pair
    asked = prompt(500)
    servers.store(a, asked)
    b.watch.write_text("")
    assert b.generate(asked).host
    waits = b.noted("wait")
    assert len({wait.step for wait in waits}) == 1
    assert [wait.layer for wait in waits] == [0, 1, 2, 3]
