"""vLLM's API server, routers and proxies as processes, asked over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from engines import COMMON, ENVIRONMENT, MODELS, PER_MODEL, connector

from layerflow_testing.ports import held_ports
from layerflow_testing.stub_engine import StubEngine

START_S = 150.0
ANSWER_S = 120.0
STOP_S = 15.0
POLL_S = 0.1
BIN = Path(sys.executable).parent


class Program:
    """A process that serves HTTP on this machine.

    :param name: of its log below `folder`.
    :param health: path that answers 200 once it is up.
    """

    def __init__(
        self, name: str, command: Sequence[str], port: int, folder: Path, *, health: str = "/health",
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self._log = folder / f"{name}.log"
        self._command, self._health = list(command), health
        self._environment = os.environ | dict(environment or {})
        self.start()

    def start(self) -> None:
        """Start it, again after :meth:`kill`; :meth:`wait_up` waits for it."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )

    def wait_up(self) -> None:
        """:raises AssertionError: it died, or is not up in time."""
        for _ in range(int(START_S / POLL_S)):  # not by the clock: a machine that stands still takes no time of it
            assert self.process.poll() is None, f"ended with code {self.process.returncode}\n{self.tail()}"
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + self._health, timeout=2.0, trust_env=False).is_success:
                    return
            time.sleep(POLL_S)
        raise AssertionError(f"not up after {START_S:g} s\n{self.tail()}")

    def tail(self) -> str:
        """The end of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])

    def output(self) -> str:
        """Its log."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL, with all of its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        """To it and its children."""
        os.killpg(self.process.pid, number)

    def close(self) -> None:
        """SIGTERM; SIGKILL if that does not help."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        self.kill()

    def metric(self, name: str) -> float:
        """The sum of a Prometheus metric over its labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=10.0, trust_env=False).text
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.M))


def vllm_server(
    name: str,
    model: str,
    folder: Path,
    endpoint: str | None,
    role: str = "kv_both",
    *,
    config: Any = None,
    arguments: Mapping[str, Any] | None = None,
    **extra: Any,
) -> Program:
    """vLLM's API server.

    :param endpoint: of its layerflow server; None and no `config` = a vLLM by itself.
    :param config: another ``kv_transfer_config``.
    :param arguments: over the ones for all and for the model.
    :param extra: of the connector.
    """
    port = held_ports(1)[0]
    arguments = COMMON | {"served_model_name": "model"} | PER_MODEL[model] | dict(arguments or {})
    arguments = {key: value for key, value in arguments.items() if key != "skip_tokenizer_init"}
    if endpoint is not None:
        config = connector(endpoint, role, **extra)
    if config is not None:
        arguments["kv_transfer_config"] = json.dumps(config)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODELS / model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log", "--shutdown-timeout", "5"]
    for key, value in arguments.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return Program(name, command, port, folder, environment=ENVIRONMENT)


def layerflow_proxy(
    prefill: Program | StubEngine, decode: Program, order: str, folder: Path, *, stores: str = "", **settings: Any
) -> Program:
    """``layerflow proxy`` in front of two engines.

    :param stores: control address of the prefill engine's server, where the decode engine has another.
    """
    port = held_ports(1)[0]
    from_where = f"{prefill.url}={stores}" if stores else prefill.url
    command = [sys.executable, "-m", "layerflow_cli", "proxy", "--prefill", from_where, "--decode", decode.url]
    command += ["--order", order, "--host", "127.0.0.1", "--port", str(port)]
    for key, value in settings.items():
        command += ["--set", f"proxy.{key}={value}"]
    return Program(f"proxy-{order}", command, port, folder)


def vllm_router(prefill: Program, decode: Program, folder: Path, *, bootstrap: int = 0) -> Program:
    """vllm-router; two phases, or with a bootstrap port both legs at once."""
    port, metrics = held_ports(2)
    command = [str(BIN / "vllm-router"), "--vllm-pd-disaggregation", "--prefill", prefill.url]
    command += [str(bootstrap)] if bootstrap else []
    command += ["--decode", decode.url, "--kv-connector", "mooncake" if bootstrap else "nixl"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    return Program("router", command, port, folder)


def complete(url: str, prompt: Sequence[int], max_tokens: int, **more: Any) -> httpx.Response:
    """A completion of token ids, greedy, with the generated ids in the answer."""
    body = {"model": "model", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return httpx.post(
        f"{url}/v1/completions", json=body | {"return_token_ids": True} | more, timeout=ANSWER_S, trust_env=False
    )


def tokens_of(response: httpx.Response) -> tuple[int, ...]:
    """What was generated.

    :raises AssertionError: the answer is an error.
    """
    assert response.status_code == 200, response.text
    return tuple(response.json()["choices"][0]["token_ids"])


def streamed(url: str, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """The same, as a stream.

    :raises AssertionError: it holds an error, or does not end as a stream does.
    """
    tokens, error = streamed_or_error(url, prompt, max_tokens)
    assert not error, error
    return tokens


def streamed_or_error(url: str, prompt: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], str]:
    """What came as a stream, and the error that it ended with; "" = it ended as a stream does.

    :raises AssertionError: it ended without a word.
    """
    body = {"model": "model", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    tokens: list[int] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=ANSWER_S, trust_env=False) as response:
        if response.status_code != 200:
            assert json.loads(response.read())["error"], response.text
            return (), str(response.status_code)
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    for line in lines:
        if line == "[DONE]":
            return tuple(tokens), ""
        told = json.loads(line)
        if "error" in told:
            return tuple(tokens), "an error event"
        for choice in told["choices"]:
            tokens += choice.get("token_ids") or []
    raise AssertionError(f"a stream ended without a word after {len(tokens)} tokens")


@contextlib.contextmanager
def closing(*programs: Program) -> Iterator[None]:
    """Stop them at the end."""
    try:
        yield
    finally:
        for program in programs:
            program.close()
