"""A layer computes while the next one is loaded, and while those before it are saved."""

from __future__ import annotations

import pytest
from engines import Shape
from servers import SLOW, A, B, Servers, assert_never_wrong, pages, prompt

ROUNDS = 3
TOKEN_BYTES = 2048
# Over a link that is emulated each layer of a small model leaves by itself; nothing need be waited for on this one.
LINK: dict[str, object] = {"pool__link_gbps": 10}
CHUNKED = Shape("chunked", watched=True, flags=("--chunked-prefill-size", "256", "--enable-mixed-chunk"))


def test_a_layer_is_saved_while_those_behind_it_are_computed(servers: Servers) -> None:
    servers.stop_serving()
    servers.serve(**LINK)
    a, b = servers.start(A, B)
    asked = prompt(3000)
    b.watch.write_text("")
    wanted = servers.store(b, asked).tokens
    saves, hooks = b.noted("save"), b.noted("hook")
    began = min(save.at for save in saves if save.layer == 0)
    first, last = (next(hook.at for hook in hooks if hook.layer == layer) for layer in (0, 3))
    print(f"\nlayer 0 is written, and saved {began - first:.3f} s later; layer 3 is written {last - first:.3f} s later")
    assert first < began < last
    whole = len(asked) // b.shape.page * b.shape.page
    assert sum(save.figure for save in saves) == whole * TOKEN_BYTES, "each byte is moved once"
    loaded = a.generate(asked)
    assert (loaded.tokens, loaded.host) == (wanted, pages(a, len(asked)))


@pytest.mark.campaign
def test_chunks_are_saved_as_they_are_computed(servers: Servers) -> None:
    """Beside requests that decode in the same batches."""
    servers.stop_serving()
    servers.serve(**LINK)
    a, b = servers.start(A, CHUNKED)
    prompts = [prompt(1000 + 100 * number) for number in range(3)]
    b.watch.write_text("")
    answers = b.generate_all(prompts, n=40)
    servers.until(lambda status: status["pool"]["objects"] >= sum(len(each) // 16 for each in prompts))
    servers.settled()
    moved = sum(save.figure for save in b.noted("save"))
    # What is generated becomes pages, too, once a request has ended.
    most = sum((len(each) + 40) // 16 * 16 for each in prompts) * TOKEN_BYTES
    least = sum(len(each) // 16 * 16 for each in prompts) * TOKEN_BYTES
    assert least <= moved <= most, "each byte is moved once"
    for each, answer in zip(prompts, answers, strict=True):
        loaded = a.generate(each, n=40)
        assert (loaded.tokens, loaded.host) == (answer.tokens, pages(a, len(each)))


def test_requests_are_aborted_while_their_pages_are_saved(servers: Servers) -> None:
    """Their slots are given to the next ones, whose bytes are never stored under their keys."""
    servers.stop_serving()
    a, b = servers.start(A, B)
    prompts = [prompt(1000) for _ in range(3)]
    wanted = [a.generate(each).tokens for each in prompts]
    servers.serve(**SLOW)
    servers.attached(a, b)
    a.flush()
    for number, each in enumerate(prompts):
        answer = b.begin_generate(each, n=200, rid=f"r{number}")
        servers.until(lambda status: status["pool"]["half_written"])
        b.abort(f"r{number}")
        assert not answer.result().served
        b.flush()
    for each, tokens in zip(prompts, wanted, strict=True):
        assert b.generate(each).tokens == tokens
        assert_never_wrong(a.generate(each), tokens)
    servers.settled()
    a.flush()
    for each, tokens in zip(prompts, wanted, strict=True):
        loaded = a.generate(each)
        assert (loaded.tokens, loaded.host) == (tokens, pages(a, len(each)))


def test_less_is_waited_for_than_is_transferred(servers: Servers) -> None:
    servers.stop_serving()
    servers.serve(**SLOW)
    a, b = servers.start(A, B)
    figures = []
    for _ in range(ROUNDS):
        stored = prompt(1008)
        servers.store(a, stored)
        b.flush()
        # What is behind the hit is what a layer computes with.
        assert b.generate([*stored, *prompt(1500)]).host == len(stored)
        status = servers.until(lambda status: own(status)["loading_steps"] == len(figures) + 1)
        session = own(status)
        figures.append((session["load_seconds"], session["exposed_load_seconds"]))
    transfer, exposed = figures[-1]
    print(f"\n{ROUNDS} loads of 1,008 tokens: {transfer:.2f} s of transfer, of which the engine waited {exposed:.2f} s")
    assert 0 < exposed < transfer


def own(status: dict) -> dict:  # type: ignore[type-arg]
    """The session of the server that loads."""
    (session,) = [each for each in status["sessions"] if each["memory"] and each["name"] == B.name]
    return session
