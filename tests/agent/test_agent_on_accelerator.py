"""The whole way on a device: agent, side streams, device-side waits, an embedded server. cuda, or npu CANN emulated."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from e2e.known import eventually

from layerflow import Agent, EmbeddedServer, GroupSpec, ModelSpec, Plane, Settings, StepRequest

EMULATED_NPU = bool(os.environ.get("LAYERFLOW_TEST_NPU"))
if EMULATED_NPU:
    importlib.import_module("torch_npu")
elif not torch.cuda.is_available():
    pytest.skip("no cuda device here, and npu tests run by tests/npu/run.sh only", allow_module_level=True)

DEVICE = torch.device("npu" if EMULATED_NPU else "cuda", 0)
LAYERS, BLOCKS, SIZE, WIDTH = 4, 24, 16, 64
PATIENCE = 20.0
PLANES = (Plane("k", "float16", (WIDTH,)), Plane("v", "float16", (WIDTH,)))
SPEC = ModelSpec("m", "c", (GroupSpec("full", SIZE, tuple(range(LAYERS)), PLANES),), chunk_tokens=32)
TOKENS = list(range(SIZE * 8))


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(Settings(pool={"size": "8MiB"}, transfer={"step_timeout_ms": 60_000})) as running:
        yield running


def paged() -> dict[int, dict[str, torch.Tensor]]:
    """Random bytes on the host, copied over: kernels do not compute under the emulator."""
    made = {}
    for layer in range(LAYERS):
        made[layer] = {}
        for number, plane in enumerate("kv"):
            host = torch.from_numpy(
                np.random.default_rng(layer * 2 + number).integers(-9, 9, (BLOCKS, SIZE, WIDTH)).astype(np.float16)
            )
            made[layer][plane] = torch.empty(host.shape, dtype=torch.float16, device=DEVICE)
            made[layer][plane].copy_(host)
    return made


def agent_on(server: EmbeddedServer, tensors: dict[int, dict[str, torch.Tensor]]) -> Agent:
    return Agent(server.endpoint, SPEC, tensors, context=server.context, wait_s=PATIENCE, lookup_timeout_s=PATIENCE)


def test_a_prefix_is_saved_and_loaded_into_other_blocks(server: EmbeddedServer) -> None:
    tensors = paged()
    with agent_on(server, tensors) as agent:
        chain = agent.chain(TOKENS)
        here, there = np.arange(8)[::-1].copy(), np.arange(8) * 2 + 9
        with agent.open_step([StepRequest("one", chain, (here,), save=(0, len(TOKENS)), tail=True)]) as step:
            for layer in range(LAYERS):
                assert step.wait_layer(layer)
                step.layer_done(layer)
        assert agent.wait_idle("one", PATIENCE)
        assert agent.poll().saved == ("one",)

        hit = agent.lookup("two", chain)
        assert hit.tokens == len(TOKENS) - 1
        with agent.open_step([StepRequest("two", chain, (there,), load=(0, hit.tokens), hit=hit)]) as step:
            for layer in range(LAYERS):
                assert step.wait_layer(layer)
                step.layer_done(layer)
        # The engine's stream waits for the copies; what it runs next sees every byte.
        torch.get_device_module(DEVICE).current_stream().synchronize()
        for layer in range(LAYERS):
            for plane in "kv":
                host = tensors[layer][plane].cpu()
                assert torch.equal(host[torch.from_numpy(there)], host[torch.from_numpy(here)]), (layer, plane)
        assert agent.wait_idle("two", PATIENCE)
        told = agent.statistics()
        assert told.failed_batches == 0
        if EMULATED_NPU:
            assert told.copies.batches == told.copies.calls > 0, "one native call for each batch"
            assert not told.copies.single


@pytest.mark.skipif(EMULATED_NPU, reason="no kernel computes under the emulator")
@pytest.mark.parametrize(("way", "width"), [("ranges", 4096), ("kernel", 512), ("auto", 4096)])
def test_the_order_of_what_an_engine_enqueues(way: str, width: int) -> None:
    """Its thread waits for nothing but its own stream: products delay what a save reads and what a load overwrites."""
    planes = (Plane("k", "float16", (width,)), Plane("v", "float16", (width,)))
    spec = ModelSpec("m", "c", (GroupSpec("full", SIZE, tuple(range(LAYERS)), planes),), chunk_tokens=128)
    tensors = {
        layer: {plane: torch.zeros(64, SIZE, width, dtype=torch.float16, device=DEVICE) for plane in "kv"}
        for layer in range(LAYERS)
    }
    matrix = torch.randn(4096, 4096, device=DEVICE)
    chosen = Settings(pool={"size": "512MiB"}, transfer={"step_timeout_ms": 60_000, "copy_way": way})
    with (
        EmbeddedServer(chosen) as server,
        Agent(server.endpoint, spec, tensors, context=server.context, wait_s=PATIENCE, lookup_timeout_s=60) as agent,
    ):
        assert agent.wait_warm(PATIENCE)
        for turn in range(5):
            chain = agent.chain([*range(turn * 1000, turn * 1000 + SIZE * 16)])
            here, there = np.split(np.random.default_rng(turn).permutation(32).astype(np.int64), 2)
            into, out = torch.from_numpy(here).to(DEVICE), torch.from_numpy(there).to(DEVICE)
            wanted, seen = {}, {}
            with agent.open_step([StepRequest("one", chain, (here,), save=(0, len(chain)), tail=True)]) as step:
                for layer in range(LAYERS):
                    assert step.wait_layer(layer)
                    for _ in range(3):
                        torch.mm(matrix, matrix)
                    for plane in "kv":
                        wanted[layer, plane] = torch.randn(16, SIZE, width, device=DEVICE).half()
                        tensors[layer][plane][into] = wanted[layer, plane]
                    step.layer_done(layer)
            assert agent.wait_idle("one", PATIENCE) and agent.poll().saved == ("one",)
            hit = agent.lookup("two", chain)
            assert hit.tokens == len(chain) - 1
            for _ in range(20):
                torch.mm(matrix, matrix)
            for layer in range(LAYERS):
                for plane in "kv":
                    tensors[layer][plane][out] = 7.0
            with agent.open_step([StepRequest("two", chain, (there,), load=(0, hit.tokens), hit=hit)]) as step:
                for layer in range(LAYERS):
                    assert step.wait_layer(layer)
                    for plane in "kv":
                        seen[layer, plane] = tensors[layer][plane][out]
                    step.layer_done(layer)
            assert agent.wait_idle("two", PATIENCE)
            for key, rows in wanted.items():
                assert torch.equal(seen[key], rows), (turn, key)
        counts = agent.statistics().copies
        assert counts.kernels == (0 if way == "ranges" else counts.batches) and not counts.single


def test_a_lost_server_fails_the_wait_and_the_arena_is_let_go(server: EmbeddedServer) -> None:
    with agent_on(server, paged()) as agent:
        chain = agent.chain(TOKENS)
        table = np.arange(8)
        with agent.open_step([StepRequest("one", chain, (table,), save=(0, len(TOKENS)), tail=True)]) as step:
            for layer in range(LAYERS):
                step.layer_done(layer)
        assert agent.wait_idle("one", PATIENCE)
        hit = agent.lookup("two", chain)
        server.close()
        known = agent._steps.arenas
        assert eventually(lambda: not len(known)), "until then the hit is loaded by its plan"
        with agent.open_step([StepRequest("two", chain, (table + 8,), load=(0, hit.tokens), hit=hit)]) as step:
            outcome = step.wait_layer(0)
        assert [failed.blocks for failed in outcome.failed] == [tuple(range(8))]
        assert agent.wait_idle("two", PATIENCE)
