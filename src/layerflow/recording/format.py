"""The format of a recording: its file, its blocks and its records; ``docs/recording.md`` is the same for other readers.

A file is a header of :data:`HEADER_BYTES` and a ring of segments of equal size. A segment is a head of
:data:`SEGMENT_BYTES` and blocks; a block is a head and a zlib stream of one msgpack array of records; a record is an
array ``[number, at, ...]``. A segment's head is written behind its blocks: what it counts is whole.

What the core is told (:mod:`layerflow.flow.events`) and some of what it wants done is recorded as it is, so that the
same core can be driven by a recording. Texts are no part of it: requests and engines are numbers there, reasons a word.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Union

import msgspec

from layerflow.flow import commands as wanted
from layerflow.flow import events as told
from layerflow.spec import ModelSpec

VERSION: Final = 1
MAGIC: Final = b"LAYERFLOW-RECORD"

PRELUDE: Final = struct.Struct("<16sII")
"""How a file begins: the magic, the version of the format, and the bytes of the msgpack map of :class:`Header`."""

HEADER_BYTES: Final = 4096
NEWEST: Final = struct.Struct("<Q")
"""The last bytes of the header: the number of the newest segment, so that a file without it is known to be cut."""

SEGMENT_HEAD: Final = struct.Struct("<4sIQQdd")
"""A segment's head: its magic, a CRC-32 of the rest, its number, its bytes of blocks, first and last time."""

SEGMENT_MAGIC: Final = b"LFSG"
SEGMENT_BYTES: Final = 64
BLOCK_HEAD: Final = struct.Struct("<IIII")
"""A block's head: bytes of the zlib stream, its CRC-32, bytes behind decompression, and records."""

SEGMENTS: Final = 8
"""Of a ring. A full file forgets its oldest eighth at once."""

LEAST_BYTES: Final = 1 << 20
"""Smallest size of a file: its segments hold some blocks each."""

MOST_BYTES: Final = 1 << 40
"""Largest size of a file, as of the setting ``record.max_bytes``."""


class Header(msgspec.Struct, frozen=True):
    """What holds for the whole file.

    :param layerflow: version of the server.
    :param began: monotonic seconds of the server at which the recording began; the clock of every other time.
    :param began_unix: the same moment as seconds since 1970.
    :param segment_bytes: of each segment, its head included. :param segments: at most so many.
    """

    layerflow: str
    began: float
    began_unix: float
    segment_bytes: int
    segments: int = SEGMENTS


def segment_crc(number: int, used: int, first: float, last: float) -> bytes:
    """The fields of a segment's head that its checksum covers."""
    return struct.pack("<QQdd", number, used, first, last)


# Records. Times are monotonic seconds; numbers of sessions and steps are the server's own.


class Record(msgspec.Struct, array_like=True, frozen=True):
    """Base of all records.

    :param at: when it happened.
    """

    at: float


class Told(Record, frozen=True):
    """The core was told this event; see :mod:`layerflow.flow.events`."""

    event: Any


class Wanted(Record, frozen=True):
    """The core wanted this done, as an answer to the event before it; see :mod:`layerflow.flow.commands`."""

    command: Any


class ModelSeen(Record, frozen=True, tag=1):
    """A model that sessions cache.

    :param model: its number. :param spec: without the digest of its weights.
    """

    model: int
    spec: ModelSpec


class SessionSeen(Record, frozen=True, tag=2):
    """A client that is attached: an engine worker, or a scheduler.

    :param engine: the engine's number; its workers and its scheduler have the same.
    :param name: what the engine is called in status and metrics.
    :param memory: an engine worker. :param direct: it moves bytes past the arena.
    """

    session: int
    engine: int
    name: str
    model: int
    memory: bool
    direct: bool = False


class SessionGone(Record, frozen=True, tag=11):
    """A client that was seen has left."""

    session: int


class Purged(Record, frozen=True, tag=12):
    """The arena was emptied.

    :param objects: that it held.
    """

    objects: int


class SettingsInForce(Record, frozen=True, tag=3):
    """The settings from now on, by section: numbers, switches and choices; no path, no address and no other text."""

    sections: dict[str, dict[str, bool | int | float | str]]


class LookedUp(Record, frozen=True, tag=4):
    """A lookup was answered.

    :param at: when it arrived. :param answered: when it was answered.
    :param request: the request's number. :param tokens: of its prompt.
    :param chunks: numbers of its full chunks, first to last.
    :param tail: number of what they leave of the prompt; 0 = nothing.
    :param hit: tokens that can be loaded.
    :param objects: that the hit is made of, over all groups and shards. :param resident: those of them that are in the
        arena; the others are fetched from behind it, or from a peer, or are still being stored.
    :param following: the hit is on what is still being stored.
    """

    answered: float
    session: int
    request: int
    tokens: int
    chunks: tuple[int, ...]
    tail: int
    hit: int
    objects: int
    resident: int
    following: bool = False


