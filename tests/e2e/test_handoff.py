"""Prefill and decode in engines of their own, over one ``layerflow run``: the decoder follows the saves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from e2e.children import PIPE, Child, follow_all, tokens_of
from e2e.known import PATIENCE_S, KnownWorker, eventually, small_spec
from e2e.stopping import stopped
from layerflow.agent import Control
from layerflow_cli.bench.harness import ServerProcess
from layerflow_engine import Engine, Result
from layerflow_engine.config import TINY_GQA, TINY_HYBRID, TINY_MLA, EngineConfig
from layerflow_engine.connection import StepHooks
from layerflow_engine.glue import attach
from layerflow_engine.handoff import DecodeConnection, PrefillConnection
from layerflow_engine.texts import passage

CHUNK = 64
PROMPT = passage(300)
SHAPES = {"gqa": TINY_GQA, "mla": TINY_MLA, "hybrid": TINY_HYBRID}
TIMEOUT_S = 60.0
ENDED_S = 3.0
"""How long an engine that ends a hand-off asks a server that has ended."""
PATIENT = {"lookup_timeout_s": PATIENCE_S, "wait_s": PATIENCE_S}


class Paced(PrefillConnection):
    """A prefill engine that computes one layer each time it is told to.

    :ivar pipe: it says ``(step, layer)`` before a layer is done, and goes on when it hears something.
    """

    pipe: PIPE

    def open_step(self, spans: Any) -> StepHooks:
        return _PacedStep(super().open_step(spans), self.pipe)


class _PacedStep:
    def __init__(self, honest: StepHooks, pipe: PIPE) -> None:
        self._honest, self._pipe = honest, pipe

    def wait_layer(self, layer: int) -> Any:
        return self._honest.wait_layer(layer)

    def layer_done(self, layer: int) -> None:
        self._pipe.send(layer)
        self._pipe.recv()
        self._honest.layer_done(layer)

    def __enter__(self) -> StepHooks:
        self._honest.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._honest.__exit__(*error)


def prefill(pipe: PIPE, endpoint: str, shape: str) -> None:
    """Prompts come as (id, text); answers go as their first token."""
    torch.set_num_threads(1)
    engine = Engine(SHAPES[shape])
    connection = attach(engine, endpoint, "P", chunk_tokens=CHUNK, connect=Paced, **PATIENT)
    assert isinstance(connection, Paced)
    connection.pipe = pipe
    pipe.send("ready")
    while True:
        name, text = pipe.recv()
        engine.submit(text, 1, name)
        engine.run()
        engine.drain()
        pipe.send(("answer", engine.results.pop(name).tokens))


class Decoder:
    """The decode engine, on a thread of this process."""

    def __init__(
        self, endpoint: str, config: EngineConfig, patience_s: float = TIMEOUT_S, lookup_timeout_s: float = PATIENCE_S
    ) -> None:
        self.engine = Engine(config)
        made = attach(
            self.engine,
            endpoint,
            "D",
            mode="layerwise",
            chunk_tokens=CHUNK,
            connect=lambda agent, mode: DecodeConnection(agent, mode, patience_s=patience_s),
            **PATIENT | {"lookup_timeout_s": lookup_timeout_s},
        )
        assert isinstance(made, DecodeConnection)
        self.connection = made
        self.result: Result | None = None
        self._thread: threading.Thread | None = None

    def start(self, name: str) -> None:
        def run() -> None:
            torch.set_num_threads(1)
            self.engine.submit(PROMPT, 8, name)
            self.engine.run(TIMEOUT_S)
            self.engine.drain(TIMEOUT_S)
            self.result = self.engine.results.pop(name)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def finish(self) -> Result:
        assert self._thread is not None
        self._thread.join(TIMEOUT_S)
        assert self.result is not None, "the decoder did not end"
        return self.result

    def ready_layers(self) -> int:
        """So many leading layers of the open step are in place."""
        steps = self.connection.agent._steps.all()
        if not steps or not steps[0].loads:
            return -1
        count = 0
        while count < steps[0].num_layers and steps[0].is_ready(count):
            count += 1
        return count


@pytest.fixture(params=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def alone(shape: str) -> tuple[int, ...]:
    (result,) = Engine(SHAPES[shape]).generate([PROMPT], 8)
    return result.tokens


def quiet(control: Control) -> bool:
    status = control.status()
    pool, flow = status["pool"], status["flow"]
    return pool["pinned"] == pool["half_written"] == flow["steps"] == flow["following"] == 0


def last_step(child: Child, config: EngineConfig) -> None:
    """Let the prefiller compute all of its steps but the last one, of which nothing is done yet."""
    steps = -(-len(PROMPT) // config.step_tokens)
    for _ in range(steps - 1):
        for layer in range(config.num_layers):
            assert child.hear() == layer
            child.pipe.send("go on")
    assert child.hear() == 0


def test_the_decoder_loads_layers_while_the_prefiller_computes(serve: Callable[..., ServerProcess], shape: str) -> None:
    server, config = serve(), SHAPES[shape]
    control = Control(server.endpoint, "observer")
    child = Child(prefill, server.endpoint, shape)
    assert child.hear() == "ready"
    decoder = Decoder(server.endpoint, config)
    decoder.start("r")  # before the prefiller has heard of it: both legs of a request leave at once
    assert eventually(lambda: control.status()["handoffs"]["announced"] == 1)
    child.pipe.send(("r", PROMPT))
    last_step(child, config)
    assert eventually(lambda: decoder.ready_layers() == 0), "the decoder has not opened its step"
    for layer in range(config.num_layers):
        assert decoder.ready_layers() <= layer, "a layer was there before it was computed"
        child.pipe.send("go on")
        if layer + 1 < config.num_layers:
            assert child.hear() == layer + 1
            # The prefiller stands before its next layer: this one has come while it computes.
            if layer < config.num_layers - 2:
                assert eventually(lambda layer=layer: decoder.ready_layers() > layer), f"layer {layer} did not come"
    result = decoder.finish()
    assert child.hear() == ("answer", alone(shape)[:1])
    assert result.tokens == alone(shape)
    assert (result.cached_tokens, result.restarts) == (len(PROMPT) - 1, 0)
    assert eventually(lambda: quiet(control)), control.status()
    decoder.connection.close()
    child.close()
    control.close()


def test_a_prefiller_killed_in_mid_save(serve: Callable[..., ServerProcess], shape: str) -> None:
    """Its blocks fail at once, long before any deadline, and the decoder computes the prompt."""
    server, config = serve(), SHAPES[shape]
    control = Control(server.endpoint, "observer")
    child = Child(prefill, server.endpoint, shape)
    assert child.hear() == "ready"
    decoder = Decoder(server.endpoint, config, patience_s=3000.0)
    decoder.start("r")
    child.pipe.send(("r", PROMPT))
    last_step(child, config)
    child.pipe.send("go on")
    assert child.hear() == 1
    assert eventually(lambda: decoder.ready_layers() >= 0), "the decoder has not opened its step"
    child.kill()
    result = decoder.finish()
    assert result.tokens == alone(shape)
    assert result.restarts == 1
    state = control.watch_handoff("r", PATIENCE_S)
    # One process was worker and scheduler: the server sees either of its connections end first.
    assert state.state == "failed" and (
        "worker of its engine" in state.reason or state.reason == "who opened it is gone"
    )
    assert eventually(lambda: quiet(control)), control.status()
    decoder.connection.close()
    control.close()


def test_a_handoff_that_nobody_opens(serve: Callable[..., ServerProcess]) -> None:
    server = serve()
    decoder = Decoder(server.endpoint, TINY_GQA, patience_s=0.3)
    decoder.start("r")
    result = decoder.finish()
    assert result.tokens == alone("gqa")
    assert (result.cached_tokens, result.restarts) == (0, 0)
    decoder.connection.close()


def test_a_decoder_that_gives_up_costs_the_prefiller_nothing(serve: Callable[..., ServerProcess]) -> None:
    server = serve()
    control = Control(server.endpoint, "observer")
    child = Child(prefill, server.endpoint, "gqa")
    assert child.hear() == "ready"
    decoder = Decoder(server.endpoint, TINY_GQA)
    decoder.start("r")
    child.pipe.send(("r", PROMPT))
    last_step(child, TINY_GQA)
    assert eventually(lambda: decoder.ready_layers() == 0)
    # From another thread than the engine's, as when the client hangs up in the middle of a step.
    (name,) = decoder.connection.agent._steps.all()[0].requests
    decoder.connection.agent.abort(name)
    for layer in range(1, TINY_GQA.num_layers):
        child.pipe.send("go on")
        assert child.hear() == layer
    child.pipe.send("go on")
    assert child.hear() == ("answer", alone("gqa")[:1])
    decoder.connection.agent.close()
    control.release_handoff("r")
    assert eventually(lambda: quiet(control)), control.status()
    child.close()
    control.close()


def test_a_killed_server(serve: Callable[..., ServerProcess]) -> None:
    """Both engines go on alone, with the right tokens."""
    server = serve()
    child = Child(prefill, server.endpoint, "gqa")
    assert child.hear() == "ready"
    decoder = Decoder(server.endpoint, TINY_GQA, patience_s=3000.0, lookup_timeout_s=ENDED_S)
    decoder.start("r")
    child.pipe.send(("r", PROMPT))
    last_step(child, TINY_GQA)
    assert eventually(lambda: decoder.ready_layers() == 0)
    server.kill()
    result = decoder.finish()
    assert result.tokens == alone("gqa")
    assert result.restarts == 1
    for layer in range(1, TINY_GQA.num_layers):
        child.pipe.send("go on")
        assert child.hear() == layer
    child.pipe.send("go on")
    assert child.hear() == ("answer", alone("gqa")[:1])
    decoder.connection.close()
    child.close()


def test_a_server_that_is_to_stop_lets_a_handoff_end(serve: Callable[..., ServerProcess]) -> None:
    """SIGTERM in the middle of a prefill: the prefiller's steps and the decoder's are taken, and nothing is lost."""
    server = serve(server__drain_timeout_s=TIMEOUT_S)
    child = Child(prefill, server.endpoint, "gqa")
    assert child.hear() == "ready"
    decoder = Decoder(server.endpoint, TINY_GQA, lookup_timeout_s=ENDED_S)
    child.pipe.send(("r", PROMPT))
    assert child.hear() == 0
    control = Control(server.endpoint, "observer")
    assert control.status()["handoffs"]["open"] == 1
    server.process.terminate()
    assert eventually(lambda: not control.status()["healthy"])
    decoder.start("r")
    steps = -(-len(PROMPT) // TINY_GQA.step_tokens)
    for layer in [*range(1, TINY_GQA.num_layers), *[*range(TINY_GQA.num_layers)] * (steps - 1)]:
        child.pipe.send("go on")
        assert child.hear() == layer
    child.pipe.send("go on")
    result = decoder.finish()
    assert result.tokens == alone("gqa")
    assert (result.cached_tokens, result.restarts) == (len(PROMPT) - 1, 0)
    assert child.hear() == ("answer", alone("gqa")[:1])
    assert server.process.wait(TIMEOUT_S) == 0
    control.close()
    decoder.connection.close()
    child.close()


def test_a_prefiller_never_waits_for_a_decoder_that_is_stopped(serve: Callable[..., ServerProcess]) -> None:
    """50 hand-offs are open and followed, the decoder's process is stopped, and the prefiller stores every prompt."""
    layers, tokens, seeds = 4, 100, list(range(50))
    # The decoder's grants fill the whole budget, and it reports none of them.
    server = serve(
        pool__size="32MiB",
        transfer__max_transfer_bytes="4KiB",
        transfer__max_inflight_bytes="16KiB",
        pd__handoff_share=0.5,
    )
    spec = small_spec(layers)
    control = Control(server.endpoint, "P", spec, lookup_timeout_s=20.0)
    with KnownWorker(server.endpoint, spec, engine="P") as worker:
        chains = [worker.agent.chain(tokens_of(seed, tokens)) for seed in seeds]
        for seed, chain in zip(seeds, chains, strict=True):
            assert control.open_handoff(f"h{seed}", chain, tokens, timeout_s=100.0)
        child = Child(follow_all, server.endpoint, layers, tokens, seeds)
        assert child.hear(60.0) == [tokens - 1] * 50
        assert child.process.pid is not None
        with stopped(child.process.pid):
            for seed, chain in zip(seeds, chains, strict=True):
                worker.serve(chain, look=False)  # asserts that all of it is stored
                control.end_handoff(f"h{seed}", tokens=tokens)
            assert eventually(lambda: control.status()["handoffs"]["completed"] == 50)
            status = control.status()
            assert status["flow"]["loaded_bytes"] == 0, "the decoder was not stopped: the test has tested nothing"
            assert status["flow"]["load_inflight_bytes"] > 0
        child.pipe.send("go on")
        assert child.hear(60.0) == (0, 0)
        child.close()
    control.close()
