"""What dies, hangs or leaves between a prefill and a decode engine: right tokens within the deadline, nothing left."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from comparison import prompt
from e2e.stopping import stopped
from engines import Engine, EngineFailed, connector
from legs import SIX_KEYS, concurrently, metaserver
from scenario import Answer, Terms

from layerflow.agent.observer import fetch_status
from layerflow_cli.bench.harness import ServerProcess
from layerflow_testing.lossy_relay import UNHEARD, Loss, LossyRelay

MAX_TOKENS = 6
TOKENS = 600
DEADLINE_S = 4.0
COMPUTE_S = 60.0
"""Of a busy machine; who waits for ever takes more."""
BALANCE_S = 15.0
SLOW = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}  # ten steps a prompt: there is time to fail in
EXTRA = {"chunk_tokens": 64, "pd": {"deadline_s": DEADLINE_S}}

Start = Callable[..., Engine]
Serve = Callable[..., ServerProcess]


class Pair:
    """P and D on one server; P can be started anew."""

    def __init__(self, server: ServerProcess, vllm: Start) -> None:
        self.server = server
        self._vllm = vllm
        self.decode = vllm("llama", kv_transfer_config=connector(server.endpoint, "kv_consumer", **EXTRA))
        self.restart_prefill()

    def restart_prefill(self) -> None:
        config = connector(self.server.endpoint, "kv_producer", **EXTRA)
        self.prefill = self._vllm("llama", kv_transfer_config=config, **SLOW)

    def begin(self, asked: list[int]) -> None:
        """Both legs."""
        shared: dict[str, Any] = {"transfer_id": f"xfer-{uuid.uuid4()}"}
        self.decode.begin([asked], MAX_TOKENS, terms=[Terms(transfer={"do_remote_prefill": True} | shared)])
        self.prefill.begin([asked], 1, terms=[Terms(transfer={"do_remote_decode": True} | shared)])

    def assert_balanced(self) -> None:
        """Nothing is kept for anybody, on either side."""
        self.decode.assert_no_block_lost()
        until = time.monotonic() + BALANCE_S
        while True:
            status = fetch_status(self.server.endpoint)
            left = {name: status["pool"][name] for name in ("pinned", "half_written")}
            left |= {"steps": status["flow"]["steps"], "handoffs": status["handoffs"]["live"]}
            if not any(left.values()):
                return
            assert time.monotonic() < until, left
            time.sleep(0.05)


@pytest.fixture(scope="module")
def pair(serve: Serve, vllm: Start) -> Iterator[Pair]:
    yield Pair(serve(), vllm)


def outcome(answer: Answer) -> str:
    assert answer.transfer is not None
    return str(answer.transfer["layerflow"]["handoff"])


def assert_handed_over_again(pair: Pair, plain: Start, number: int) -> None:
    """Soon, if not at once: whoever is new may be slow at first."""
    again = prompt(number, TOKENS)
    wanted = plain("llama").one(again, max_tokens=MAX_TOKENS).tokens
    until = time.monotonic() + COMPUTE_S
    while outcome(found := concurrently(pair.prefill, pair.decode, [again], MAX_TOKENS)[0]) != "loaded":
        assert found.tokens == wanted
        assert time.monotonic() < until, "hand-offs do not come back"
    assert found.tokens == wanted


@pytest.mark.timeout(300)
@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.2])
def test_the_server_is_killed(after_s: float, pair: Pair, plain: Start) -> None:
    asked = prompt(int(1000 * after_s), TOKENS)
    wanted = plain("llama").one(asked, max_tokens=MAX_TOKENS).tokens
    pair.begin(asked)
    time.sleep(after_s)
    pair.server.kill()
    began = time.monotonic()
    try:
        answer = pair.decode.finish()[0]
        assert answer.tokens == wanted
        assert time.monotonic() - began < DEADLINE_S + COMPUTE_S
        assert pair.prefill.finish()[0].tokens == wanted[:1]
    finally:
        pair.server.restart()
    assert_handed_over_again(pair, plain, 77 + int(1000 * after_s))
    pair.assert_balanced()


@pytest.mark.timeout(300)
def test_the_prefill_engine_stops(pair: Pair, plain: Start) -> None:
    """It hangs for longer than D waits; what it finishes later nobody needs any more."""
    pid = pair.prefill.process.pid
    assert pid is not None
    for number in range(3000, 3020):
        asked = prompt(number, TOKENS)
        wanted = plain("llama").one(asked, max_tokens=MAX_TOKENS).tokens
        pair.begin(asked)
        with stopped(pid):
            began = time.monotonic()
            answer = pair.decode.finish()[0]
            assert answer.tokens == wanted
            assert time.monotonic() - began < DEADLINE_S + COMPUTE_S
        pair.prefill.finish()
        if outcome(answer) != "loaded":  # else all of it was stored before the engine stood still
            break
    assert outcome(answer) == "lost"
    pair.assert_balanced()


@pytest.mark.timeout(300)
def test_the_client_leaves(pair: Pair) -> None:
    """D's request is aborted while it waits, or while it loads; nothing of P's is kept for it."""
    for step in (1, 3, 30, 100):
        asked = prompt(4000 + step, TOKENS)
        shared: dict[str, Any] = {"transfer_id": f"xfer-{uuid.uuid4()}"}
        to_decode = Terms(transfer={"do_remote_prefill": True} | shared)
        pair.decode.begin([asked], MAX_TOKENS, {0: step}, terms=[to_decode])
        pair.prefill.begin([asked], 1, terms=[Terms(transfer={"do_remote_decode": True} | shared)])
        assert pair.decode.finish()[0].reason in ("abort", "length")
        pair.prefill.finish()
        pair.prefill.assert_no_block_lost()
        pair.assert_balanced()


@pytest.mark.timeout(300)
def test_the_metaserver_fails(pair: Pair, plain: Start) -> None:
    took: list[float] = []
    for number in range(5000, 5010):  # a busy machine may take as long for one, not for each
        asked = prompt(number, TOKENS)
        wanted = plain("llama").one(asked, max_tokens=MAX_TOKENS).tokens
        with metaserver(lambda _: 502) as url:
            began = time.monotonic()
            told = {"do_remote_prefill": True, "metaserver": url}
            answer = pair.decode.one(asked, max_tokens=MAX_TOKENS, terms=Terms(transfer=told))
            took.append(time.monotonic() - began)
        assert answer.tokens == wanted
        assert "502" in (answer.transfer or {})["layerflow"]["lost"]
        if took[-1] < DEADLINE_S:
            break
    assert took[-1] < DEADLINE_S, f"a refusal is not waited for until the deadline: {took}"
    pair.assert_balanced()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("loss", Loss)
def test_what_the_metaserver_is_asked_or_answers_is_lost(loss: Loss, pair: Pair, plain: Start) -> None:
    """The prefill engine may well compute the prompt then: what it stores is kept for nobody."""
    asked = prompt(5100 + list(Loss).index(loss), TOKENS)
    wanted = plain("llama").one(asked, max_tokens=MAX_TOKENS).tokens
    begun: list[str] = []

    def start(body: dict[str, Any]) -> int:
        begun.append(body["layerflow"]["handoff"])
        pair.prefill.begin([asked], 1, terms=[Terms(transfer=body)])
        return 200 if pair.prefill.finish()[0].reason == "length" else 502

    with metaserver(start) as url:
        address, _, path = url.removeprefix("http://").partition("/")
        with LossyRelay(address, loss) as relay:
            began = time.monotonic()
            told = {"do_remote_prefill": True, "metaserver": f"http://127.0.0.1:{relay.port}/{path}"}
            answer = pair.decode.one(asked, max_tokens=MAX_TOKENS, terms=Terms(transfer=told))
            assert answer.tokens == wanted
            assert time.monotonic() - began < DEADLINE_S + COMPUTE_S
    # Where the prefill has begun, the hand-off itself says what becomes of it, and the answer is not needed.
    assert outcome(answer) == "lost" if loss in UNHEARD else outcome(answer) in ("lost", "loaded")
    assert len(begun) == (0 if loss in UNHEARD else 1)
    pair.prefill.assert_no_block_lost()
    pair.assert_balanced()


@pytest.mark.timeout(300)
def test_an_unclaimed_hand_off_ends_with_its_lease(pair: Pair) -> None:
    asked = prompt(6000, TOKENS)
    told = pair.prefill.one(asked, max_tokens=1, terms=Terms(transfer=SIX_KEYS)).transfer
    assert told is not None
    assert told["do_remote_prefill"] is True
    pair.prefill.assert_no_block_lost()  # P's own blocks are free with its saves
    pair.assert_balanced()
    answer = pair.decode.one(asked, max_tokens=1, terms=Terms(transfer=told))
    assert outcome(answer) == "lost"
    assert (answer.transfer or {})["layerflow"]["hit_tokens"] == TOKENS - 1, "what is stored still hits"


@pytest.mark.timeout(300)
def test_the_prefill_engine_is_killed(pair: Pair, plain: Start) -> None:
    asked = prompt(7000, TOKENS)
    wanted = plain("llama").one(asked, max_tokens=MAX_TOKENS).tokens
    pair.begin(asked)
    time.sleep(random.Random(7).uniform(0.0, 0.3))
    pair.prefill.kill()
    began = time.monotonic()
    assert pair.decode.finish()[0].tokens == wanted
    assert time.monotonic() - began < DEADLINE_S + COMPUTE_S
    pair.assert_balanced()
    pair.restart_prefill()
    assert_handed_over_again(pair, plain, 7001)


@pytest.mark.timeout(300)
def test_the_decode_engine_is_killed(pair: Pair) -> None:
    """P does not notice; what was kept for D goes."""
    asked = prompt(8000, TOKENS)
    pair.begin(asked)
    time.sleep(random.Random(8).uniform(0.0, 0.3))
    pair.decode.kill()
    assert pair.prefill.finish()[0].reason == "length"
    pair.prefill.assert_no_block_lost()
    with pytest.raises((EngineFailed, OSError)):
        pair.decode.finish()
    until = time.monotonic() + BALANCE_S
    while (left := fetch_status(pair.server.endpoint)["pool"]["pinned"]) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == 0
