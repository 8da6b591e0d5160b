"""What a recording (:mod:`layerflow.recording`) tells: its prompts, and the steps in which engines computed them."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from layerflow.config.settings import Settings
from layerflow.errors import ConfigError
from layerflow.flow.commands import LoadFailed
from layerflow.flow.events import FetchOpened, LoadsMoved, StepClosed
from layerflow.observe.trace import SPAN_BYTES, Span, unpack_spans
from layerflow.recording.format import (
    MAGIC,
    Dropped,
    LookedUp,
    ModelSeen,
    PartSeen,
    Purged,
    ServerSample,
    SessionSeen,
    SettingsInForce,
    StepMeasured,
    StepSeen,
    StepSpans,
    Told,
    Wanted,
)
from layerflow.recording.reader import Recording
from layerflow.sim.trace import RequestTrace, TracedRequest, numbered_digest
from layerflow.spec import ModelSpec
from layerflow.system.machine import free_bytes

# A run: everything that was recorded of the model that most sessions cache.


@dataclass(slots=True, eq=False)
class RecordedPrompt:
    """One prompt on its way through one engine, from its lookup to the last step that computed some of it.

    :param at: when its lookup arrived. :param answered: when that was answered.
    :param chunks: digests that stand for its full chunks. :param tail: for what they leave of it; empty = nothing.
    :param hit: tokens that could be loaded, as the server answered.
    :param asked: a lookup told all this. Else it was answered by its client, or never asked: what is known of it was
        saved or loaded, and it is taken to have come when its first step opened.
    :ivar passes: that loaded or computed some of it, in the order in which they opened.
    """

    engine: int
    number: int
    at: float
    answered: float
    tokens: int = 0
    chunks: tuple[int, ...] = ()
    tail: int = 0
    hit: int = 0
    asked: bool = False
    passes: list[RecordedPass] = field(default_factory=list)

    @property
    def heard(self) -> float:
        """When its engine heard the answer: the worker may open the first pass before the server has noted it."""
        return min(self.answered, self.passes[0].opened) if self.passes else self.answered

    @property
    def timed(self) -> bool:
        """Is it known what took time in its passes?"""
        return bool(self.passes) and all(each.timed for each in self.passes)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of its chunks, the tail's among them."""
        return (*self.chunks, self.tail) if self.tail else self.chunks


@dataclass(slots=True, eq=False)
class RecordedStep:
    """What one rank did of a pass.

    :param loads: by its request's number, as :attr:`saves`.
    :param packed: its spans, as recorded: unpacked they take ten times the memory. :param packed_at: when they begin.
    :ivar closed: when the server was told of its end. :ivar moved: when its planned loads had ended.
    """

    opened: float
    loads: tuple[PartSeen, ...]
    saves: tuple[PartSeen, ...]
    measured: StepMeasured | None = None
    packed: bytes = b""
    packed_at: float = 0.0
    closed: float = math.nan
    moved: float = math.nan

    @property
    def span_count(self) -> int:
        """How many spans it has."""
        return len(self.packed) // SPAN_BYTES

    def spans(self) -> dict[str, list[Span]]:
        """What took time in it, by lane and start. Unpacked each time."""
        lanes: dict[str, list[Span]] = {"compute": [], "wait": [], "load": [], "save": [], "link": []}
        for span in unpack_spans(self.packed, self.packed_at):
            lanes[span.lane].append(span)
        return lanes


