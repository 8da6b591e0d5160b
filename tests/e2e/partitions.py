"""Workers of several tensor and pipeline sizes of one model, whose bytes are known."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from e2e.known import PATIENCE_S
from layerflow.agent import Agent
from layerflow.agent.values import Hit, StepRequest
from layerflow.keys import Chain
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard

LAYERS, HEADS, BLOCK, CHUNK, TOKENS, BLOCKS = 6, 6, 4, 16, 75, 24
WIDTH = {"k": 8, "v": 4}


def truth(layer: int, plane: str) -> np.ndarray:
    """uint8, shape ``(blocks, heads, entries, bytes)``, of the whole model."""
    shape = (-(-TOKENS // BLOCK), HEADS, BLOCK, WIDTH[plane])
    return np.random.default_rng([layer, ord(plane)]).integers(0, 256, shape, dtype=np.uint8)


class Rank:
    """One worker, its planes head-major.

    :param more: of its agent.
    """

    def __init__(
        self, endpoint: str, tp: tuple[int, int], stage: int, stages: tuple[int, ...], content: str, **more: Any
    ) -> None:
        shard = Shard(*tp, stage, len(stages), (HEADS,), (stages,))
        self.box = shard.box(0)
        planes = tuple(Plane(name, "uint8", (self.box.heads, width)) for name, width in WIDTH.items())
        group = GroupSpec("full", BLOCK, tuple(range(self.box.layers)), planes)
        self.spec = ModelSpec("m", content, (group,), shard, chunk_tokens=CHUNK)
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
        patience = {"wait_s": PATIENCE_S, "lookup_timeout_s": PATIENCE_S}
        self.agent = Agent(endpoint, self.spec, views, f"tp{tp[1]}pp{len(stages)}", **(patience | more))
        self.table = np.random.default_rng([*tp, stage]).permutation(BLOCKS)[: -(-TOKENS // BLOCK)].astype(np.int64)

    def own(self, layer: int, plane: str) -> torch.Tensor:
        whole = truth(self.box.first_layer + layer, plane)
        return torch.from_numpy(whole[:, self.box.first_head : self.box.end_head].copy())

    def run(self, request: str, chain: Chain, hit: Hit, *, save: bool) -> None:
        """One step: loads the hit, or saves the whole prompt."""
        load, keep = ((0, 0), (0, len(chain))) if save else ((0, hit.tokens), (0, 0))
        asked = StepRequest(request, chain, (self.table,), load, hit, keep, tail=save)
        with self.agent.open_step([asked], 20.0) as step:
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


def everyone(endpoint: str, tp: int, stages: tuple[int, ...], content: str = "c", **more: Any) -> list[Rank]:
    """The workers of an engine: `tp` tensor ranks, and a pipeline stage for each number of layers."""
    return [
        Rank(endpoint, (rank, tp), stage, stages, content, **more) for stage in range(len(stages)) for rank in range(tp)
    ]


def save_all(ranks: list[Rank], name: str = "w") -> None:
    """Each stores its part of the prompt."""
    for rank in ranks:
        rank.run(name, rank.agent.chain(np.arange(TOKENS)), Hit(0), save=True)


def load_all(ranks: list[Rank], name: str = "r") -> int:
    """Every one loads its part of the hit, and compares each byte; how many tokens."""
    chain = ranks[0].agent.chain(np.arange(TOKENS))
    hit = ranks[0].agent.lookup(name, chain)
    for rank in ranks if hit.tokens else ():
        rank.run(name, chain, hit, save=False)
        rank.check(hit.tokens)
    return hit.tokens


def leave(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.agent.close()
