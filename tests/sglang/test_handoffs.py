"""Prefill and decode in SGLangs of their own: decode's tokens are those of one server, or an error with its reason."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterator
from typing import Any

import pytest
from engines import EXPECTED, EngineFailed
from models import PROMPT
from pairs import Pair, has_router, router_before, start_pair
from servers import SLOW, Servers

SOON_S = 30.0
"""A busy machine's second: what is tested is that nobody waits for a deadline of minutes."""


@pytest.fixture(scope="module")
def llama(servers: Servers) -> Iterator[Pair]:
    """Prefill computes prompts in chunks of 256 tokens, and decode keeps what it has had."""
    servers.serve()
    pair = start_pair(
        servers,
        "llama",
        prefill=("--chunked-prefill-size", "256"),
        decode=("--disaggregation-decode-enable-radix-cache",),
    )
    yield pair
    pair.close()


def prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(3, 500), k=tokens)


def test_a_cold_prompt_has_the_tokens_of_one_server(llama: Pair) -> None:
    assert llama.generate(PROMPT).tokens == EXPECTED["llama"]


def test_chunks_and_cached_prefixes_have_the_tokens_of_a_cold_prompt(llama: Pair) -> None:
    long = prompt(1, 1000)
    cold = llama.generate(long)
    assert cold.served, cold
    again = llama.generate(long)
    assert again.tokens == cold.tokens, "both had it cached"
    llama.decode.flush()
    assert llama.generate(long).tokens == cold.tokens, "prefill had it cached"
    shared = long[:700] + prompt(2, 100)
    first = llama.generate(shared)
    llama.prefill.flush()
    assert llama.generate(shared).tokens == first.tokens, "prefill computed it anew"


@pytest.mark.skipif(not has_router(), reason="sglang-router is not installed: setup.sh says why")
def test_the_router_is_unchanged(llama: Pair, servers: Servers) -> None:
    with router_before(llama, servers) as router:
        assert router.generate(PROMPT).tokens == EXPECTED["llama"]
        asked = prompt(5, 900)
        assert router.generate(asked).tokens == llama.generate(asked).tokens


def test_decode_may_come_late(llama: Pair) -> None:
    late = llama.generate(prompt(3, 500), late_s=0.5)
    assert late.served, late
    assert late.tokens == llama.generate(prompt(3, 500)).tokens


def test_many_at_once(llama: Pair) -> None:
    prompts = [prompt(10 + number, 40 + 60 * number) for number in range(8)]
    pending = [llama.begin(each)[1] for each in prompts]
    answers = [each.result() for each in pending]
    assert all(each.served for each in answers), answers
    llama.prefill.flush()
    assert [llama.generate(each).tokens for each in prompts] == [each.tokens for each in answers]


def test_a_retracted_request_goes_on(llama: Pair, servers: Servers) -> None:
    """Prefill computes its prompt and its output so far, which crosses a page's border at the first token."""
    asked = prompt(20, 6 * 16 + 15)
    whole = llama.generate(asked, n=150)
    assert whole.served, whole
    before = servers.until(bool)["handoffs"]["released"]
    _, second = llama.begin(asked, n=150)

    def retracted_twice(status: dict[str, Any]) -> bool:
        llama.decode.pause("retract")
        llama.decode.resume()
        return bool(second.done() or status["handoffs"]["released"] > before + 2)

    servers.until(retracted_twice)
    assert not second.done(), second.result()
    answer = second.result()
    assert answer.served, answer
    assert answer.tokens == whole.tokens


def test_an_aborted_prompt_fails_soon_and_hurts_nobody(llama: Pair) -> None:
    name = secrets.token_hex(8)
    first, second = llama.begin(prompt(30, 3500), rid=name)
    llama.prefill.abort(name)
    began = time.monotonic()
    first.result()
    answer = second.result()
    assert time.monotonic() - began < SOON_S
    whole = llama.generate(prompt(30, 3500))
    assert whole.served
    assert answer.tokens == whole.tokens if answer.served else answer.error
    assert llama.generate(PROMPT).tokens == EXPECTED["llama"]


def test_a_server_that_is_lost_fails_requests_with_a_reason_until_it_is_back(llama: Pair, servers: Servers) -> None:
    whole = llama.generate(prompt(40, 3000))
    llama.prefill.flush()
    _, second = llama.begin(prompt(40, 3000))
    servers.server.kill()
    answer = second.result()
    assert answer.tokens == whole.tokens if answer.served else "layerflow" in answer.error, answer
    servers.serve()
    deadline = time.monotonic() + SOON_S
    while not (answer := llama.generate(prompt(41, 100))).served:
        assert answer.status == 500 and "layerflow" in answer.error, answer
        assert time.monotonic() < deadline
    assert llama.generate(PROMPT).tokens == EXPECTED["llama"]


