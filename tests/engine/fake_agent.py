"""An agent without a server: direct copies, as late and as hostile as the contract allows.

Loads poison their blocks when the step opens and bring a layer only at its wait; saves read engine memory
only after `delay` polls, so that a block reused too early is stored with foreign bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from layerflow.agent import Ended, FailedBlocks, Hit, LoadResult, NoStep, StepRequest
from layerflow.keys import Chain, root_digest
from layerflow.spec import ModelSpec
from layerflow_engine.config import EngineConfig

Tensors = Mapping[int, Mapping[str, torch.Tensor]]


class Piece(NamedTuple):
    """A chunk's blocks: where they lie in the table, and under which key."""

    key: tuple[bytes, int]
    numbers: range
    tokens: int
    base: int


@dataclass
class FakePool:
    """Objects by (digest, group): first stored block within the chunk, and bytes by (layer, plane)."""

    objects: dict[tuple[bytes, int], tuple[range, dict[tuple[int, str], torch.Tensor]]] = field(default_factory=dict)
    tails: dict[bytes, list[tuple[int, bytes]]] = field(default_factory=dict)


def hit_of(config: EngineConfig, stored: int, prompt: int, chunk: int = 64) -> int:
    """Tokens that a prompt of `prompt` tokens loads where its first `stored` ones were saved, the last as a tail."""
    most = min(stored, prompt - 1)
    if not config.packed or (most == stored and not stored % max(config.ratios)):
        return most
    # A row is loaded whole or computed, and what a compressor knows is stored for the end of a chunk alone.
    return most // chunk * chunk


