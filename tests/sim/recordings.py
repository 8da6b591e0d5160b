"""Recordings of a machine whose times are known, as a server writes them, of steps that follow a closed form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerflow.config.settings import Settings
from layerflow.flow.events import StepClosed
from layerflow.observe.trace import StepTrace, pack_spans
from layerflow.recording.format import (
    EVENTS,
    LookedUp,
    ModelSeen,
    PartSeen,
    Purged,
    ServerSample,
    SessionSeen,
    StepMeasured,
    StepSeen,
    StepSpans,
)
from layerflow.recording.writer import RecordingWriter
from layerflow.server.recorder import settings_in_force
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard

LAYERS = 4
CHUNK = 64
BLOCK = 16
BLOCK_BYTES = BLOCK * 1024
BEGAN = 1000.0


@dataclass(slots=True)
class KnownMachine:
    """One engine, whose link and compute take exactly what these say.

    Loads are cut as ``transfer.max_transfer_bytes`` of its settings says, and follow one another.

    :param bandwidth: of loads, saves are half as quick. :param batch_s: of each batch. :param block_s: of each block.
    :param latency_s: behind which a load arrives; those of batches behind each other overlap.
    :param fixed_s: of the mean layer, :param token_s: and of each new token. :param shares: by layer, of the mean one.
    """

    bandwidth: float = 100e6
    batch_s: float = 0.0
    block_s: float = 0.0
    latency_s: float = 0.0
    fixed_s: float = 2e-3
    token_s: float = 10e-6
    shares: tuple[float, ...] = (1.0,) * LAYERS
    ranks: int = 1
    settings: Settings = field(default_factory=lambda: Settings(transfer={"mode": "layerwise"}, pool={"size": "64MiB"}))
    records: list[Any] = field(default_factory=list)
    now: float = BEGAN
    step: int = 0
    requests: int = 0
    stored: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.records.append(settings_in_force(self.settings, self.now))
        for rank in range(self.ranks):
            plane = Plane("kv", "uint8", (1024,))
            group = GroupSpec("full", BLOCK, tuple(range(LAYERS)), (plane,))
            spec = ModelSpec("known", "", (group,), Shard(tp_rank=rank, tp_size=self.ranks), chunk_tokens=CHUNK)
            self.records += [
                ModelSeen(self.now, rank + 1, spec),
                SessionSeen(self.now, rank + 2, 1, "engine", rank + 1, memory=True),
            ]
        self.records.append(SessionSeen(self.now, self.ranks + 2, 1, "engine", 1, memory=False))
        self._sample()

    def serve(self, chunks: Iterable[int], *, idle_s: float = 1.0) -> tuple[float, float]:
        """A prompt of these chunks: looked up, what is stored of it loaded layer by layer, the rest computed and saved.

        :returns: how long it waited for loads, and how long its prefill took.
        """
        numbers = tuple(chunks)
        self.now += idle_s
        self.requests += 1
        held = next((at for at, number in enumerate(numbers) if number not in self.stored), len(numbers))
        tokens = len(numbers) * CHUNK
        hit = min(held * CHUNK, tokens - 1)
        answered = self.now
        self.records.append(
            LookedUp(answered, answered, self.ranks + 2, self.requests, tokens, numbers, 0, hit, held, held)
        )
        exposed = 0.0
        opened, self.step = self.now, self.step + 1
        new, layer_s = tokens - hit, self.fixed_s + (tokens - hit) * self.token_s
        blocks = -(-hit // BLOCK)
        batches = [(count, self._batch_s(count)) for count in self._batches(blocks)]
        load_s = sum(seconds for _, seconds in batches)
        for rank in range(self.ranks):
            trace, emulated = StepTrace(self.step, 0, "", []), self.settings.pool.link_gbps > 0
            at = opened
            exposed = 0.0
            for layer in range(LAYERS):
                landed = opened + (layer + 1) * load_s + self.latency_s if load_s else at
                begin = opened + layer * load_s
                for count, seconds in batches:
                    arrives = begin + seconds + self.latency_s
                    nbytes = count * BLOCK_BYTES
                    trace.add("load", layer, begin, arrives, nbytes=nbytes, blocks=count, emulated=emulated)
                    begin += seconds
                if landed > at:
                    trace.add("wait", layer, at, landed)
                    exposed += landed - at
                    at = landed
                trace.add("compute", layer, at, at + layer_s * self.shares[layer])
                at += layer_s * self.shares[layer]
            session = rank + 2
            fresh = numbers[held:]
            whole = (CHUNK // BLOCK,) * len(numbers)
            loads = (PartSeen(self.requests, 0, numbers[:held], whole[:held], (0,) * held),) if held else ()
            saves = (PartSeen(self.requests, 0, fresh, whole[held:], (CHUNK,) * len(fresh)),) if fresh else ()
            free_at = opened
            for layer in range(LAYERS if fresh else 0):
                count = len(fresh) * CHUNK // BLOCK
                took = 2 * count * BLOCK_BYTES / self.bandwidth
                begin = max(free_at, opened + exposed + sum(self.shares[: layer + 1]) * layer_s)
                free_at = begin + took
                nbytes = count * BLOCK_BYTES
                trace.add("save", layer, begin, free_at, nbytes=nbytes, blocks=count, emulated=emulated)
            moved = blocks * BLOCK_BYTES * LAYERS
            figures = (moved, LAYERS * load_s, exposed, 0, 0.0, 0.0, new, hit, layer_s)
            self.records += [
                StepSeen(opened, session, self.step, loads, saves, planned=True),
                (EVENTS[StepClosed], at, StepClosed(session, self.step, ok=True)),
                StepMeasured(at, session, self.step, *figures),
                StepSpans(trace.origin, session, self.step, pack_spans(trace)),
            ]
        self.stored.update(numbers)
        self.now = at
        return exposed, at - answered

    def _batches(self, blocks: int) -> list[int]:
        """Blocks of each batch of a layer."""
        most = self.settings.transfer.max_transfer_bytes // BLOCK_BYTES
        return [min(most, blocks - first) for first in range(0, blocks, most)]

    def _batch_s(self, blocks: int) -> float:
        return self.batch_s + blocks * self.block_s + blocks * BLOCK_BYTES / self.bandwidth

    def _sample(self) -> None:
        self.records.append(ServerSample(self.now, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0))

    def purge(self) -> None:
        """Empty the arena, half a second later."""
        self.now += 0.5
        self.records.append(Purged(self.now, len(self.stored) * LAYERS))
        self.stored.clear()

    def write(self, path: Path) -> Path:
        """Write what was recorded."""
        self._sample()
        writer = RecordingWriter(path, 1 << 22, now=BEGAN, unix=0.0, standing=lambda _: [])
        writer.add(self.records, self.now)
        writer.flush()
        writer.close()
        return path
