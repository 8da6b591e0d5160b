"""OpenAI servers behind proxies: layerflow's in every order, and vllm-router, which somebody else wrote."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from comparison import prompt
from engines import Engine
from legs import ORDERS, SIX_KEYS
from servers import BIN, Program, closing, complete, layerflow_proxy, streamed, tokens_of, vllm_router, vllm_server

from layerflow.agent.observer import fetch_status
from layerflow_cli.bench.harness import ServerProcess
from layerflow_testing.ports import held_ports
from layerflow_testing.stub_engine import Behaviour, StubEngine

MAX_TOKENS = 6
CHUNK = 64
MOST = 150
SOON_S = 10.0
HITS = "vllm:external_prefix_cache_hits_total"


@dataclass
class Pair:
    """P and D on one server.

    :param bootstrap: the port of P's ``GET /query``.
    """

    prefill: Program
    decode: Program
    server: ServerProcess
    folder: Path
    bootstrap: int


@pytest.fixture(scope="module")
def pair(serve: Callable[..., ServerProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder, server, bootstrap = tmp_path_factory.mktemp("http"), serve(), held_ports(1)[0]
    extra = {"chunk_tokens": CHUNK}
    prefill = vllm_server(
        "prefill", "llama", folder, server.endpoint, "kv_producer", pd={"bootstrap_port": bootstrap}, **extra
    )
    decode = vllm_server(
        "decode", "llama", folder, server.endpoint, "kv_consumer",
        pd={"deadline_s": 20, "max_recompute_tokens": MOST}, **extra,
    )  # fmt: skip
    with closing(prefill, decode):
        prefill.wait_up()
        decode.wait_up()
        yield Pair(prefill, decode, server, folder, bootstrap)


def hits(pair: Pair) -> float:
    return pair.decode.metric(HITS)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("order", ORDERS)
def test_layerflow_proxy(order: str, pair: Pair, plain: Callable[..., Engine]) -> None:
    proxy = layerflow_proxy(pair.prefill, pair.decode, order, pair.folder, short_prompt_tokens=0)
    with closing(proxy):
        proxy.wait_up()
        for number, tokens in enumerate((200, 333)):
            asked = prompt(100 * list(ORDERS).index(order) + number, tokens)
            wanted = plain("llama").one(asked, max_tokens=MAX_TOKENS).tokens
            before = hits(pair)
            if number:
                assert streamed(proxy.url, asked, MAX_TOKENS) == wanted
            else:
                assert tokens_of(complete(proxy.url, asked, MAX_TOKENS)) == wanted
            assert hits(pair) - before == tokens - 1


@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("vllm-router", path=str(BIN)) is None, reason="vllm-router is not installed")
@pytest.mark.parametrize("concurrent", [False, True], ids=["two-phase", "concurrent"])
def test_vllm_router(concurrent: bool, pair: Pair, plain: Callable[..., Engine]) -> None:
    router = vllm_router(pair.prefill, pair.decode, pair.folder, bootstrap=pair.bootstrap if concurrent else 0)
    with closing(router):
        router.wait_up()
        asked = prompt(1000 + concurrent, 200)
        wanted = plain("llama").one(asked, max_tokens=MAX_TOKENS).tokens
        before = hits(pair)
        assert tokens_of(complete(router.url, asked, MAX_TOKENS)) == wanted
        assert hits(pair) - before == len(asked) - 1


@pytest.mark.timeout(400)
def test_samples_of_one_prompt_share_its_hand_off(pair: Pair, plain: Callable[..., Engine]) -> None:
    proxy = layerflow_proxy(pair.prefill, pair.decode, "concurrent", pair.folder, short_prompt_tokens=0)
    with closing(proxy):
        proxy.wait_up()
        asked = prompt(1500, 200)
        wanted = plain("llama").one(asked, max_tokens=MAX_TOKENS).tokens
        before = hits(pair)
        answer = complete(proxy.url, asked, MAX_TOKENS, n=2, temperature=1.0, top_k=1)
        assert answer.status_code == 200, answer.text
        assert [tuple(choice["token_ids"]) for choice in answer.json()["choices"]] == [wanted, wanted]
        assert hits(pair) - before == 2 * (len(asked) - 1)


@pytest.mark.timeout(400)
def test_a_request_that_the_decode_engine_rejects_releases_the_hand_off(pair: Pair) -> None:
    asked = prompt(1600, 200)
    prefilled = complete(pair.prefill.url, asked, 1, kv_transfer_params=SIX_KEYS)
    assert prefilled.status_code == 200, prefilled.text
    told = prefilled.json()["kv_transfer_params"]
    before = fetch_status(pair.server.endpoint)["handoffs"]["released"]
    assert complete(pair.decode.url, asked, 1 << 20, kv_transfer_params=told).status_code == 400
    until = time.monotonic() + SOON_S
    while fetch_status(pair.server.endpoint)["handoffs"]["released"] == before:
        assert time.monotonic() < until, "the hand-off of a rejected request is kept"
        time.sleep(0.02)


@pytest.mark.timeout(400)
def test_a_lost_prefill_is_computed_or_a_true_error(pair: Pair, plain: Callable[..., Engine]) -> None:
    """Up to ``max_recompute_tokens`` D computes; above it the request ends with an error, and nothing else does."""
    nowhere = {"do_remote_prefill": True, "metaserver": f"http://127.0.0.1:{held_ports(1)[0]}/v1/metaserver"}
    short, long = prompt(2000, MOST), prompt(2001, MOST + 1)
    wanted = plain("llama").one(short, max_tokens=MAX_TOKENS).tokens
    assert tokens_of(complete(pair.decode.url, short, MAX_TOKENS, kv_transfer_params=nowhere)) == wanted
    failed = complete(pair.decode.url, long, MAX_TOKENS, kv_transfer_params=nowhere)
    assert failed.status_code == 500
    assert "metaserver" in pair.decode.output()
    assert tokens_of(complete(pair.decode.url, short, MAX_TOKENS)) == wanted


@pytest.mark.timeout(400)
def test_a_prefill_that_is_lost_on_its_way_is_a_503_of_the_proxy(pair: Pair, plain: Callable[..., Engine]) -> None:
    """Its leg ended well, and what it names is nowhere to be read."""
    terms = {"v": 1, "handoff": "lost", "servers": ["ipc:///nowhere/control"]}
    told = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p", "layerflow": terms}
    choice = {"index": 0, "text": "t", "finish_reason": "length"}
    answer = Behaviour(raw=json.dumps({"choices": [choice], "kv_transfer_params": told}).encode())
    with StubEngine(answer) as prefill:
        proxy = layerflow_proxy(prefill, pair.decode, "prefill-first", pair.folder, short_prompt_tokens=0)
        with closing(proxy):
            proxy.wait_up()
            failed = complete(proxy.url, prompt(2100, MOST + 1), MAX_TOKENS)
            assert failed.status_code == 503 and "max_recompute_tokens" in failed.text, failed.text
            short = prompt(2101, MOST)
            wanted = plain("llama").one(short, max_tokens=MAX_TOKENS).tokens
            assert tokens_of(complete(proxy.url, short, MAX_TOKENS)) == wanted
