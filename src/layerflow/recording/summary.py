"""What is in a recording, in figures."""

from __future__ import annotations

from collections import Counter
from typing import Any

from layerflow.flow.commands import Revoke, Submit
from layerflow.flow.events import BatchDone, Direction, LoadsMoved, StepOpened
from layerflow.recording.format import (
    Dropped,
    LookedUp,
    LookupsMissed,
    ModelSeen,
    ServerSample,
    SessionSeen,
    StepMeasured,
    StepSpans,
    Told,
    Wanted,
)
from layerflow.recording.reader import Recording
from layerflow.spec import ModelSpec


def summary(recording: Recording) -> dict[str, Any]:
    """JSON-ready figures of a recording: when, of which models and engines, how many records, and what was moved.

    :raises ConfigError: as of :class:`layerflow.recording.reader.Recording`.
    """
    kinds: Counter[str] = Counter()
    models: dict[int, ModelSpec] = {}
    engines: dict[int, str] = {}
    workers: set[int] = set()
    chunks: set[int] = set()
    requests: set[int] = set()
    seen = _Traffic()
    for record in recording.records():
        match record:
            case Told():
                kinds[type(record.event).__name__] += 1
                seen.told(record.event)
                continue
            case Wanted():
                kinds[type(record.command).__name__] += 1
                seen.wanted(record.command)
                continue
            case ModelSeen():
                models[record.model] = record.spec
            case SessionSeen():
                engines[record.engine] = record.name
                if record.memory:
                    workers.add(record.session)
            case LookedUp():
                seen.looked_up(record)
                chunks.update(record.chunks)
                requests.add(record.request)
            case _:
                seen.other(record)
        kinds[type(record).__name__] += 1
    segments = recording.segments
    seconds = segments[-1].last - segments[0].first if segments else 0.0
    since = (segments[0].first if segments else recording.header.began) - recording.header.began
    return {
        "file": str(recording.path),
        "layerflow": recording.header.layerflow,
        "began_unix": recording.header.began_unix + since,
        "seconds": seconds,
        "bytes": recording.nbytes,
        "overwritten_segments": segments[0].number - 1 if segments else 0,
        "models": [{"model": number, "name": spec.name, "text": _text(spec)} for number, spec in models.items()],
        "engines": sorted(engines.values()),
        "counts": {
            "file_bytes": recording.nbytes,
            "records": sum(kinds.values()),
            "engines": len(engines),
            "workers": len(workers),
            "looked_up_requests": len(requests),
            "chunks": len(chunks),
            "dropped": seen.dropped,
            "damaged_blocks": recording.damaged,
        },
        "traffic": seen.figures(),
        "records": dict(kinds.most_common()),
    }


class _Traffic:
    """What moved, added up."""

    def __init__(self) -> None:
        self.lookups = self.tokens = self.hit_tokens = self.missed = self.steps = self.dropped = self.shed = 0
        self.granted = {Direction.LOAD: 0, Direction.SAVE: 0}
        self.batches = self.planned_bytes = 0
        self.exposed_s = self.transfer_s = 0.0
        self.loaded_bytes = self.saved_bytes = self.spans = 0
        self.evictions: list[int] = []

    def told(self, event: Any) -> None:
        match event:
            case StepOpened():
                self.steps += 1
            case BatchDone():
                self.batches += 1
            case LoadsMoved():
                self.planned_bytes += event.nbytes

    def wanted(self, command: Any) -> None:
        match command:
            case Submit():
                self.granted[command.direction] += command.nbytes
            case Revoke() if command.reason == "shed":
                self.shed += len(command.parts)

    def looked_up(self, lookup: LookedUp) -> None:
        self.lookups += 1
        self.tokens += lookup.tokens
        self.hit_tokens += lookup.hit

    def other(self, record: Any) -> None:
        match record:
            case LookupsMissed():
                self.lookups += record.requests
                self.missed += record.requests
                self.tokens += record.tokens
            case StepMeasured():
                self.loaded_bytes += record.load_bytes
                self.saved_bytes += record.save_bytes
                self.transfer_s += record.load_transfer_s
                self.exposed_s += record.load_exposed_s
            case StepSpans():
                self.spans += 1
            case ServerSample():
                self.evictions.append(record.evictions)
            case Dropped():
                self.dropped += record.events

    def figures(self) -> dict[str, Any]:
        return {
            "lookups": self.lookups,
            "lookups_without_the_server": self.missed,
            "prompt_tokens": self.tokens,
            "hit_tokens": self.hit_tokens,
            "steps": self.steps,
            "steps_with_spans": self.spans,
            "granted_batches": self.batches,
            "loaded_bytes": self.loaded_bytes,
            "saved_bytes": self.saved_bytes,
            "loads_by_plan_bytes": self.planned_bytes,
            "load_transfer_s": round(self.transfer_s, 6),
            "load_exposed_s": round(self.exposed_s, 6),
            "shed_parts": self.shed,
            "evictions": self.evictions[-1] - self.evictions[0] if self.evictions else 0,
        }


def _text(spec: ModelSpec) -> str:
    kinds = ", ".join(f"{len(group.layers)} x {group.kind}" for group in spec.groups)
    return f"{spec.name}: {spec.num_layers} layers ({kinds}), chunks of {spec.chunk_tokens} tokens"
