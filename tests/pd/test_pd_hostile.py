"""Requests that no decent client sends, to real vLLMs behind the proxy: no process ends, other requests are right."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from comparison import prompt
from legs import ORDERS
from servers import ANSWER_S, Program, closing, complete, layerflow_proxy, tokens_of, vllm_server

from layerflow.agent.observer import fetch_status
from layerflow_cli.bench.harness import ServerProcess
from layerflow_testing.hostile_requests import HostileRequest, hostile_requests

CHUNK = 64
TOKENS = 3
AT_ONCE = 8
KEPT = httpx.Limits(keepalive_expiry=1)  # a server closes a connection that was idle for 5 s, under a request too
FIRST = 50  # number of a decent client's first prompt
DECENT = 20
"""Requests of another client whose times are taken before the others come."""
SHORT, A_TURN, TURNS = 40, 200, 17  # requests; a campaign takes turns in each order


@dataclass
class Pair:
    """P and D on one server."""

    prefill: Program
    decode: Program
    server: ServerProcess
    folder: Path


@pytest.fixture(scope="module")
def pair(serve: Callable[..., ServerProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder, server = tmp_path_factory.mktemp("hostile"), serve()
    made = [
        vllm_server(name, "llama", folder, server.endpoint, role, chunk_tokens=CHUNK, pd={"deadline_s": 5})
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    ]
    with closing(*made):
        for each in made:
            each.wait_up()
        yield Pair(made[0], made[1], server, folder)


@dataclass
class Turn:
    """What a crowd of requests was answered, when each began, and how long a decent client's took meanwhile."""

    statuses: list[int]
    began: list[float]
    decent: list[float]


class Clients:
    """A crowd of hostile or benign requests, and a decent client's beside it.

    Half of the crowd go through the proxy, half to the engines' own API, where no proxy drops what a client says.
    """

    def __init__(self, pair: Pair, proxy: Program) -> None:
        self._pair, self._proxy = pair, proxy
        self._targets = (proxy.url, proxy.url, pair.prefill.url, pair.decode.url)
        self._numbers = itertools.count(FIRST + 1)
        self._lock = threading.Lock()

    def take_turn(self, requests: Sequence[HostileRequest], not_before: Sequence[float]) -> Turn:
        """Until each has its answer.

        :param not_before: when each may begin, in seconds from the first.
        """
        turn = Turn([0] * len(requests), [0.0] * len(requests), [])
        waiting = iter(enumerate(requests))
        started = time.monotonic()

        def crowd() -> None:
            with httpx.Client(trust_env=False, timeout=ANSWER_S, limits=KEPT) as client:
                while True:
                    with self._lock:
                        number, request = next(waiting, (0, None))
                    if request is None:
                        return
                    time.sleep(max(0.0, not_before[number] - (time.monotonic() - started)))
                    turn.began[number] = time.monotonic() - started
                    url = self._targets[number % len(self._targets)]
                    turn.statuses[number] = self._send(client, url, request)

        with ThreadPoolExecutor(AT_ONCE) as threads:
            crowds = [threads.submit(crowd) for _ in range(AT_ONCE)]
            while not all(each.done() for each in crowds):
                turn.decent.append(self.decent())
        for each in crowds:
            each.result()
        return turn

    def decent(self) -> float:
        """How long a request of a new prompt took, in seconds."""
        began = time.monotonic()
        self.tokens(next(self._numbers))
        return time.monotonic() - began

    def tokens(self, number: int) -> tuple[int, ...]:
        """Of a decent request."""
        answer = complete(self._proxy.url, prompt(number, 130), TOKENS)
        assert answer.status_code == 200, f"{answer.text}\n{self._tails()}"
        return tokens_of(answer)

    def _send(self, client: httpx.Client, url: str, request: HostileRequest) -> int:
        try:
            answer = client.post(url + request.path, content=request.body, headers=list(request.headers))
        except httpx.HTTPError as error:
            raise AssertionError(f"{url} {request.about}: {error!r}\n{self._tails()}") from None
        assert "the proxy failed" not in answer.text, f"{request.about}\n{self._tails()}"
        return answer.status_code

    def _tails(self) -> str:
        return "\n\n".join(each.tail() for each in (self._proxy, self._pair.prefill, self._pair.decode))


