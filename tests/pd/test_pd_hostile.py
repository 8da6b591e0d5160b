"""Requests that no decent client sends, to real vLLMs behind the proxy: no process ends, other requests are right."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from comparison import prompt
from legs import ORDERS
from servers import ANSWER_S, Program, closing, complete, layerflow_proxy, tokens_of, vllm_server

from layerflow.agent.connection.control import fetch_status
from layerflow_cli.bench.harness import ServerProcess
from layerflow_testing.hostile_requests import HostileRequest, hostile_requests

CHUNK = 64
TOKENS = 3
AT_ONCE = 8
DECENT = 20
"""Requests of another client whose times are taken before the others come."""
SHORT, CAMPAIGN = 40, 3400  # a run of each order


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


class Attack:
    """Hostile requests and a decent client's beside them.

    Half of the former go through the proxy, half to the engines' own API, where no proxy drops what a client says.
    """

    def __init__(self, pair: Pair, proxy: Program, seed: int, count: int) -> None:
        self._pair, self._proxy = pair, proxy
        self._waiting = enumerate(hostile_requests(seed, count))
        self._lock = threading.Lock()
        self.statuses: list[int] = []
        self.alone: list[float] = []
        self.beside: list[float] = []

    def run(self) -> None:
        """Until each has its answer."""
        numbers = itertools.count(50)
        wanted = self._decent(next(numbers), self.alone)
        assert len(wanted) == TOKENS
        for _ in range(DECENT):
            self._decent(next(numbers), self.alone)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            attackers = [threads.submit(self._attack) for _ in range(AT_ONCE)]
            while not all(attacker.done() for attacker in attackers):
                self._decent(next(numbers), self.beside)
        for attacker in attackers:
            attacker.result()
        assert self._decent(50, []) == wanted

    def _attack(self) -> None:
        targets = (self._proxy.url, self._proxy.url, self._pair.prefill.url, self._pair.decode.url)
        with httpx.Client(trust_env=False, timeout=ANSWER_S) as client:
            while True:
                with self._lock:
                    number, request = next(self._waiting, (0, None))
                if request is None:
                    return
                self.statuses.append(self._send(client, targets[number % len(targets)], request))

    def _send(self, client: httpx.Client, url: str, request: HostileRequest) -> int:
        try:
            answer = client.post(url + request.path, content=request.body, headers=list(request.headers))
        except httpx.HTTPError as error:
            raise AssertionError(f"{url} {request.about}: {error!r}\n{self._tails()}") from None
        assert "the proxy failed" not in answer.text, f"{request.about}\n{self._tails()}"
        return answer.status_code

    def _decent(self, number: int, times: list[float]) -> tuple[int, ...]:
        began = time.monotonic()
        answer = complete(self._proxy.url, prompt(number, 130), TOKENS)
        times.append(time.monotonic() - began)
        assert answer.status_code == 200, f"{answer.text}\n{self._tails()}"
        return tokens_of(answer)

    def _tails(self) -> str:
        return "\n\n".join(each.tail() for each in (self._proxy, self._pair.prefill, self._pair.decode))


def attack(pair: Pair, order: str, seed: int, count: int) -> Attack:
    """:raises AssertionError: a process ended, a decent request failed, or an engine is left alone for it."""
    proxy = layerflow_proxy(
        pair.prefill, pair.decode, order, pair.folder, short_prompt_tokens=0, prefill_timeout_s=20, admin_socket=""
    )
    with closing(proxy):
        proxy.wait_up()
        found = Attack(pair, proxy, seed, count)
        found.run()
        assert 200 in found.statuses and 400 in found.statuses
        health = httpx.get(proxy.url + "/health", trust_env=False).json()
        assert "down" not in {each["state"] for each in health["prefill"] + health["decode"]}, proxy.tail()
    for engine in (pair.prefill, pair.decode):
        assert engine.process.poll() is None, engine.tail()
        assert httpx.get(engine.url + "/health", trust_env=False, timeout=ANSWER_S).status_code == 200
    assert fetch_status(pair.server.endpoint)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("order", ORDERS)
def test_hostile_requests(pair: Pair, order: str) -> None:
    attack(pair, order, 1, SHORT)


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("order", ORDERS)
def test_ten_thousand_hostile_requests(pair: Pair, order: str) -> None:
    found = attack(pair, order, 2, CAMPAIGN)
    for name, times in (("alone", found.alone), ("beside", found.beside)):
        print(f"{order}, {name}: {len(times)} requests, p95 {statistics.quantiles(times, n=20)[-1] * 1000:.0f} ms")
