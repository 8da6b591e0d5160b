"""Workers of one tensor and pipeline size hit, and load byte for byte, what workers of others have stored."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from layerflow.agent import Agent
from layerflow.agent.values import Hit, StepRequest
from layerflow.keys import Chain
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard
from server.support import Embed, observe

LAYERS, HEADS, BLOCK, CHUNK, TOKENS, BLOCKS = 6, 6, 4, 16, 75, 24
WIDTH = {"k": 8, "v": 4}


def truth(layer: int, plane: str) -> np.ndarray:
    """uint8, shape ``(blocks, heads, entries, bytes)``, of the whole model."""
    shape = (-(-TOKENS // BLOCK), HEADS, BLOCK, WIDTH[plane])
    return np.random.default_rng([layer, ord(plane)]).integers(0, 256, shape, dtype=np.uint8)


class Rank:
    """One worker, its planes head-major."""

    def __init__(self, server: Any, tp: tuple[int, int], stage: int, stages: tuple[int, ...]) -> None:
        shard = Shard(*tp, stage, len(stages), (HEADS,), (stages,))
        self.box = shard.box(0)
        planes = tuple(Plane(name, "uint8", (self.box.heads, width)) for name, width in WIDTH.items())
        group = GroupSpec("full", BLOCK, tuple(range(self.box.layers)), planes)
        self.spec = ModelSpec("m", "c", (group,), shard, chunk_tokens=CHUNK)
        self.memory = {
            layer: {
                name: torch.zeros(BLOCKS, self.box.heads, BLOCK, width, dtype=torch.uint8)
                for name, width in WIDTH.items()
            }
            for layer in range(self.box.layers)
        }
        views = {
            layer: {name: t.transpose(1, 2) for name, t in planes.items()} for layer, planes in self.memory.items()
        }
        self.agent = Agent(server.endpoint, self.spec, views, f"tp{tp[1]}pp{len(stages)}", context=server.context)
        self.table = np.random.default_rng([*tp, stage]).permutation(BLOCKS)[: -(-TOKENS // BLOCK)].astype(np.int64)

    def own(self, layer: int, plane: str) -> torch.Tensor:
        whole = truth(self.box.first_layer + layer, plane)
        return torch.from_numpy(whole[:, self.box.first_head : self.box.end_head].copy())

    def run(self, request: str, chain: Chain, hit: Hit, *, save: bool) -> None:
        """One step: loads the hit, or saves the whole prompt."""
        load, keep = ((0, 0), (0, len(chain))) if save else ((0, hit.tokens), (0, 0))
        with self.agent.open_step([StepRequest(request, chain, (self.table,), load, hit, keep, tail=save)]) as step:
            for layer in range(self.box.layers):
                assert not step.wait_layer(layer).failed
                if save:
                    for plane in WIDTH:
                        self.memory[layer][plane][self.table] = self.own(layer, plane)
                step.layer_done(layer)
        assert self.agent.wait_idle(request, 20)

    def check(self, tokens: int) -> None:
        """Blocks of the hit hold the model's bytes, and no other block was touched."""
        for layer, plane in itertools.product(range(self.box.layers), WIDTH):
            held, blocks = self.memory[layer][plane], -(-tokens // BLOCK)
            assert torch.equal(held[self.table[:blocks]], self.own(layer, plane)[:blocks])
            rest = np.setdiff1d(np.arange(BLOCKS), self.table[:blocks])
            assert not held[rest].any()


def everyone(server: Any, tp: int, stages: tuple[int, ...]) -> list[Rank]:
    return [Rank(server, (rank, tp), stage, stages) for stage in range(len(stages)) for rank in range(tp)]


def leave(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.agent.close()


@pytest.mark.parametrize(
    ("writing", "reading"),
    [
        ((2, (6,)), (1, (6,))),
        ((1, (6,)), (2, (6,))),
        ((3, (6,)), (2, (6,))),
        ((2, (6,)), (6, (6,))),
        ((1, (2, 4)), (1, (6,))),
        ((2, (6,)), (3, (1, 3, 2))),
        ((8, (3, 3)), (1, (4, 2))),
    ],
)
def test_other_sizes_hit_every_byte(
    embed: Embed, writing: tuple[int, tuple[int, ...]], reading: tuple[int, tuple[int, ...]]
) -> None:
    server = embed()
    readers = everyone(server, *reading)  # they have looked before anything is stored
    chain = readers[0].agent.chain(np.arange(TOKENS))
    assert readers[0].agent.lookup("early", chain).tokens == 0
    writers = everyone(server, *writing)
    for writer in writers:
        writer.run("w", writer.agent.chain(np.arange(TOKENS)), Hit(0), save=True)
    leave(writers)
    hit = readers[0].agent.lookup("r", chain)
    assert hit.tokens == TOKENS - 1
    for reader in readers:
        reader.run("r", chain, hit, save=False)
        reader.check(hit.tokens)
    leave(readers)


def test_what_is_incomplete_is_no_hit(embed: Embed) -> None:
    server = embed()
    [reader] = everyone(server, 1, (6,))
    chain = reader.agent.chain(np.arange(TOKENS))
    writers = everyone(server, 2, (6,))
    writers[0].run("w", chain, Hit(0), save=True)
    assert reader.agent.lookup("half", chain).tokens == 0
    writers[1].run("w", chain, Hit(0), save=True)
    assert reader.agent.lookup("whole", chain).tokens == TOKENS - 1
    leave([reader, *writers])


@pytest.mark.parametrize(
    ("writing", "reading"), [((2, (6,)), (1, (6,))), ((1, (6,)), (3, (6,))), ((8, (6,)), (2, (6,)))]
)
def test_a_prompt_that_parts_in_the_middle_of_a_chunk_hits_the_blocks_of_other_sizes(
    embed: Embed, writing: tuple[int, tuple[int, ...]], reading: tuple[int, tuple[int, ...]]
) -> None:
    server = embed()
    writers, shared = everyone(server, *writing), 2 * CHUNK + 2 * BLOCK
    for writer in writers:
        writer.run("w", writer.agent.chain(np.arange(TOKENS)), Hit(0), save=True)
    readers = everyone(server, *reading)
    prompt = np.concatenate([np.arange(shared), np.arange(1000, 1000 + TOKENS - shared)])
    hit = readers[0].agent.lookup("r", readers[0].agent.chain(prompt))
    assert hit.tokens == shared
    for reader in readers:
        reader.run("r", reader.agent.chain(prompt), hit, save=False)
        reader.check(shared)
    leave([*writers, *readers])


def test_a_group_that_no_other_size_reads_is_told_with_its_reason(embed: Embed) -> None:
    server = embed()
    control = observe(server)
    [cut] = everyone(server, 1, (6,))
    group = GroupSpec("state", BLOCK, (0,), (Plane("s", "uint8", (64,)),))
    spec = ModelSpec("bound", "c", (group,), chunk_tokens=CHUNK)
    planes = {0: {"s": torch.zeros(BLOCKS, 1, 64, dtype=torch.uint8)}}
    bound = Agent(server.endpoint, spec, planes, "bound", context=server.context)
    sessions = control.status()["sessions"]
    told = {each["model"]: each["bound_to_size"] for each in sessions if each["memory"]}
    assert told == {"m": [], "bound": ["group 0 (state): recurrent state is divided inside its tensors"]}
    bound.close()
    control.close()
    leave([cut])
