"""Whatever the caps and the window, a prefix makes the round trip, and no batch is larger than it may be."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from layerflow import Agent, AsyncAgent, EmbeddedServer, GroupSpec, ModelSpec, Plane, Settings, StepRequest

LAYERS, BLOCKS, SIZE = 5, 40, 8
PATIENCE = 20.0
PATIENT = {"step_timeout_ms": 60_000}
FULL = GroupSpec("full", SIZE, (0, 2, 4), (Plane("k", "float32", (2, 64)), Plane("v", "float32", (2, 64))))
WINDOWED = GroupSpec("sliding", SIZE, (1, 3), (Plane("k", "int8", (100,)), Plane("s", "float16", (1,))), window=20)
SPEC = ModelSpec("m", "c", (FULL, WINDOWED), chunk_tokens=32)
TOKENS = list(range(100, 240))
BLOCK_BYTES = {layer: SPEC.groups[group].bytes_per_block for layer, (group, _) in enumerate(SPEC.layer_places())}


def paged() -> dict[int, dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(3)
    tensors: dict[int, dict[str, torch.Tensor]] = {}
    for layer, (group, _) in enumerate(SPEC.layer_places()):
        tensors[layer] = {}
        for plane in SPEC.groups[group].planes:
            raw = torch.randint(-90, 90, (BLOCKS, SIZE, *plane.shape), generator=random)
            tensors[layer][plane.name] = raw.to(getattr(torch, plane.dtype))
    return tensors


def agent_on(server: EmbeddedServer, tensors: dict[int, dict[str, torch.Tensor]]) -> Agent:
    return Agent(server.endpoint, SPEC, tensors, context=server.context, wait_s=PATIENCE, lookup_timeout_s=PATIENCE)


def saving(agent: Agent, name: str) -> StepRequest:
    blocks = -(-len(TOKENS) // SIZE)
    tables = (np.arange(blocks), np.arange(blocks)[::-1].copy())
    return StepRequest(name, agent.chain(TOKENS), tables, save=(0, len(TOKENS)), tail=True)


def loading(agent: Agent, name: str, stop: int) -> StepRequest:
    chain = agent.chain(TOKENS)
    blocks = -(-len(TOKENS) // SIZE)
    tables = (np.arange(blocks) + 20, np.arange(blocks) + 20)
    return StepRequest(name, chain, tables, load=(0, stop), hit=agent.lookup(name, chain))


def assert_loaded(tensors: dict[int, dict[str, torch.Tensor]]) -> None:
    hit, blocks = len(TOKENS) - 1, -(-len(TOKENS) // SIZE)
    for layer, (group, _) in enumerate(SPEC.layer_places()):
        first = SPEC.groups[group].rules.first_token(hit) // SIZE
        source = torch.arange(blocks) if group == 0 else torch.arange(blocks - 1, -1, -1)
        for tensor in tensors[layer].values():
            assert torch.equal(tensor[20 + first : 20 + blocks], tensor[source[first:]]), layer


CASES: list[dict[str, Any]] = [
    {},
    {"prefetch_layers": 1},
    {"prefetch_layers": 3},
    {"max_transfer_blocks": 1},
    {"max_transfer_bytes": 4096, "max_inflight_bytes": 8192},
    {"max_transfer_bytes": 5000, "max_inflight_bytes": 11000, "prefetch_layers": 2},
]


@pytest.mark.parametrize("limits", CASES, ids=str)
def test_the_round_trip_under(limits: dict[str, Any]) -> None:
    tensors = paged()
    settings = Settings(pool={"size": "8MiB"}, transfer=PATIENT | limits)
    with EmbeddedServer(settings) as server, agent_on(server, tensors) as agent:
        for request in (saving(agent, "one"), None):
            step_request = request or loading(agent, "two", len(TOKENS) - 1)
            with agent.open_step([step_request]) as step:
                for layer in range(LAYERS):
                    assert step.wait_layer(layer), step.failed
                    step.layer_done(layer)
            assert agent.wait_idle(step_request.request, PATIENCE)
        assert_loaded(tensors)
        most_bytes, most_blocks = limits.get("max_transfer_bytes", 1 << 40), limits.get("max_transfer_blocks", 1 << 40)
        for trace in agent.traces:
            for span in trace.spans:
                assert span.nbytes <= most_bytes
                assert span.blocks <= most_blocks
        statistics = agent.statistics()
        assert statistics.failed_batches == 0
        assert statistics.loaded_bytes == sum(
            BLOCK_BYTES[layer] * (18 - (0 if group == 0 else SPEC.groups[1].rules.first_token(139) // SIZE))
            for layer, (group, _) in enumerate(SPEC.layer_places())
        )


def test_asyncio_waits_for_the_same_bytes() -> None:
    tensors = paged()

    async def engine(agent: AsyncAgent) -> None:
        chain = agent.agent.chain(TOKENS)
        async with agent.open_step([saving(agent.agent, "one")]) as step:
            for layer in range(LAYERS):
                assert await step.wait_layer(layer)
                step.layer_done(layer)
        assert await agent.wait_idle("one", PATIENCE)
        assert (await agent.lookup("two", chain)).tokens == len(TOKENS) - 1
        async with agent.open_step([loading(agent.agent, "two", len(TOKENS) - 1)]) as step:
            assert await step.wait_all()
            for layer in range(LAYERS):
                assert await step.wait_layer(layer)
                step.layer_done(layer)
        await agent.close()

    with EmbeddedServer(Settings(pool={"size": "8MiB", "link_gbps": 0.01}, transfer=PATIENT)) as server:
        asyncio.run(engine(AsyncAgent(agent_on(server, tensors))))
    assert_loaded(tensors)
