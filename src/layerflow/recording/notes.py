"""Notes: what a server's loop hands over as it is, and the records that another thread makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from layerflow.flow.commands import Command
from layerflow.flow.events import Event, LimitsChanged
from layerflow.places import NOWHERE
from layerflow.recording.format import (
    COMMANDS,
    EVENTS,
    LookedUp,
    ModelSeen,
    PartSeen,
    Record,
    SessionGone,
    SessionSeen,
    SettingsInForce,
    StepSeen,
    StepSpans,
)
from layerflow.recording.renumbering import WITH_TEXT, Renumbering
from layerflow.spec import ModelSpec
from layerflow.wire.messages import LoadPart, Lookup, OpenStep, SavePart

CoreNote = tuple[float, Event, Sequence[Command]]
"""The core was told an event at this time, and answered with these commands. A plain tuple: there is one per event."""


class SessionNote(NamedTuple):
    """A client has attached, or was attached when the recording began."""

    at: float
    session: int
    engine: str
    name: str
    spec: ModelSpec
    memory: bool
    direct: bool


class LookupNote(NamedTuple):
    """A lookup was answered; see :class:`layerflow.recording.format.LookedUp`.

    :param places: a :data:`layerflow.places.PLACE` for each object of the hit.
    """

    at: float
    answered: float
    session: int
    message: Lookup
    hit: int
    places: bytes
    following: bool


class StepNote(NamedTuple):
    """A worker opens a step."""

    at: float
    session: int
    message: OpenStep


Note = CoreNote | SessionNote | LookupNote | StepNote | Record
"""A :class:`Record` has nothing that must be left out, and is recorded as it is."""


_CORE: Final = {kind: (number, kind in WITH_TEXT) for kind, number in (EVENTS | COMMANDS).items()}


def weight(note: Any) -> int:
    """Bytes of the digests or spans that a note keeps; 0 for those that are small."""
    if isinstance(note, LookupNote):
        return len(note.message.digests) + len(note.message.block_digests) + len(note.places)
    if isinstance(note, StepNote):
        message = note.message
        return sum(len(part.digests) for part in message.loads) + sum(
            len(part.digests) + len(part.block_digests) for part in message.saves
        )
    return len(note.spans) if isinstance(note, StepSpans) else 0


class Transcript:
    """Makes records of notes, in their order; for one thread.

    Remembers what every segment of a file begins with, see :meth:`standing`.
    """

    def __init__(self) -> None:
        self._numbers = Renumbering()
        self._engine_of: dict[int, str] = {}
        self._models: dict[bytes, ModelSeen] = {}
        self._sessions: dict[int, SessionSeen] = {}
        self._settings: SettingsInForce | None = None
        self._limits: Any = None

    def standing(self, at: float) -> list[Any]:
        """Models, sessions, settings and limits as they are: without those a later record cannot be read."""
        known: list[Any] = [msgspec.structs.replace(model, at=at) for model in self._models.values()]
        known += [msgspec.structs.replace(session, at=at) for session in self._sessions.values()]
        if self._settings is not None:
            known.append(msgspec.structs.replace(self._settings, at=at))
        if self._limits is not None:
            known.append((EVENTS[LimitsChanged], at, self._limits))
        return known

    def records_of(self, notes: Sequence[Any]) -> list[Any]:
        """The records of these notes."""
        records: list[Any] = []
        # One loop over local names: the core's notes are nearly all, and their cost is the recording's.
        add, change, engine_of, core = records.append, self._numbers.change, self._engine_of, _CORE
        for note in notes:
            if type(note) is not tuple:
                self._add(note, records)
                continue
            at, event, commands = note
            number, has_text = core[type(event)]
            if has_text:
                event = change(event, engine_of)
            elif type(event) is LimitsChanged:
                self._limits = event
            add((number, at, event))
            for command in commands:
                found = core.get(type(command))
                if found is not None:
                    add((found[0], at, change(command, engine_of) if found[1] else command))
        return records

    def _add(self, note: Any, records: list[Any]) -> None:
        if isinstance(note, LookupNote):
            records.append(self._lookup(note))
        elif isinstance(note, StepNote):
            records.append(self._step(note))
        elif isinstance(note, SessionNote):
            self._session(note, records)
        else:
            if isinstance(note, SettingsInForce):
                self._settings = note
            elif isinstance(note, SessionGone):
                self._sessions.pop(note.session, None)
                self._engine_of.pop(note.session, None)
            records.append(note)

    def _session(self, note: SessionNote, records: list[Any]) -> None:
        # Two workers of one fingerprint may have other ranks: the whole spec tells models apart.
        key = msgspec.msgpack.encode(note.spec)
        model = self._models.get(key)
        if model is None:
            spec = msgspec.structs.replace(note.spec, content="")
            model = self._models[key] = ModelSeen(note.at, len(self._models) + 1, spec)
            records.append(model)
        engine = self._numbers.engine(note.engine)
        seen = SessionSeen(note.at, note.session, engine, note.name, model.model, note.memory, note.direct)
        self._sessions[note.session] = seen
        self._engine_of[note.session] = note.engine
        records.append(seen)

    def _lookup(self, note: LookupNote) -> LookedUp:
        message, numbers = note.message, self._numbers
        resident = np.frombuffer(note.places, "<u8")[::2] != NOWHERE
        return LookedUp(
            note.at,
            note.answered,
            note.session,
            numbers.request(self._engine_of.get(note.session, ""), message.request),
            message.tokens,
            numbers.chunks(message.digests),
            numbers.tail(message.tail),
            note.hit,
            len(resident),
            int(resident.sum()),
            note.following,
        )

    def _step(self, note: StepNote) -> StepSeen:
        message, engine = note.message, self._engine_of.get(note.session, "")
        loads, saves = self._parts(message.loads, engine), self._parts(message.saves, engine)
        return StepSeen(note.at, note.session, message.step, loads, saves, message.planned)

    def _parts(self, parts: Iterable[LoadPart | SavePart], engine: str) -> tuple[PartSeen, ...]:
        return tuple(
            PartSeen(
                self._numbers.request(engine, part.request),
                part.group,
                chunks := self._numbers.chunks(part.digests),
                _counts(part.counts),
                _counts(part.tokens) if isinstance(part, SavePart) else (0,) * (len(chunks) - 1) + (part.tail,),
            )
            for part in parts
        )


def _counts(packed: bytes) -> tuple[int, ...]:
    return tuple(int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4))
