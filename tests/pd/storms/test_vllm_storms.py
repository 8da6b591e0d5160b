"""Real vLLMs over two servers behind ``layerflow proxy``, under load, while each of them dies or stops.

Every answer has the right tokens or is a true error, in time: none is 200 without all of its content.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from comparison import prompt
from e2e.rounds import record
from engines import Engine
from pd_balance import Balance, Patience
from servers import complete, layerflow_proxy, streamed_or_error, vllm_server

from layerflow_cli.bench.harness import ServerProcess

MAX_TOKENS = 6
TOKENS = 600
IN_FLIGHT = 4
AGAIN_S = 60.0
HITS = "vllm:external_prefix_cache_hits_total"
SLOW = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}  # ten steps a prompt: there is time to fail in
SHORT = [("kill", "importer"), ("kill", "reader"), ("stop", "P"), ("kill", "owner"), ("kill", "proxy")]
PATIENT = {"prefill_timeout_s": 10, "first_token_timeout_s": 20, "probe_interval_s": 0.5, "breaker_open_s": 1}

Faults = list[tuple[str, str]]


class Site:
    """The prefiller's server is the owner, the decoder's the reader."""

    def __init__(self, serve: Callable[..., ServerProcess], folder: Path, plain: Engine) -> None:
        lent = {"pd__handoff_lease_s": 1.0, "pool__lease_ms": 1000, "peers__lease_ms": 2000}
        self.owner = serve(peers__serve="true", peers__link_address="127.0.0.1:0", peers__lease_share=1, **lent)
        self.reader = serve(peers__learn="true", **lent)
        self.servers = {"owner": self.owner, "reader": self.reader}
        stores, extra = [self.owner.endpoint], {"chunk_tokens": 64}
        to_prefill, to_decode = {"servers": stores, "deadline_s": 4}, {"prefill_servers": stores, "deadline_s": 4}
        prefill = vllm_server(
            "P", "llama", folder, self.owner.endpoint, "kv_producer", pd=to_prefill, arguments=SLOW, **extra
        )
        decode = vllm_server("D", "llama", folder, self.reader.endpoint, "kv_consumer", pd=to_decode, **extra)
        proxy = layerflow_proxy(
            prefill, decode, "concurrent", folder, stores=self.owner.endpoint, short_prompt_tokens=0, **PATIENT
        )
        self.programs = {"P": prefill, "D": decode, "proxy": proxy}
        self.plain, self.dice = plain, random.Random(22)
        self.balance = Balance(self.owner, self.reader)
        self.counts: Counter[str] = Counter()
        self._prompts = 0
        self._never = threading.Event()

    def ask(self, pool: ThreadPoolExecutor, proxied: bool) -> Future[str]:
        """A new prompt, as a stream or not. What comes of it: ``right``, or the error.

        :param proxied: the proxy is alive all the time: without it there may be no answer at all.
        """
        self._prompts += 1
        asked = prompt(90_000 + self._prompts, TOKENS)
        wanted = self.plain.one(asked, max_tokens=MAX_TOKENS).tokens
        stream = self._prompts % 2 == 0
        return pool.submit(self._answer, asked, wanted, stream, proxied)

    def _answer(self, asked: list[int], wanted: tuple[int, ...], stream: bool, proxied: bool) -> str:
        url = self.programs["proxy"].url
        try:
            if stream:
                tokens, error = streamed_or_error(url, asked, MAX_TOKENS)
                assert tokens == wanted[: len(tokens)], (tokens, wanted)
                assert error or tokens == wanted, "a stream without all of its content ended as if it were whole"
                return error or "right"
            answer = complete(url, asked, MAX_TOKENS)
        except httpx.HTTPError as error:
            if proxied:
                raise
            return type(error).__name__
        if answer.status_code != 200:
            assert answer.json()["error"], answer.text
            return str(answer.status_code)
        tokens = tuple(answer.json()["choices"][0]["token_ids"])
        assert tokens == wanted, (tokens, wanted)
        return "right"

    def strike(self, what: str, victim: str, stopped_s: float) -> None:
        """Let it happen at some moment under load; then all is answered, handed over again, and given back."""
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            answers = [self.ask(pool, victim != "proxy") for _ in range(IN_FLIGHT)]
            self._never.wait(self.dice.uniform(0.0, 1.5))
            if what == "kill":
                self.kill(victim)
            else:
                self.stop(victim, stopped_s)
            for answer in answers:
                self.counts[answer.result()] += 1
            self.counts[f"{what} {victim}"] += 1
            self.recover(pool)
        self.balance.settle({})

    def recover(self, pool: ThreadPoolExecutor) -> None:
        """Ask until a prompt is handed over again."""
        patience = Patience(AGAIN_S)
        while True:
            before = self.programs["D"].metric(HITS)
            told = self.ask(pool, True).result()
            self.counts[told] += 1
            if told == "right" and self.programs["D"].metric(HITS) - before == TOKENS - 1:
                return
            assert not patience.over(), f"nothing is handed over any more: {told}, {self.balance.state()}"
            self._never.wait(0.1)

    def kill(self, victim: str) -> None:
        """SIGKILL, and start it again."""
        if victim in self.servers:
            self.servers[victim].kill()
            self.servers[victim].restart()
        elif victim in self.programs:
            self.programs[victim].kill()
            self.programs[victim].start()
            self.programs[victim].wait_up()
        else:
            os.kill(self.balance.host_pid(victim), signal.SIGKILL)

    def stop(self, victim: str, seconds: float) -> None:
        """SIGSTOP, and later SIGCONT, unless it was killed meanwhile for that."""
        if victim in self.programs:
            send = self.programs[victim].signal
        else:
            pid = self.servers[victim].process.pid if victim in self.servers else self.balance.host_pid(victim)

            def send(number: signal.Signals) -> None:
                os.kill(pid, number)

        send(signal.SIGSTOP)
        self._never.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            send(signal.SIGCONT)


@pytest.fixture(scope="module")
def site(
    serve: Callable[..., ServerProcess], plain: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    it = Site(serve, tmp_path_factory.mktemp("storm"), plain("llama"))
    try:
        for program in it.programs.values():
            program.wait_up()
        yield it
    finally:
        for program in it.programs.values():
            program.close()


def long(name: str, times: int, *victims: str) -> object:
    """Each third of them is a stop."""
    faults = [("kill" if each % 3 else "stop", victim) for each in range(times) for victim in victims]
    return pytest.param(faults, 10.0, id=name, marks=[pytest.mark.campaign, pytest.mark.timeout(7200)])


@pytest.mark.parametrize(
    ("faults", "stopped_s"),
    [
        pytest.param(SHORT, 2.5, id="short", marks=pytest.mark.timeout(400)),
        long("proxy", 30, "proxy"),
        long("servers", 30, "owner", "reader"),
        long("hosts", 30, "exporter", "importer"),
        long("engines", 10, "P", "D"),
    ],
)
def test_right_tokens_or_a_true_error(site: Site, faults: Faults, stopped_s: float) -> None:
    site.counts.clear()
    with ThreadPoolExecutor(1) as pool:
        site.recover(pool)
    site.balance.settle({})
    for what, victim in faults:
        site.strike(what, victim, stopped_s)
    record("pd_vllm_storm", **site.counts)