def warm_up(engine: Program) -> None:
    """Let vLLM compile what ranks logprobs, for one request in a step and for several.

    It does so in the first step that needs it, and nothing of the engine goes on for seconds, whoever has asked.
    """
    for prompts in ([[11]], [[11], [12]]):
        asked = {"prompt": prompts, "max_tokens": 2, "logprobs": 1}
        answer = httpx.post(f"{engine.url}/v1/completions", json=asked, timeout=ANSWER_S, trust_env=False)
        assert answer.status_code == 200, answer.text


def attack(
    pair: Pair, order: str, seed: int, count: int, *, turns: int = 1, compare: bool = False
) -> dict[str, list[float]]:
    """How long decent requests took, by what was beside them.

    :param count: of hostile requests in each turn.
    :param compare: each is followed by one of benign requests, which ask for as much work at the same rate.
    :raises AssertionError: a process ended, a decent request failed, or an engine is left alone for it.
    """
    took: dict[str, list[float]] = {"nothing": [], "hostile": [], "benign": []}
    proxy = layerflow_proxy(
        pair.prefill, pair.decode, order, pair.folder, short_prompt_tokens=0, prefill_timeout_s=20, admin_socket=""
    )
    for engine in (pair.prefill, pair.decode) if compare else ():
        warm_up(engine)
    with closing(proxy):
        proxy.wait_up()
        clients = Clients(pair, proxy)
        wanted = clients.tokens(FIRST)
        assert len(wanted) == TOKENS
        took["nothing"] += [clients.decent() for _ in range(DECENT)]
        statuses: list[int] = []
        for turn in range(turns):
            requests = list(hostile_requests(1000 * seed + turn, count))
            hostile = clients.take_turn(requests, [0.0] * count)
            took["hostile"] += hostile.decent
            statuses += hostile.statuses
            if compare:
                benign = [request.benign(status) for request, status in zip(requests, hostile.statuses, strict=True)]
                took["benign"] += clients.take_turn(benign, hostile.began).decent
        assert clients.tokens(FIRST) == wanted
        assert 200 in statuses and 400 in statuses
        health = httpx.get(proxy.url + "/health", trust_env=False, timeout=ANSWER_S).json()
        assert "down" not in {each["state"] for each in health["prefill"] + health["decode"]}, proxy.tail()
    for engine in (pair.prefill, pair.decode):
        assert engine.process.poll() is None, engine.tail()
        assert httpx.get(engine.url + "/health", trust_env=False, timeout=ANSWER_S).status_code == 200
    assert fetch_status(pair.server.endpoint)
    return took


@pytest.mark.timeout(600)
@pytest.mark.parametrize("order", ORDERS)
def test_hostile_requests(pair: Pair, order: str) -> None:
    attack(pair, order, 1, SHORT)


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("order", ORDERS)
def test_ten_thousand_hostile_requests(pair: Pair, order: str) -> None:
    """Prints a decent client's p95 beside hostile requests over its p95 beside benign ones.

    Turns of both alternate. A benign turn has as many requests as the hostile one before it, to the same processes,
    each no earlier than its hostile one began, with the same prompts' lengths and outputs where that was answered, and
    refused where that was refused. So what a crowd of that size costs is in both, and the ratio is what being hostile
    adds. Both engines have compiled before what only a first request waits for.
    """
    took = attack(pair, order, 2, A_TURN, turns=TURNS, compare=True)
    p95 = {beside: statistics.quantiles(times, n=20)[-1] for beside, times in took.items()}
    for beside, times in took.items():
        print(f"{order}, beside {beside}: {len(times)} decent requests, p95 {p95[beside] * 1000:.0f} ms")
    print(f"{order}: hostile over benign {p95['hostile'] / p95['benign']:.2f}")