class PassTimes(NamedTuple):
    """What the spans of a pass's ranks say of it.

    :param opened: when the first one begins; inf = there is none. :param began: its first layer was come to; likewise.
    :param computed: it had computed its last layer; -inf = it has computed none.
    :param whole: it waited for all of its loads before its first layer.
    :param noticed: layers that were waited for, :param notice_s: and how long after its last byte each wait ended.
    :param layer_s: compute time of each layer, by number.
    """

    opened: float
    began: float
    computed: float
    whole: bool
    noticed: array[int]
    notice_s: array[float]
    layer_s: array[float]

    @classmethod
    def of(cls, steps: Iterable[RecordedStep]) -> PassTimes:
        """Read the spans of all ranks."""
        opened = began = math.inf
        computed, whole = -math.inf, False
        notices: dict[int, float] = {}
        layers: dict[int, float] = {}
        for step in steps:
            lanes = step.spans()
            opened = min([opened, *(span.start for spans in lanes.values() for span in spans)])
            began = min([began, *(span.start for span in (*lanes["wait"], *lanes["compute"]))])
            computed = max([computed, *(span.stop for span in lanes["compute"])])
            first = min([span.start for span in lanes["compute"]], default=-math.inf)
            waits = [span for span in lanes["wait"] if span.stop <= first + _INSTANT]
            whole = whole or len({span.layer for span in waits if span.seconds > _INSTANT}) > 1
            landed: dict[int, float] = {}
            for span in lanes["load"]:
                landed[span.layer] = max(landed.get(span.layer, 0.0), span.stop)
            for span in lanes["wait"]:
                if span.start <= landed.get(span.layer, 0.0) <= span.stop:
                    notices[span.layer] = max(notices.get(span.layer, 0.0), span.stop - landed[span.layer])
            for span in lanes["compute"]:
                # Of several ranks the shortest: one that waits for its loads holds the others in their layers.
                layers[span.layer] = min(layers.get(span.layer, math.inf), span.seconds)
        in_order = [layers[layer] for layer in sorted(layers)]
        return cls(
            opened, began, computed, whole, array("i", notices), array("d", notices.values()), array("d", in_order)
        )


@dataclass(eq=False)
class RecordedPass:
    """A forward pass of an engine, or loads ahead of one: the steps of equal number of its ranks.

    :param ranks: steps by tensor-parallel rank.
    """

    number: int
    ranks: dict[int, RecordedStep] = field(default_factory=dict)
    prompts: list[RecordedPrompt] = field(default_factory=list)

    @cached_property
    def times(self) -> PassTimes:
        """What its spans say."""
        return PassTimes.of(self.ranks.values())

    @cached_property
    def opened(self) -> float:
        """When the first rank opened it."""
        return min([step.opened for step in self.ranks.values()] + [self.times.opened])

    @property
    def began(self) -> float:
        """When it came to its first layer."""
        return self.times.began if self.times.began < math.inf else self.opened

    @cached_property
    def ended(self) -> float:
        """When it had computed its last layer; loads ahead of a pass: when they were in place."""
        if self.times.computed > -math.inf:
            return self.times.computed
        name = "moved" if self.ahead else "closed"
        return max([getattr(step, name) for step in self.ranks.values()], default=math.nan)

    @cached_property
    def ahead(self) -> bool:
        """Does it only load, for a later pass to compute on?"""
        return self.times.computed == -math.inf and all(
            step.loads and not step.saves and step.packed for step in self.ranks.values()
        )

    @cached_property
    def timed(self) -> bool:
        """Have all of its ranks told their spans? Else it is not known what took time in it."""
        return all(step.packed for step in self.ranks.values()) and not math.isnan(self.ended)

    @property
    def whole(self) -> bool:
        """Did it wait for all of its loads before its first layer?"""
        return self.times.whole

    @property
    def notices(self) -> dict[int, float]:
        """By layer that was waited for, how long after its last byte the wait ended."""
        return dict(zip(self.times.noticed, self.times.notice_s, strict=True))

    @property
    def layers(self) -> list[float]:
        """Compute time of each layer; empty = not known."""
        return self.times.layer_s.tolist()

    @cached_property
    def layer_s(self) -> float:
        """Compute time of one layer, as the workers measured it; 0 = not known."""
        told = [step.measured.layer_s for step in self.ranks.values() if step.measured is not None]
        return min([seconds for seconds in told if seconds > 0.0], default=0.0)

    @cached_property
    def work(self) -> tuple[int, int]:
        """New tokens and their context; zeros = not known."""
        for step in self.ranks.values():
            if step.measured is not None and step.measured.new_tokens:
                return step.measured.new_tokens, step.measured.context_tokens
        return 0, 0

    @cached_property
    def exposed_s(self) -> float:
        """How long it waited for loads, on the rank that waited longest; nan = not known, or it loaded nothing."""
        told = [
            step.measured.load_exposed_s
            for step in self.ranks.values()
            if step.measured is not None and step.measured.load_bytes
        ]
        return max(told, default=math.nan)


