"""What ``layerflow proxy`` adds to the first token: engines that compute nothing, each a process, and a client.

The decoder takes 30 ms to its first token, the prefiller 10 ms. The same client asks them directly and through the
proxy, in turns: ``concurrent`` beside a request to the decoder alone, ``prefill-first`` beside the two requests that a
client would make by itself. ``added_ms`` is the difference of neighbours. ``cpu_ms`` is what the proxy's thread ran
until the first token was there, as the kernel counts it: on a machine with other work it says what is the proxy's own.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from layerflow.errors import LayerflowError

_START_S = 60.0
_PATH = "/v1/completions"
_PREFILL_S, _DECODE_S = 0.010, 0.030


def measure(rounds: int = 200, streams: int = 0, prompt_chars: int = 8192) -> dict[str, Any]:
    """Ask in turns, for each of the two orders.

    :param rounds: requests each way.
    :param streams: others that are open meanwhile, 20 events a second each.
    :param prompt_chars: of each prompt.
    :returns: by order ``added_ms`` and ``cpu_ms``, p50 and p99, and the medians ``direct_ms`` and ``proxied_ms``.
    """
    return {order: _measure(order, rounds, streams, prompt_chars) for order in ("concurrent", "prefill-first")} | {
        "rounds": rounds,
        "streams": streams,
    }


def _measure(order: str, rounds: int, streams: int, prompt_chars: int) -> dict[str, Any]:
    with ExitStack() as stack:
        prefill, _ = stack.enter_context(_process("-m", "layerflow_testing.stub_engine", f"first_s={_PREFILL_S}"))
        decode, _ = stack.enter_context(
            _process("-m", "layerflow_testing.stub_engine", f"first_s={_DECODE_S}", "between_s=0.05")
        )
        flags = ("--prefill", prefill, "--decode", decode, "--order", order, "--port", "0", "--log-level", "error")
        proxy, pid = stack.enter_context(_process("-m", "layerflow_cli", "proxy", *flags))
        client = stack.enter_context(httpx.Client(timeout=60, trust_env=False, verify=False))  # noqa: S501 - http
        ended = threading.Event()
        stack.callback(ended.set)
        for _ in range(streams):
            threading.Thread(target=_stream, args=(proxy, ended), daemon=True).start()
        direct, proxied, ran = [], [], []
        running = Path(f"/proc/{pid}/task/{pid}/schedstat")
        for number in range(rounds + 5):
            prompt = f"{number} " * (prompt_chars // 4)
            direct.append(_direct(client, order, prefill, decode, prompt))
            before = int(running.read_text().split()[0])
            proxied.append(_first_token(client, proxy, prompt, lambda: ran.append(int(running.read_text().split()[0]))))
            ran[-1] -= before
    return {
        "added_ms": _percentiles([after - before for before, after in zip(direct[5:], proxied[5:], strict=True)]),
        "cpu_ms": _percentiles([nanoseconds / 1e6 for nanoseconds in ran[5:]]),
        "direct_ms": statistics.median(direct),
        "proxied_ms": statistics.median(proxied),
    }


def _direct(client: httpx.Client, order: str, prefill: str, decode: str, prompt: str) -> float:
    began = time.perf_counter()
    if order == "prefill-first":
        client.post(prefill + _PATH, json={"prompt": prompt, "max_tokens": 1}).raise_for_status()
    return (time.perf_counter() - began) * 1e3 + _first_token(client, decode, prompt)


def _percentiles(values: list[float]) -> dict[str, float]:
    """Of few values p99 is near the largest, and not beyond it."""
    p99 = statistics.quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]
    return {"p50": statistics.median(values), "p99": p99}


def _first_token(client: httpx.Client, url: str, prompt: str, got: Callable[[], None] = lambda: None) -> float:
    """Milliseconds until the first event.

    :param got: called then.
    """
    began = time.perf_counter()
    first = 0.0
    with client.stream("POST", url + _PATH, json={"prompt": prompt, "max_tokens": 2, "stream": True}) as answer:
        answer.raise_for_status()
        for _ in answer.iter_raw():
            if not first:
                first = time.perf_counter()
                got()
    return (first - began) * 1e3


def _stream(url: str, ended: threading.Event) -> None:
    body = {"prompt": "other", "max_tokens": 1_000_000, "stream": True}
    try:
        with httpx.stream("POST", url + _PATH, json=body, timeout=60, trust_env=False) as answer:
            for _ in answer.iter_raw():
                if ended.is_set():
                    return
    except httpx.HTTPError:
        if not ended.is_set():  # afterwards the proxy is killed under it
            raise


@contextmanager
def _process(*arguments: str) -> Iterator[tuple[str, int]]:
    """A Python process that prints its URL when it accepts requests: that, and its id."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    giving_up = threading.Timer(_START_S, process.kill)
    try:
        giving_up.start()
        assert process.stdout is not None
        line = process.stdout.readline().split()
        giving_up.cancel()
        if not line:
            raise LayerflowError(f"{' '.join(arguments)} ended with code {process.wait()} before it was listening")
        yield line[-1], process.pid
    finally:
        giving_up.cancel()
        process.kill()
        process.communicate()
