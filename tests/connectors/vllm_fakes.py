"""vLLM's objects as the connector's scheduler side reads them, and a lookup client without a server."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from layerflow.agent.descriptors import PartDescriptor
from layerflow.agent.values import Follow, Handoff, Hit
from layerflow.connectors.vllm.plan import Asking
from layerflow.connectors.vllm.scheduler.requests import Allocation, RequestState
from layerflow.keys import Chain, root_digest
from layerflow.spec import GroupSpec, ModelSpec, Plane

CHUNK, BLOCK = 64, 32
FULL = GroupSpec("full", BLOCK, (0, 1), (Plane("kv", "uint8", (8,)),))


def spec_of(*groups: GroupSpec, content: str = "weights") -> ModelSpec:
    """A model of these groups, by default one with full attention."""
    return ModelSpec("fake", content, groups or (FULL,), chunk_tokens=CHUNK)


def hooked(spec: ModelSpec, ranks: int = 1) -> dict[int, tuple[Asking, ...]]:
    """What workers report once all layers were seen to ask for their loaded blocks."""
    return dict.fromkeys(range(ranks), (Asking.BY_LAYER,) * len(spec.groups))


def request(name: str, tokens: int, **changed: Any) -> SimpleNamespace:
    """vLLM's Request with a prompt of its own, nothing of it computed."""
    prompt = list(np.random.default_rng(len(name)).integers(0, 1000, tokens))
    made = SimpleNamespace(
        request_id=name,
        prompt_token_ids=[int(token) for token in prompt],
        prompt_embeds=None,
        all_token_ids=[int(token) for token in prompt],
        num_prompt_tokens=tokens,
        num_tokens=tokens,
        num_computed_tokens=0,
        mm_features=[],
        lora_request=None,
        cache_salt=None,
        kv_transfer_params=None,
        skip_reading_prefix_cache=False,
    )
    for key, value in changed.items():
        setattr(made, key, value)
    return made


def decode(made: SimpleNamespace, tokens: int = 1) -> None:
    """The request has got more output."""
    made.all_token_ids += list(range(tokens))
    made.num_tokens += tokens


def tracked(made: SimpleNamespace, spec: ModelSpec) -> RequestState:
    """As the scheduler's side begins to follow it."""
    chain = Chain(root_digest(spec.fingerprint), made.prompt_token_ids, spec.chunk_tokens)
    return RequestState(made, chain, True, True)


@dataclass
class BlockState:
    """vLLM's block tables of running requests, and recurrent states that it keeps."""

    tables: dict[str, tuple[list[int], ...]]
    boundary_state_offloads: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)

    allocated: dict[str, tuple[list[int], ...]] = field(default_factory=dict)  #: of requests that are not scheduled

    def get_block_ids(self, name: str) -> tuple[list[int], ...] | None:
        return self.tables.get(name)

    def resolve_block_ids(self, name: str) -> tuple[list[int], ...]:
        return (self.tables | self.allocated)[name]


@dataclass
class OlderBlockState:
    """The same of vLLM 0.29."""

    block_ids: dict[str, tuple[list[int], ...]]
    boundary_state_offloads: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)


def allocation(name: str, tables: tuple[list[int], ...], own_tokens: int = 0) -> Allocation:
    """vLLM has given a request blocks."""
    return Allocation(name, SimpleNamespace(get_block_ids=lambda: tables), own_tokens)


def output(
    scheduled: Mapping[str, int],
    *,
    new: Sequence[tuple[str, tuple[list[int], ...], int]] = (),
    cached: Sequence[tuple[str, tuple[list[int], ...] | None, int, bool]] = (),
    state: BlockState | OlderBlockState | None = None,
) -> SimpleNamespace:
    """vLLM's SchedulerOutput.

    :param scheduled: tokens of the step, by request.
    :param new: (request, block ids per group, computed tokens).
    :param cached: (request, new block ids, computed tokens, resumed after preemption).
    """
    news = [SimpleNamespace(req_id=name, block_ids=ids, num_computed_tokens=done) for name, ids, done in new]
    running = SimpleNamespace(
        req_ids=[row[0] for row in cached],
        new_block_ids=[row[1] for row in cached],
        num_computed_tokens=[row[2] for row in cached],
        resumed_req_ids={row[0] for row in cached if row[3]},
    )
    return SimpleNamespace(
        num_scheduled_tokens=dict(scheduled),
        scheduled_new_reqs=news,
        scheduled_cached_reqs=running,
        kv_connector_block_state=state,
    )


def pieces(parts: Sequence[PartDescriptor]) -> list[tuple[str, int, list[tuple[list[int], int]]]]:
    """(request, group, [(engine blocks, tokens)]) of each part."""
    return [
        (
            part.request,
            part.group,
            [(part.table[piece.blocks.start : piece.blocks.stop].tolist(), piece.tokens) for piece in part.pieces],
        )
        for part in parts
    ]


@dataclass
class FakeInquiry:
    """A lookup whose answer a test gives."""

    request: str
    chain: Chain
    asked_at: float
    hit: Hit | None = None
    follow: Follow | None = None

    @property
    def waits(self) -> bool:
        """For a hand-off."""
        return self.follow is not None


@dataclass
class FakeOpening:
    """A hand-off that was opened, and what the server says to it."""

    handoff: str
    tokens: int
    servers: tuple[str, ...] = ()
    state: Handoff | None = None


class FakeLookups:
    """What was asked, and which leases were given back."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.asked: list[FakeInquiry] = []
        self.dropped: list[str] = []
        self.waits: list[float] = []
        self.answers: dict[str, Hit] = {}
        self.opened: list[FakeOpening] = []
        self.ended: list[tuple[str, int, str]] = []
        self.released: list[str] = []
        self.released_at: list[tuple[str, ...]] = []
        self.closed = False

    def ask(
        self, name: str, chain: Chain, follow: Follow | None = None, *, compute_s: float | None = None
    ) -> FakeInquiry:
        self.asked.append(FakeInquiry(name, chain, time.monotonic(), self.answers.get(name), follow))
        return self.asked[-1]

    def open_handoff(
        self,
        handoff: str,
        chain: Chain,
        tokens: int,
        *,
        lease_s: float,
        timeout_s: float,
        servers: Sequence[str] = (),
    ) -> FakeOpening:
        self.opened.append(FakeOpening(handoff, tokens, tuple(servers)))
        return self.opened[-1]

    def handoff(self, inquiry: FakeOpening, timeout_s: float) -> Handoff | None:
        return inquiry.state

    def end_handoff(self, handoff: str, *, tokens: int, reason: str = "") -> None:
        self.ended.append((handoff, tokens, reason))

    def release_handoff(self, handoff: str, servers: Sequence[str] = ()) -> None:
        self.released.append(handoff)
        self.released_at.append(tuple(servers))

    def wait(self, inquiry: FakeInquiry, timeout_s: float) -> Hit | None:
        self.waits.append(timeout_s)
        return inquiry.hit

    def take(self, inquiry: FakeInquiry, hit: Hit) -> Hit:
        return hit

    def drop_lease(self, name: str) -> None:
        self.dropped.append(name)

    def close(self) -> None:
        self.closed = True