_INSTANT = 50e-6
"""Waits shorter than this are none."""


@dataclass(slots=True, eq=False)
class RecordedEngine:
    """One engine: its passes in the order in which they opened, and its prompts in the order of their lookups."""

    number: int
    name: str
    ranks: set[int] = field(default_factory=set)
    passes: list[RecordedPass] = field(default_factory=list)
    prompts: list[RecordedPrompt] = field(default_factory=list)

    @property
    def one_by_one(self) -> bool:
        """Did each prompt come when the one before was computed?"""
        free_at = -math.inf
        for prompt in sorted((each for each in self.prompts if each.passes), key=lambda each: each.heard):
            if prompt.heard < free_at:
                return False
            last = last_pass(prompt)
            free_at = last.ended if last is not None and not math.isnan(last.ended) else free_at
        return True


@dataclass(slots=True, eq=False)
class RecordedRun:
    """A recording, read for one model: the one that had most prompts.

    :param spec: of its first rank.
    :param settings: that were in force at its end, as far as they are recorded; :param sections: and as they were.
    :param changed: they were others before.
    :param samples: how full the arena was.
    :param behind: something came from behind the arena, or from a peer. :param dropped: events that are missing.
    :param others: prompts of other models were recorded, too. :param failed_loads: of requests.
    :param purges: when the arena was emptied.
    """

    name: str
    spec: ModelSpec
    engines: list[RecordedEngine]
    settings: Settings
    sections: dict[str, dict[str, Any]]
    changed: bool
    samples: list[ServerSample]
    behind: bool
    dropped: int
    others: bool
    failed_loads: int
    purges: list[float]

    @property
    def prompts(self) -> list[RecordedPrompt]:
        """Of all engines, by arrival."""
        return sorted((prompt for engine in self.engines for prompt in engine.prompts), key=lambda prompt: prompt.at)


