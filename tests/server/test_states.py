"""Recurrent state beside full attention, through a server: hits at kept boundaries only, and their very bytes."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from e2e.known import PATIENCE_S, eventually, kv_bytes
from e2e.stopping import stopped

from layerflow.agent import Agent, Hit, StepRequest
from layerflow.agent.presence import hit_of
from layerflow.keys import Chain
from layerflow.server import EmbeddedServer
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard
from layerflow.wire.messages import Found, TailHit
from server.support import Embed, observe

BLOCK, STATE, CHUNK = 4, 8, 16
ROW, CONV, SSM = 32, 24, 40
POISON = 0xEE
ATTENTION = GroupSpec("full", BLOCK, (0, 2), (Plane("k", "uint8", (ROW,)),))
RECURRENT = GroupSpec("state", STATE, (1, 3), (Plane("conv", "uint8", (CONV,)), Plane("ssm", "uint8", (5, SSM // 5))))


class HybridWorker:
    """Prompts are computed in passes that end where a state is kept; a state depends on every token before it."""

    def __init__(self, server: EmbeddedServer, rank: int = 0, ranks: int = 1) -> None:
        self.spec = ModelSpec("hybrid", "c", (ATTENTION, RECURRENT), Shard(rank, ranks), chunk_tokens=CHUNK)
        self.rank = rank
        self.tensors = {
            layer: {
                plane.name: torch.full((256, group.entries, *plane.shape), POISON, dtype=torch.uint8)
                for plane in group.planes
            }
            for group in self.spec.groups
            for layer in group.layers
        }
        more = {"context": server.context, "lookup_timeout_s": PATIENCE_S}
        self.agent = Agent(server.endpoint, self.spec, self.tensors, f"hybrid-{rank}", **more)
        self._names = itertools.count()
        self._fresh = [itertools.count(), itertools.count()]
        self._random = np.random.default_rng(5)

    def __enter__(self) -> HybridWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.agent.close()

    def prompt(self, tokens: int, like: Chain | None = None) -> Chain:
        """Random tokens, after those of `like`."""
        known = like.tokens if like is not None else np.empty(0, np.int64)
        return self.agent.chain(np.append(known, self._random.integers(0, 1 << 40, tokens))[:tokens])

    def serve(self, chain: Chain, keep: Collection[int] = (), tail: bool = True) -> int:
        """Load the hit and check it, compute the rest, save; the hit's tokens.

        :param keep: boundaries at which the engine keeps a state.
        :raises AssertionError: a wrong byte.
        """
        name = f"request-{self.rank}-{next(self._names)}"
        hit = self.agent.lookup(name, chain)
        attention = np.array([next(self._fresh[0]) for _ in range(-(-len(chain) // BLOCK))])
        states = np.full(-(-len(chain) // STATE), -1)
        for boundary in {hit.tokens, *keep} - {0}:
            states[boundary // STATE - 1] = next(self._fresh[1])
        tables = (attention, states)
        at = hit.tokens
        ends = sorted({boundary for boundary in keep if boundary > at} | {len(chain)})
        for stop in ends:
            load = (0, hit.tokens) if at == hit.tokens else (0, 0)
            asked = StepRequest(name, chain, tables, load, hit, (at, stop), tail and stop % STATE == 0)
            with self.agent.open_step([asked]) as step:
                for layer in range(4):
                    assert step.wait_layer(layer), step.failed
                    if load[1]:
                        self._check(chain, tables, layer, hit)
                    self._compute(chain, tables, layer, at, stop)
                    step.layer_done(layer)
            at = stop
        assert self.agent.wait_idle(name, 20)
        return hit.tokens

    def _compute(self, chain: Chain, tables: tuple[np.ndarray, np.ndarray], layer: int, start: int, stop: int) -> None:
        for plane, (where, known) in self._known(chain, tables, layer, start, stop).items():
            self.tensors[layer][plane].numpy()[where] = known.reshape(-1, *self.tensors[layer][plane].shape[2:])

    def _check(self, chain: Chain, tables: tuple[np.ndarray, np.ndarray], layer: int, hit: Hit) -> None:
        assert hit.tokens % STATE == 0
        start = 0 if layer in ATTENTION.layers else hit.tokens - 1
        for plane, (where, known) in self._known(chain, tables, layer, start, hit.tokens).items():
            held = self.tensors[layer][plane].numpy()[where]
            assert (held.reshape(known.shape) == known).all(), (layer, plane)

    def _known(
        self, chain: Chain, tables: tuple[np.ndarray, np.ndarray], layer: int, start: int, stop: int
    ) -> dict[str, tuple[tuple[np.ndarray, np.ndarray], np.ndarray]]:
        """Per plane: where tokens ``start:stop`` have their bytes, and these. Of state: the one at `stop`, if kept."""
        seed = 4 * self.rank + layer
        if layer in ATTENTION.layers:
            positions = np.arange(start, stop)
            place = (tables[0][positions // BLOCK], positions % BLOCK)
            return {"k": (place, kv_bytes(chain.tokens[:stop], seed, 0, ROW)[start:])}
        block = tables[1][stop // STATE - 1] if stop % STATE == 0 else -1
        if block < 0:
            return {}
        place = (np.array([block]), np.array([0]))
        return {
            "conv": (place, kv_bytes(chain.tokens[:stop], seed, 0, CONV)[-1:]),
            "ssm": (place, kv_bytes(chain.tokens[:stop], seed, 1, SSM)[-1:]),
        }


def test_a_prompt_goes_on_where_a_state_was_kept(embed: Embed) -> None:
    with HybridWorker(embed()) as worker:
        stored = worker.prompt(50)
        assert worker.serve(stored, keep=[32]) == 0
        assert worker.serve(worker.prompt(60, like=stored)) == 32, "not 50: no state was kept there"
        assert worker.serve(worker.prompt(33, like=stored)) == 32
        assert worker.serve(worker.prompt(32, like=stored)) == 0, "one token must be left, and no hit is shortened"
        assert worker.serve(worker.prompt(40, like=worker.prompt(31, like=stored))) == 0


def test_a_state_within_a_chunk_is_a_tail(embed: Embed) -> None:
    with HybridWorker(embed()) as worker:
        stored = worker.prompt(50)
        worker.serve(stored, keep=[16, 40])
        assert worker.serve(worker.prompt(70, like=stored)) == 40
        assert worker.serve(worker.prompt(41, like=stored)) == 40
        assert worker.serve(worker.prompt(40, like=stored)) == 16


def test_no_hit_is_shortened_by_the_client_either(embed: Embed) -> None:
    """A server may offer a tail that ends with the prompt."""
    with HybridWorker(embed()) as worker:
        chain = worker.prompt(40)
        offered = [TailHit(2, 8, chain.partial(2, 8)), TailHit(1, 8, chain.partial(1, 8))]
        assert hit_of(Found(1, 16, offered), chain, worker.agent.spec) == Hit(24, 1, 8, chain.partial(1, 8))


def test_a_repeated_prompt(embed: Embed) -> None:
    """What ends at a boundary is found up to the one before, again and again."""
    with HybridWorker(embed()) as worker:
        for tokens, again in ((48, 40), (40, 32), (45, 40), (16, 8), (8, 0), (17, 16)):
            chain = worker.prompt(tokens)
            assert worker.serve(chain, keep=range(STATE, tokens + 1, STATE)) == 0
            assert [worker.serve(chain), worker.serve(chain)] == [again] * 2, tokens


def test_attention_is_saved_where_no_state_is(embed: Embed) -> None:
    """A later pass that keeps the state completes the chunk for every later prompt."""
    with HybridWorker(embed()) as worker:
        stored = worker.prompt(50)
        worker.serve(stored, tail=False)
        assert worker.agent.statistics().saved_bytes == 3 * CHUNK * ROW * 2
        longer = worker.prompt(64, like=stored)
        assert worker.serve(longer, keep=[48], tail=False) == 0
        assert worker.agent.statistics().saved_bytes == 4 * CHUNK * ROW * 2 + 2 * (CONV + SSM)
        assert worker.serve(worker.prompt(70, like=stored)) == 48


def test_discarded_tails_leave_the_chunk_ends(embed: Embed) -> None:
    with HybridWorker(embed(transfer__discard_partial_chunks=True)) as worker:
        stored = worker.prompt(50)
        worker.serve(stored, keep=[16, 40])
        assert worker.serve(worker.prompt(70, like=stored)) == 16


@pytest.mark.parametrize("boundary", [32, 40])
def test_every_rank_keeps_its_own_state(embed: Embed, boundary: int) -> None:
    server = embed()
    with HybridWorker(server, 0, 2) as first, HybridWorker(server, 1, 2) as second:
        stored = first.prompt(50)
        longer = first.prompt(60, like=stored)
        first.serve(stored, keep=[boundary])
        assert first.serve(longer) == 0, "the other rank has stored nothing"
        second.serve(stored, keep=[boundary])
        assert [first.serve(longer), second.serve(longer)] == [boundary] * 2


def test_a_hit_has_a_plan_where_its_lease_pins_all_of_it(embed: Embed) -> None:
    with HybridWorker(embed(pool__size="64KiB", pool__lease_share=0.05)) as worker:
        stored = worker.prompt(16 * CHUNK)
        worker.serve(stored, keep=[2 * CHUNK, 16 * CHUNK])
        hit = worker.agent.lookup("short", worker.prompt(3 * CHUNK, like=worker.prompt(2 * CHUNK, like=stored)))
        assert (hit.tokens, hit.plan is not None) == (2 * CHUNK, True)
        hit = worker.agent.lookup("long", worker.prompt(17 * CHUNK, like=stored))
        assert (hit.tokens, hit.plan) == (16 * CHUNK, None), "leases may not pin so much"


def test_what_comes_from_behind_the_arena_has_no_plan(embed: Embed, tmp_path: Path) -> None:
    folder = {"path": str(tmp_path / "tier")}
    server = embed(pool__disk=folder)
    with HybridWorker(server) as worker, closing(observe(server)) as control:
        assert eventually(lambda: control.status()["tier"]["up"])
        stored = worker.prompt(40)
        worker.serve(stored, keep=[32])
        assert worker.agent.lookup("r", stored).plan
        assert eventually(
            lambda: control.status()["tier"]["written_objects"] and not control.status()["tier"]["backlog_bytes"]
        )
    server.close()
    server = embed(pool__disk=folder)
    with HybridWorker(server) as worker, closing(observe(server)) as control:
        assert eventually(lambda: control.status()["tier"]["up"] and control.status()["tier"]["indexed_objects"])
        with stopped(control.status()["tier"]["host"]["pid"]):
            hit = worker.agent.lookup("r", worker.agent.chain(stored.tokens))
        assert (hit.tokens, hit.plan) == (32, None)
