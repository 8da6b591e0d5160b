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