def is_recording(path: Path) -> bool:
    """Does the file begin as a recording? What cannot be read does not."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_run(path: Path, last_s: float = math.inf) -> RecordedRun:
    """Read what happened to the model that had most prompts.

    Sessions whose specs differ in their tensor-parallel rank alone are ranks of one model.

    :param last_s: so many of its last seconds.
    :raises ConfigError: it cannot be read, no prompt is in it, or to replay it takes more memory than is free.
    """
    recording = Recording(path)
    ended = max([segment.last for segment in recording.segments], default=0.0)
    since = ended - last_s
    needed, free = recording.raw_bytes(since) * REPLAY_MEMORY, free_bytes()
    if needed > free:
        raise ConfigError(
            f"{path}: to replay it takes some {needed / 2**30:,.1f} GiB of memory, and {free / 2**30:,.1f} GiB are "
            "free; replay its end: --last 10m"
        )
    reading = _Reading()
    for record in recording.records(since):
        if record.at >= since or isinstance(record, STANDING):
            reading.take(record)
    return reading.run(path)


STANDING: Final = (ModelSeen, SessionSeen, SettingsInForce, Dropped)
"""What holds on from when it was recorded; and what is missing somewhere in its segment."""

REPLAY_MEMORY: Final = 12
"""Bytes that a replay takes for each byte of a recording's records, decompressed: 2 where these are mostly spans of
small batches, 11 where they are mostly numbers of chunks."""


class _Reading:
    """Puts a recording's records together."""

    def __init__(self) -> None:
        self._specs: dict[int, ModelSpec] = {}
        self._sessions: dict[int, SessionSeen] = {}
        self._engines: dict[tuple[ModelSpec, int], RecordedEngine] = {}
        self._steps: dict[tuple[int, int], RecordedStep] = {}
        self._passes: dict[tuple[ModelSpec, int, int], RecordedPass] = {}
        self._prompts: dict[tuple[ModelSpec, int, int], RecordedPrompt] = {}
        self._saved: dict[int, dict[int, int]] = {}  # by prompt: tokens of each chunk, of those that were never asked
        self._settings: list[dict[str, Any]] = []
        self._samples: list[ServerSample] = []
        self._purges: list[float] = []
        self._dropped = self._failed = 0
        self._behind = False

    def take(self, record: Any) -> None:
        match record:
            case ModelSeen():
                self._specs[record.model] = record.spec
            case SessionSeen() if record.model in self._specs:  # else its model was in a block that is damaged
                self._sessions[record.session] = record
            case SettingsInForce():
                if record.sections not in self._settings:
                    self._settings.append(record.sections)
            case LookedUp() if record.session in self._sessions:
                self._looked_up(record)
            case StepSeen() if record.session in self._sessions:
                self._step(record)
            case StepMeasured() if (step := self._steps.get((record.session, record.step))) is not None:
                step.measured = record
            case StepSpans() if (step := self._steps.get((record.session, record.step))) is not None:
                step.packed, step.packed_at = record.spans, record.at
            case Told():
                self._told(record)
            case Wanted():
                self._failed += isinstance(record.command, LoadFailed)
            case ServerSample():
                self._samples.append(record)
            case Purged():
                self._purges.append(record.at)
            case Dropped():
                self._dropped += record.events

    def _told(self, record: Any) -> None:
        event = record.event
        match event:
            case StepClosed() if (step := self._steps.get((event.session, event.step))) is not None:
                step.closed = record.at
            case LoadsMoved() if (step := self._steps.get((event.session, event.step))) is not None:
                step.moved = record.at
            case FetchOpened():
                self._behind = True

    def _engine(self, session: SessionSeen) -> tuple[ModelSpec, RecordedEngine, int]:
        """The model's spec as its first rank has it, the engine, and the session's rank."""
        spec = self._specs[session.model]
        rank = spec.shard.tp_rank
        spec = msgspec.structs.replace(spec, shard=msgspec.structs.replace(spec.shard, tp_rank=0))
        key = spec, session.engine
        if key not in self._engines:
            self._engines[key] = RecordedEngine(session.engine, session.name)
        return spec, self._engines[key], rank

    def _looked_up(self, record: LookedUp) -> None:
        spec, engine, _ = self._engine(self._sessions[record.session])
        key = spec, engine.number, record.request
        prompt = self._prompts.get(key)
        if prompt is None or prompt.passes:  # else it is asked again, before its turn
            prompt = self._prompts[key] = RecordedPrompt(engine.number, record.request, record.at, record.answered)
            engine.prompts.append(prompt)
        prompt.answered, prompt.asked, prompt.hit = record.answered, True, record.hit
        prompt.tokens, prompt.chunks, prompt.tail = record.tokens, record.chunks, record.tail

    def _step(self, record: StepSeen) -> None:
        session = self._sessions[record.session]
        spec, engine, rank = self._engine(session)
        engine.ranks.add(rank)
        step = self._steps[record.session, record.step] = RecordedStep(record.at, record.loads, record.saves)
        key = spec, engine.number, record.step
        made = self._passes.get(key)
        if made is None or rank in made.ranks:  # a worker that came back counts anew
            made = self._passes[key] = RecordedPass(record.step)
            engine.passes.append(made)
        made.ranks[rank] = step
        for part in (*record.loads, *record.saves):
            prompt = self._prompt(spec, engine, part, record)
            if prompt not in made.prompts:
                made.prompts.append(prompt)
                prompt.passes.append(made)

    def _prompt(self, spec: ModelSpec, engine: RecordedEngine, part: PartSeen, record: StepSeen) -> RecordedPrompt:
        key = spec, engine.number, part.request
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = RecordedPrompt(engine.number, part.request, record.at, record.at)
            engine.prompts.append(prompt)
        if not prompt.asked and part.group == 0:
            saved = self._saved.setdefault(id(prompt), {})
            counts = part.tokens if part in record.saves else (0,) * len(part.chunks)
            saved.update({chunk: held or spec.chunk_tokens for chunk, held in zip(part.chunks, counts, strict=True)})
            prompt.tokens = sum(saved.values())
            prompt.chunks = tuple(chunk for chunk, held in saved.items() if held == spec.chunk_tokens)
            prompt.tail = next((chunk for chunk, held in saved.items() if held != spec.chunk_tokens), 0)
        return prompt

    def run(self, path: Path) -> RecordedRun:
        counts = Counter({spec: 0 for spec, _ in self._engines})
        for (spec, _), engine in self._engines.items():
            counts[spec] += len(engine.prompts)
        if not any(counts.values()):
            if self._dropped:
                raise ConfigError(f"{path}: no prompt can be read in it: {self._dropped:,} events are missing")
            raise ConfigError(f"{path}: no prompt was looked up or saved while it was recorded; record for longer")
        [(spec, most)] = counts.most_common(1)
        engines = [engine for (of, _), engine in self._engines.items() if of == spec and engine.prompts]
        for engine in engines:
            engine.passes.sort(key=lambda each: each.opened)
            for prompt in engine.prompts:
                prompt.passes.sort(key=lambda each: each.opened)
        sections = _known(self._settings[-1]) if self._settings else {}
        try:
            settings = Settings(**sections)
        except ConfigError as error:
            why = "; ".join(str(error).splitlines())
            raise ConfigError(f"{path}: was recorded under settings that this layerflow refuses: {why}") from None
        return RecordedRun(
            path.name,
            spec,
            engines,
            settings,
            sections,
            len(self._settings) > 1,
            self._samples,
            self._behind,
            self._dropped,
            most < counts.total(),
            self._failed,
            self._purges,
        )


