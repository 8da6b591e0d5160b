"""An engine that computes on a stream of its own, with bytes that are known, on the simulated device."""

from __future__ import annotations

import numpy as np
import torch
from e2e.known import eventually

from device.simulated import Machine, Stream, filled
from layerflow import Agent, EmbeddedServer, GroupSpec, ModelSpec, NoStep, Plane, Settings, Step, StepRequest

LAYERS, BLOCKS, SIZE, WIDTH = 4, 48, 16, 64
PATIENCE_S = 20.0
PLANES = (Plane("k", "uint8", (WIDTH,)), Plane("v", "uint8", (WIDTH,)))
SPEC = ModelSpec("m", "c", (GroupSpec("full", SIZE, tuple(range(LAYERS)), PLANES),), chunk_tokens=32)
TOKENS = list(range(SIZE * 8))
PATIENT = Settings(pool={"size": "8MiB"}, transfer={"step_timeout_ms": 60_000}, server={"liveness_ms": 20_000})
"""Of a server: a busy machine may hold a thread up for seconds, and that must neither end a load nor a session."""
HERE, THERE = np.arange(8)[::-1].copy(), np.arange(8) * 2 + 9


class Engine:
    """Its thread enqueues on a stream that is not the default one, and hardly ever waits for it."""

    def __init__(self, machine: Machine, server: EmbeddedServer) -> None:
        self.machine = machine
        self.stream: Stream = machine.Stream()
        self.tensors = {
            layer: {plane: torch.zeros((BLOCKS, SIZE, WIDTH), dtype=torch.uint8) for plane in "kv"}
            for layer in range(LAYERS)
        }
        self.agent = Agent(
            server.endpoint, SPEC, self.tensors, context=server.context, wait_s=PATIENCE_S, lookup_timeout_s=PATIENCE_S
        )
        self.chain = self.agent.chain(TOKENS)
        self.seen: dict[int, np.ndarray] = {}

    def kv(self, layer: int) -> np.ndarray:
        """What the layer's forward computes, both planes."""
        return filled(2 * 8 * SIZE * WIDTH, layer).reshape(2, 8, SIZE, WIDTH)

    def compute(self, layer: int) -> None:
        """Enqueue the layer's forward, which writes its KV."""

        def write() -> None:
            for plane, rows in zip("kv", self.kv(layer), strict=True):
                self.tensors[layer][plane][torch.from_numpy(HERE)] = torch.from_numpy(rows)

        self.stream.put(write)

    def attend(self, layer: int) -> None:
        """Enqueue the layer's attention, which reads what was loaded."""

        def read() -> None:
            table = torch.from_numpy(THERE)
            self.seen[layer] = np.stack([self.tensors[layer][plane][table].numpy() for plane in "kv"])

        self.stream.put(read)

    def attend_all(self, step: Step | NoStep) -> None:
        """Every layer, once it is loaded."""
        for layer in range(LAYERS):
            assert step.wait_layer(layer)
            self.attend(layer)

    def save(self, name: str) -> None:
        """A step that computes the prompt and saves it."""
        request = StepRequest(name, self.chain, (HERE,), save=(0, len(TOKENS)))
        with self.machine.stream(self.stream), self.agent.open_step([request]) as step:
            for layer in range(LAYERS):
                assert step.wait_layer(layer)
                self.compute(layer)
                step.layer_done(layer)
        assert self.agent.wait_idle(name, PATIENCE_S)

    def request(self, name: str) -> StepRequest:
        """One that loads all that was saved into other blocks."""
        hit = self.agent.lookup(name, self.chain)
        assert hit.tokens == len(TOKENS) - 1
        return StepRequest(name, self.chain, (THERE,), load=(0, hit.tokens), hit=hit)

    def load(self, name: str) -> None:
        """A step that loads what was saved into other blocks, and sees every byte; the machine runs beside it."""
        request = self.request(name)
        with self.machine.stream(self.stream), self.agent.open_step([request]) as step:
            self.attend_all(step)
        self.assert_saw_all()
        assert self.agent.wait_idle(name, PATIENCE_S)

    def assert_saw_all(self) -> None:
        """Every layer's attention has read the loaded bytes; the machine is to have done all."""
        assert eventually(lambda: len(self.seen) == LAYERS, PATIENCE_S)
        for layer, seen in self.seen.items():
            np.testing.assert_array_equal(seen, self.kv(layer), f"layer {layer}")