def test_a_prefill_server_that_dies_fails_its_requests_soon(llama: Pair, servers: Servers) -> None:
    """Those that it computes, those that it has not begun, and those that come later."""
    # Prefill is never asked for these, which is as far as it can be from beginning them.
    waiting = [llama.decode.begin_generate(prompt(50 + each, 200), **llama.handed()) for each in range(3)]
    servers.until(lambda status: status["handoffs"]["announced"] == len(waiting))
    _, computing = llama.begin(prompt(53, 3900))
    llama.prefill.kill()
    died = time.monotonic()
    answers = [each.result() for each in waiting]
    print(f"\nprefill killed before it began a request: an error after {time.monotonic() - died:.2f} s")
    assert time.monotonic() - died < SOON_S
    assert all(not each.served and each.error for each in answers), answers
    assert "prefill_engine_ended" in llama.decode.output(), "a heartbeat told so, seconds later"
    answer = computing.result()
    assert answer.served or answer.error
    later = llama.decode.generate(prompt(54, 200), **llama.handed())
    assert "has ended" in later.error, later
    print(f"a request that came later: an error after {later.took_s:.2f} s")
    assert later.took_s < SOON_S


def test_new_weights_end_hand_offs_and_no_server(servers: Servers) -> None:
    servers.stop_serving()
    servers.serve()
    pair = start_pair(servers, "llama")
    try:
        assert pair.generate(PROMPT).tokens == EXPECTED["llama"]
        pair.prefill.update_weights_from_disk("llama-other")
        for seed in (60, 61):
            answer = pair.generate(prompt(seed, 200))
            assert answer.status == 500 and "layerflow" in answer.error, answer
        assert pair.prefill.alive and pair.decode.alive
    finally:
        pair.close()


@pytest.mark.campaign
def test_a_decode_server_that_dies_leaves_nothing_behind(servers: Servers) -> None:
    """Prefill's pages are free when its saves have ended, and hand-offs end."""
    servers.stop_serving()
    servers.serve(**SLOW)
    pair = start_pair(servers, "llama")
    try:
        asked = [prompt(70 + each, 1000) for each in range(3)]
        handed = [pair.begin(each) for each in asked]
        servers.until(lambda status: status["handoffs"]["open"] + status["handoffs"]["complete"] > 0)
        pair.decode.kill()
        assert all(first.result().served for first, _ in handed)
        pair.prefill.flush()  # refused while a request holds pages
        servers.settled()
        status = servers.until(lambda status: not status["handoffs"]["live"] and not status["pool"]["pinned"])
        print(f"\nhand-offs of a decode server that was killed: {status['handoffs']}")
        for _, second in handed:
            with pytest.raises(EngineFailed):
                second.result()
    finally:
        pair.close()


@pytest.mark.campaign
def test_what_prefill_loads_itself_is_handed_over(servers: Servers) -> None:
    """Its linker loads a prefix, whose verdict the hand-off's saves wait for."""
    servers.serve()
    pair = start_pair(servers, "llama", linked=True)
    try:
        long = prompt(90, 900)
        cold = pair.generate(long)
        assert cold.served, cold
        pair.prefill.flush()
        longer = [*long, *prompt(91, 100)]
        first, second = pair.begin(longer)
        assert first.result().host >= 800, "prefill has loaded nothing"
        loaded = second.result()
        assert loaded.served, loaded
        servers.stop_serving()
        servers.serve()
        pair.prefill.flush()
        deadline = time.monotonic() + SOON_S
        while not (answer := pair.generate(longer)).served:
            assert time.monotonic() < deadline, answer
        assert answer.tokens == loaded.tokens
    finally:
        pair.close()


@pytest.mark.campaign
def test_a_recurrent_state_is_handed_over(servers: Servers) -> None:
    servers.serve()
    pair = start_pair(servers, "qwen35")
    try:
        assert pair.generate(PROMPT).tokens == EXPECTED["qwen35"]
        long = prompt(60, 900)
        assert pair.generate(long).tokens == pair.generate(long).tokens
    finally:
        pair.close()


@pytest.mark.campaign
@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=["2-to-1", "1-to-2"])
def test_other_tensor_sizes_on_both_sides(servers: Servers, tp: tuple[int, int]) -> None:
    servers.serve()
    pair = start_pair(servers, "llama", tp=tp)
    try:
        assert pair.generate(PROMPT).tokens == EXPECTED["llama"]
    finally:
        pair.close()


@pytest.mark.campaign
def test_no_request_after_a_start_is_late(servers: Servers) -> None:
    """100 requests after each of 5 starts: p99 and median are printed; none takes seconds more than the others."""
    servers.serve()
    for number in range(5):
        pair = start_pair(servers, "llama")
        try:
            took = sorted(pair.generate(prompt(1000 * number + each, 300)).took_s for each in range(100))
        finally:
            pair.close()
        print(f"start {number}: median {took[50]:.3f} s, p99 {took[98]:.3f} s, longest {took[99]:.3f} s")
        assert took[98] < 3 * took[50] + 1.0