class FakeAgent:
    """The agent's public methods on a :class:`FakePool`.

    :param fail: (request, layer) -> should this layer's load fail?
    :param delay: polls until a step's saves are read and published.
    """

    terms = None  # no server, no terms

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Tensors,
        pool: FakePool,
        fail: Callable[[str, int], bool] = lambda request, layer: False,
        delay: int = 0,
    ) -> None:
        self.spec, self.tensors, self.pool, self.fail, self.delay = spec, tensors, pool, fail, delay
        self.pending: list[FakeStep] = []
        self.aborted: set[str] = set()
        self.opened: list[StepRequest] = []
        self.calls: list[tuple[str, int]] = []
        self.lookups: list[tuple[str, int]] = []

    def chain(self, tokens: Sequence[int]) -> Chain:
        return Chain(root_digest(self.spec.fingerprint), tokens, self.spec.chunk_tokens)

    def lookup(self, request: str, chain: Chain) -> Hit:
        hit = self._lookup(chain)
        self.lookups.append((request, hit.tokens))
        return hit

    def _lookup(self, chain: Chain) -> Hit:
        chunk, spec = self.spec.chunk_tokens, self.spec
        for chunks in range(len(chain) // chunk, -1, -1):
            for tokens, digest in sorted(self.pool.tails.get(chain.parent(chunks), ()), reverse=True):
                base = chunks * chunk
                if base + tokens <= len(chain) and chain.partial(chunks, tokens) == digest:
                    hit = Hit(spec.usable(base + tokens, len(chain)) or 0, chunks, tokens, digest)
                    if hit.tokens > base and spec.inside(tokens, hit.tokens - base) and self._complete(chain, hit):
                        return hit
            hit = Hit(spec.usable(chunks * chunk, len(chain)) or 0)
            inside = chunks and spec.inside(chunk, hit.tokens - (chunks - 1) * chunk)
            if inside and self._complete(chain, hit):
                return hit
        return Hit(0)

    def _complete(self, chain: Chain, hit: Hit) -> bool:
        return all(piece.key in self.pool.objects for piece in self.load_pieces(chain, hit))

    def load_pieces(self, chain: Chain, hit: Hit) -> list[Piece]:
        chunk, pieces = self.spec.chunk_tokens, []
        for group, facts in enumerate(self.spec.groups):
            first = facts.rules.first_token(hit.tokens) // facts.block_size
            for number in facts.rules.need(hit.tokens, chunk):
                tail = number == hit.tail_chunk
                tokens = hit.tail_tokens if tail else chunk
                digest = hit.tail_digest if tail else chain.digests[number]
                base = number * chunk // facts.block_size
                kept = facts.rules.keep(tokens)
                stop = min(base + kept.stop, -(-hit.tokens // facts.block_size))
                pieces.append(Piece((digest, group), range(max(first, base + kept.start), stop), tokens, base))
        return pieces

    def save_pieces(self, request: StepRequest) -> list[Piece]:
        (start, stop), chunk, chain = request.save, self.spec.chunk_tokens, request.chain
        wanted = [(number, chunk, chain.digests[number]) for number in range(start // chunk, stop // chunk)]
        if request.tail and stop % chunk:
            wanted.append((stop // chunk, stop % chunk, chain.partial(stop // chunk, stop % chunk)))
        pieces = []
        for group, facts in enumerate(self.spec.groups):
            for number, tokens, digest in wanted:
                base = number * chunk // facts.block_size
                kept = facts.rules.keep(tokens)
                pieces.append(Piece((digest, group), range(base + kept.start, base + kept.stop), tokens, base))
        return pieces

    def open_step(self, requests: Sequence[StepRequest], timeout_s: float | None = None) -> FakeStep | NoStep:
        assert requests
        self.opened += requests
        step = FakeStep(self, requests)
        self.pending.append(step)
        return step

    def abort(self, request: str) -> None:
        self.aborted.add(request)

    def busy(self, request: str) -> bool:
        return any(request == asked.request for step in self.pending for asked in step.requests)

    def poll(self) -> Ended:
        for step in [step for step in self.pending if step.closed]:
            step.polls += 1
            if step.polls > self.delay:
                self.pending.remove(step)
                step.publish()
        return Ended()

    def close(self) -> None:
        assert not self.pending


class FakeStep:
    """One step of a :class:`FakeAgent`."""

    def __init__(self, agent: FakeAgent, requests: Sequence[StepRequest]) -> None:
        self.agent, self.requests = agent, requests
        self.polls, self.closed, self.ok, self.done = 0, False, False, 0
        self.failed: list[FailedBlocks] = []
        self.calls = agent.calls
        self.loads = [
            (asked, piece, agent.pool.objects[piece.key])
            for asked in requests
            if asked.load[1]
            for piece in agent.load_pieces(asked.chain, asked.hit)
        ]
        for asked in requests:
            assert asked.load in {(0, 0), (0, asked.hit.tokens)}
        for asked, piece, _ in self.loads:
            for layer in agent.spec.groups[piece.key[1]].layers:
                for plane in agent.tensors[layer].values():
                    plane[self._blocks(asked, piece)] = float("nan") if plane.is_floating_point() else 99

    def _blocks(self, asked: StepRequest, piece: Piece) -> torch.Tensor:
        blocks = asked.blocks[piece.key[1]][piece.numbers.start : piece.numbers.stop]
        assert len(blocks) == len(piece.numbers) and (blocks > 0).all(), (asked.request, piece, blocks)
        return torch.from_numpy(blocks)

    def wait_layer(self, layer: int) -> LoadResult:
        assert not self.closed
        self.calls.append(("wait", layer))
        for asked, piece, (numbers, stored) in self.loads:
            if asked.request in self.agent.aborted or layer not in self.agent.spec.groups[piece.key[1]].layers:
                continue
            if self.agent.fail(asked.request, layer):
                self.failed.append(FailedBlocks(asked.request, piece.key[1], tuple(piece.numbers), "injected"))
                continue
            first = piece.numbers.start - piece.base - numbers.start
            for name, plane in self.agent.tensors[layer].items():
                plane[self._blocks(asked, piece)] = stored[layer, name][first : first + len(piece.numbers)]
        for failed in self.failed:
            for asked, piece, _ in self.loads:
                if asked.request == failed.request:
                    self.agent.pool.objects.pop(piece.key, None)
        return LoadResult(tuple(self.failed))

    def wait_all(self) -> LoadResult:
        for layer in range(self.agent.spec.num_layers):
            outcome = self.wait_layer(layer)
            if not outcome:
                break
        return outcome

    def layer_done(self, layer: int, event: object = None) -> None:
        assert layer == self.done
        self.calls.append(("done", layer))
        self.done += 1

    def close(self, ok: bool | None = None) -> None:
        self.closed = True
        self.ok = ok is not False and self.done == self.agent.spec.num_layers

    def publish(self) -> None:
        for asked in self.requests:
            if not self.ok or asked.request in self.agent.aborted:
                continue
            for piece in self.agent.save_pieces(asked):
                group = self.agent.spec.groups[piece.key[1]]
                stored = {
                    (layer, name): plane[self._blocks(asked, piece)].clone()
                    for layer in group.layers
                    for name, plane in self.agent.tensors[layer].items()
                }
                known = piece.tokens // group.ratio - (piece.numbers.start - piece.base) * group.entries
                for rows in stored.values():
                    rows.flatten(0, 1)[known:] = 0  # past a tail's last token nothing means anything
                numbers = range(piece.numbers.start - piece.base, piece.numbers.stop - piece.base)
                self.agent.pool.objects.setdefault(piece.key, (numbers, stored))
                if piece.tokens < self.agent.spec.chunk_tokens:
                    parent = asked.chain.parent(len(asked.chain) // self.agent.spec.chunk_tokens)
                    tails = self.agent.pool.tails.setdefault(parent, [])
                    if (piece.tokens, piece.key[0]) not in tails:
                        tails.append((piece.tokens, piece.key[0]))