class LookupsMissed(Record, frozen=True, tag=5):
    """Lookups that a client has answered by itself, from the table of what is stored: how many, of how many tokens."""

    session: int
    requests: int
    tokens: int


class PartSeen(NamedTuple):
    """One request's objects of one group within a step, in one direction.

    :param chunks: numbers of the chunks. :param blocks: of each, the blocks that move.
    :param tokens: of each; of loads 0, where it is a full chunk.
    """

    request: int
    group: int
    chunks: tuple[int, ...]
    blocks: tuple[int, ...]
    tokens: tuple[int, ...]


class StepSeen(Record, frozen=True, tag=6):
    """What a worker asked to move in a step. The core is told less: of saves, what is not stored and finds room."""

    session: int
    step: int
    loads: tuple[PartSeen, ...]
    saves: tuple[PartSeen, ...]
    planned: bool = False


class StepMeasured(Record, frozen=True, tag=7):
    """What a worker measured of a finished step. Seconds; bytes.

    :param new_tokens: that were computed; 0 = not known. :param context_tokens: before them, as one request's.
    :param layer_s: compute time of one layer; 0 = not known.
    """

    session: int
    step: int
    load_bytes: int
    load_transfer_s: float
    load_exposed_s: float
    save_bytes: int
    save_transfer_s: float
    save_exposed_s: float
    new_tokens: int = 0
    context_tokens: int = 0
    layer_s: float = 0.0


class StepSpans(Record, frozen=True, tag=8):
    """What took time in a step, on its worker.

    :param at: when the first span starts.
    :param spans: see :func:`layerflow.observe.trace.unpack_spans`.
    """

    session: int
    step: int
    spans: bytes


class ServerSample(Record, frozen=True, tag=9):
    """How full the arena is, and what has been counted since the server's start. Every second.

    :param shed: save parts. :param full: objects that found no room. :param lag_s: how late the loop runs.
    """

    used_bytes: int
    objects: int
    pinned: int
    commits: int
    evictions: int
    evicted_bytes: int
    full: int
    shed: int
    load_inflight_bytes: int
    save_inflight_bytes: int
    lag_s: float


class Dropped(Record, frozen=True, tag=10):
    """So many events are missing here: the writer was behind, or an event was larger than a segment."""

    events: int


def _recorded(kind: type, base: type[Record], field: str, number: int) -> type[Record]:
    made = msgspec.defstruct(
        kind.__name__, [(field, kind)], bases=(base,), tag=number, array_like=True, frozen=True, module=__name__
    )
    assert issubclass(made, Record)
    return made


EVENTS: Final = MappingProxyType(
    {
        kind: 20 + place
        for place, kind in enumerate(
            (
                told.SessionOpened,
                told.SessionLost,
                told.StepOpened,
                told.FetchOpened,
                told.FetchAvailable,
                told.FollowOpened,
                told.FollowMoved,
                told.IncomingFailed,
                told.IncomingLeased,
                told.WriteOpened,
                told.WritesRevoked,
                told.CallDone,
                told.FetchesRevoked,
                told.HostLost,
                told.FrontierReached,
                told.LayersComputed,
                told.BatchDone,
                told.BatchFailed,
                told.LoadsMoved,
                told.LoadsFenced,
                told.StepClosed,
                told.RequestAborted,
                told.StepsRevoked,
                told.LimitsChanged,
                told.Tick,
                told.LoadsLost,
            )
        )
    }
)
"""The number of each event. New events come last; a number is never reused."""

COMMANDS: Final = MappingProxyType(
    {
        kind: 80 + place
        for place, kind in enumerate(
            (
                wanted.Submit,
                wanted.LoadFailed,
                wanted.Commit,
                wanted.Revoke,
                wanted.StepDone,
                wanted.Call,
                wanted.ObjectsLost,
            )
        )
    }
)
"""The number of each command that is recorded; the others follow from the events."""

RECORDS: Final[tuple[type[Record], ...]] = (
    ModelSeen,
    SessionSeen,
    SessionGone,
    Purged,
    SettingsInForce,
    LookedUp,
    LookupsMissed,
    StepSeen,
    StepMeasured,
    StepSpans,
    ServerSample,
    Dropped,
    *(_recorded(kind, Told, "event", number) for kind, number in EVENTS.items()),
    *(_recorded(kind, Wanted, "command", number) for kind, number in COMMANDS.items()),
)

encoder: Final = msgspec.msgpack.Encoder()
decoder: Final = msgspec.msgpack.Decoder(list[Union[RECORDS]])  # type: ignore[valid-type]  # noqa: UP007


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment's head.

    :param number: they ascend from 1. :param offset: of its first block in the file. :param used: bytes of its blocks.
    :param first: time of its first record. :param last: of its last.
    """

    number: int
    offset: int
    used: int
    first: float
    last: float
