"""P and D on servers of their own: D's server reads P's arena over the link, layer by layer."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from comparison import prompt
from engines import Engine, connector
from legs import metaserver, prefill_first
from scenario import Answer, Terms

from layerflow.agent.observer import fetch_status
from layerflow.links import links
from layerflow_cli.bench.harness import ServerProcess

MAX_TOKENS = 6
ATTACH_S = 60.0
EXTRA = {"chunk_tokens": 64}
Start = Callable[..., Engine]


class Pair:
    """A prefill and a decode engine, each with its server."""

    def __init__(self, serve: Callable[..., ServerProcess], vllm: Start, model: str) -> None:
        self.lender = serve(peers__serve="true", peers__link_address="127.0.0.1:0")
        self.reader = serve(peers__learn="true")
        theirs = [self.lender.endpoint]
        to_prefill = connector(self.lender.endpoint, "kv_producer", pd={"servers": theirs}, **EXTRA)
        to_decode = connector(self.reader.endpoint, "kv_consumer", pd={"prefill_servers": theirs}, **EXTRA)
        self.prefill = vllm(model, kv_transfer_config=to_prefill)
        self.decode = vllm(model, kv_transfer_config=to_decode)

    def switch(self, link: str) -> None:
        """Both servers anew, over another link; the engines stay, and attach again."""
        for server in (self.lender, self.reader):
            server.kill()
            server.restart(peers__link=link, peers__trusted_network="true")

    def concurrently(self, asked: list[int]) -> Answer:
        """Both legs at once; D is told P's servers, as `layerflow proxy` does."""
        shared: dict[str, Any] = {"transfer_id": f"xfer-{uuid.uuid4()}"}
        told = {"do_remote_prefill": True, "layerflow": {"v": 1, "servers": [self.lender.endpoint]}}
        self.decode.begin([asked], MAX_TOKENS, terms=[Terms(transfer=told | shared)])
        self.prefill.begin([asked], 1, terms=[Terms(transfer={"do_remote_decode": True} | shared)])
        self.prefill.finish()
        return self.decode.finish()[0]

    def prefill_first(self, asked: list[int]) -> Answer:
        """Two phases: P's response tells its servers."""
        return prefill_first(self.prefill, self.decode, asked, MAX_TOKENS)

    def decode_first(self, asked: list[int]) -> Answer:
        """By the metaserver: D's own settings tell where P stores."""

        def start(body: dict[str, Any]) -> int:
            self.prefill.begin([asked], 1, terms=[Terms(transfer=body)])
            return 200 if self.prefill.finish()[0].reason == "length" else 502

        with metaserver(start) as url:
            told = {"do_remote_prefill": True, "metaserver": url}
            return self.decode.one(asked, max_tokens=MAX_TOKENS, terms=Terms(transfer=told))


@pytest.fixture(scope="module")
def llama(serve: Callable[..., ServerProcess], vllm: Start) -> Iterator[Pair]:
    yield Pair(serve, vllm, "llama")


def assert_loaded(answer: Answer, asked: list[int]) -> None:
    assert answer.transfer is not None
    told = answer.transfer["layerflow"]
    assert told.items() >= {"handoff": "loaded", "hit_tokens": len(asked) - 1}.items(), told


@pytest.mark.timeout(300)
@pytest.mark.parametrize("order", ["concurrently", "prefill_first", "decode_first"])
def test_llama(order: str, llama: Pair, plain: Start) -> None:
    for number, tokens in enumerate((200, 333)):
        asked = prompt(10 * len(order) + number, tokens)
        wanted = plain("llama").one(asked, max_tokens=MAX_TOKENS).tokens
        answer = getattr(llama, order)(asked)
        assert answer.tokens == wanted
        assert_loaded(answer, asked)
    assert fetch_status(llama.reader.endpoint)["flow"]["loaded_bytes"] > 0
    for engine in (llama.prefill, llama.decode):
        engine.assert_no_block_lost()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("link", [name for name in links() if name != "tcp"])
def test_llama_over_another_link(link: str, llama: Pair, plain: Start) -> None:
    module = links()[link].probe
    probe = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"link {link}: {probe.stderr.strip().splitlines()[-1]}")
    llama.switch(link)
    until = time.monotonic() + ATTACH_S
    for number in itertools.count():  # until both engines have attached again each prompt is computed
        asked = prompt(100 * len(link) + number, 333)
        answer = llama.concurrently(asked)
        assert answer.tokens == plain("llama").one(asked, max_tokens=MAX_TOKENS).tokens
        if time.monotonic() >= until or (answer.transfer or {})["layerflow"]["handoff"] == "loaded":
            break
    assert_loaded(answer, asked)
    (peer,) = fetch_status(llama.reader.endpoint)["peers"]["reads"]["peers"]
    assert (peer["link"], peer["state"]) == (link, "up")
    for engine in (llama.prefill, llama.decode):
        engine.assert_no_block_lost()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["mla", "gemma3"])
def test_other_caches(model: str, serve: Callable[..., ServerProcess], vllm: Start, plain: Start) -> None:
    pair = Pair(serve, vllm, model)
    asked = prompt(40, 250)
    answer = pair.concurrently(asked)
    assert answer.tokens == plain(model).one(asked, max_tokens=MAX_TOKENS).tokens
    assert_loaded(answer, asked)