def _known(sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The keys that this layerflow has: another one's recording may tell of more."""
    return {
        name: {key: value for key, value in keys.items() if key in type(getattr(_DEFAULTS, name)).model_fields}
        for name, keys in sections.items()
        if name in Settings.model_fields
    }


_DEFAULTS = Settings()


def last_pass(prompt: RecordedPrompt) -> RecordedPass | None:
    """The last pass that loaded or computed some of a prompt; later ones only saved what was decoded."""
    own = {*prompt.chunks, prompt.tail}
    last = None
    for each in prompt.passes:
        for step in each.ranks.values():
            loads = any(part.request == prompt.number for part in step.loads)
            saves = any(part.request == prompt.number and not own.isdisjoint(part.chunks) for part in step.saves)
            if loads or saves:
                last = each
    return last


# Its prompts alone, to replay what its pool would have hit at other sizes.


@dataclass(frozen=True, slots=True)
class RecordedPrompts:
    """What a recording tells of one model's prompts.

    :param trace: each with one token of output: what requests generated is not recorded.
    :param arena_bytes: of the pool that it was recorded with, when the recording ended.
    :param hit_tokens: that could be loaded, as the server answered.
    """

    trace: RequestTrace
    spec: ModelSpec
    arena_bytes: int
    hit_tokens: int


def prompts_of(run: RecordedRun) -> RecordedPrompts:
    """Take the prompts.

    Of those that a client answered by itself, from the table of what is stored, only what was saved is known: they hit
    nothing.
    """
    prompts = [prompt for prompt in run.prompts if prompt.tokens > 0]
    begin = prompts[0].at
    requests = tuple(
        TracedRequest(number, prompt.at - begin, prompt.tokens, 1, *digests(prompt))
        for number, prompt in enumerate(prompts)
    )
    trace = RequestTrace(run.name, requests, run.spec.chunk_tokens, tuple(at - begin for at in run.purges))
    return RecordedPrompts(trace, run.spec, run.settings.pool.size, sum(prompt.hit for prompt in prompts))


def digests(prompt: RecordedPrompt) -> tuple[tuple[bytes, ...], bytes]:
    """Digests that stand for its full chunks, and for its tail."""
    return tuple(map(numbered_digest, prompt.chunks)), numbered_digest(prompt.tail) if prompt.tail else b""
