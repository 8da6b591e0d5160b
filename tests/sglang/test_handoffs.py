"""Prefill and decode in SGLangs of their own: decode's tokens are those of one server, or an error with its reason."""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest
from engines import EXPECTED, START_S, Answer, Engine, Shape, close
from models import PROMPT
from servers import Servers

SOON_S = 30.0
"""A busy machine's second: what is tested is that nobody waits for a deadline of minutes."""


@dataclass(slots=True)
class Pair:
    """A prefill and a decode server."""

    prefill: Engine
    decode: Engine
    bootstrap: int

    def begin(self, prompt: list[int], *, late_s: float = 0.0, **body: Any) -> tuple[Future[Answer], Future[Answer]]:
        """Ask both for one prompt, as a router does: what prefill and decode will say."""
        handed = {
            "bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap, "bootstrap_room": secrets.randbits(62),
        }  # fmt: skip
        first = self.prefill.begin_generate(prompt, **handed, **body)
        if late_s:
            first.result()
            time.sleep(late_s)
        return first, self.decode.begin_generate(prompt, **handed, **body)

    def generate(self, prompt: list[int], **more: Any) -> Answer:
        """Decode's answer."""
        first, second = self.begin(prompt, **more)
        first.result()
        return second.result()


def start(
    servers: Servers,
    model: str,
    *,
    tp: tuple[int, int] = (1, 1),
    prefill: tuple[str, ...] = (),
    decode: tuple[str, ...] = (),
) -> Pair:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    page = {"page": 1, "overlap": False} if model == "qwen35" else {}
    backend = ("--disaggregation-transfer-backend", "layerflow", "--disaggregation-bootstrap-port", str(port))
    roles = {
        "prefill": prefill,
        "decode": ("--disaggregation-decode-retraction-backup", "cpu_tensor", *decode),
    }
    engines = [
        Engine(
            Shape(
                f"{model}-{role}", model, tp=ranks, linker=False,
                flags=("--disaggregation-mode", role, *backend, *extra), **page,
            ),
            servers.endpoint,
            servers.log(f"{model}-{role}"),
        ).begin()
        for (role, extra), ranks in zip(roles.items(), tp, strict=True)
    ]  # fmt: skip
    began = time.monotonic()
    try:
        for engine in engines:
            engine.wait_started(began + START_S)
    except BaseException:
        close(engines)
        raise
    finally:
        held.close()
    return Pair(*engines, port)


@pytest.fixture(scope="module")
def llama(servers: Servers) -> Iterator[Pair]:
    """Prefill computes prompts in chunks of 256 tokens, and decode keeps what it has had."""
    servers.serve()
    pair = start(
        servers,
        "llama",
        prefill=("--chunked-prefill-size", "256"),
        decode=("--disaggregation-decode-enable-radix-cache",),
    )
    yield pair
    close([pair.prefill, pair.decode])


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
    os.kill(servers.server.process.pid, signal.SIGKILL)
    answer = second.result()
    assert answer.tokens == whole.tokens if answer.served else "layerflow" in answer.error, answer
    servers.serve()
    deadline = time.monotonic() + SOON_S
    while not (answer := llama.generate(prompt(41, 100))).served:
        assert answer.status == 500 and "layerflow" in answer.error, answer
        assert time.monotonic() < deadline
    assert llama.generate(PROMPT).tokens == EXPECTED["llama"]


def test_a_prefill_server_that_dies_fails_its_requests_soon(llama: Pair) -> None:
    _, second = llama.begin(prompt(50, 3900))
    llama.prefill.kill()
    began = time.monotonic()
    answer = second.result()
    assert time.monotonic() - began < SOON_S
    assert answer.served or answer.error


@pytest.mark.campaign
def test_a_recurrent_state_is_handed_over(servers: Servers) -> None:
    servers.serve()
    pair = start(servers, "qwen35")
    try:
        assert pair.generate(PROMPT).tokens == EXPECTED["qwen35"]
        long = prompt(60, 900)
        assert pair.generate(long).tokens == pair.generate(long).tokens
    finally:
        close([pair.prefill, pair.decode])


@pytest.mark.campaign
@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=["2-to-1", "1-to-2"])
def test_other_tensor_sizes_on_both_sides(servers: Servers, tp: tuple[int, int]) -> None:
    servers.serve()
    pair = start(servers, "llama", tp=tp)
    try:
        assert pair.generate(PROMPT).tokens == EXPECTED["llama"]
    finally:
        close([pair.prefill, pair.decode])


@pytest.mark.campaign
def test_no_request_after_a_start_is_late(servers: Servers) -> None:
    """100 requests after each of 5 starts: p99 and median are printed; none takes seconds more than the others."""
    servers.serve()
    for number in range(5):
        pair = start(servers, "llama")
        try:
            took = sorted(pair.generate(prompt(1000 * number + each, 300)).took_s for each in range(100))
        finally:
            close([pair.prefill, pair.decode])
        print(f"start {number}: median {took[50]:.3f} s, p99 {took[98]:.3f} s, longest {took[99]:.3f} s")
        assert took[98] < 3 * took[50] + 1.0
