"""What the core wants done. Block ranges are numbered as in :mod:`layerflow.flow.events`."""

from __future__ import annotations

from dataclasses import dataclass

from layerflow.flow.events import Direction, Hop


@dataclass(slots=True)  # not frozen: that triples what making one costs, and there is one per batch
class Submit:
    """Copy blocks `lo` to `hi` of one layer, all planes.

    It may be handed out ahead of time: its lane holds it until the forward pass has come far enough.

    :param layer: the model's layer number.
    :param byte_lo: with `byte_hi`: the part of the single block `lo` that this batch moves, where one
        block is larger than the byte cap; 0 and 0 = whole blocks.
    :param gate: loads: start once the frontier has reached this layer, -1 = at once; saves: once this layer, their
        own, is computed.
    :param seals: no later batch of this step and direction carries anything of this layer: with this
        batch and the earlier ones done, the layer is complete.
    """

    session: int
    step: int
    batch: int
    direction: Direction
    layer: int
    lo: int
    hi: int
    byte_lo: int
    byte_hi: int
    nbytes: int
    gate: int
    seals: bool


@dataclass(frozen=True, slots=True)
class Seal:
    """The layer is complete with the batches already submitted (what remained of it was cancelled)."""

    session: int
    step: int
    direction: Direction
    layer: int


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Blocks `lo` to `hi` of the group's loads will not arrive in full; the engine recomputes them.

    A part that had layers left to be granted fails whole; one whose layers are all granted loses exactly
    the blocks of the failed batch. No block of a step is reported twice.
    """

    session: int
    step: int
    request: str
    group: int
    lo: int
    hi: int
    reason: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop what was handed out of this step and direction and has not started; report it as failed."""

    session: int
    step: int
    direction: Direction
    reason: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Publish the objects of these save parts (positions in ``StepOpened.saves``): every layer is stored."""

    session: int
    step: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Revoke:
    """Give the reserved objects of these save parts back; nothing writes them any more."""

    session: int
    step: int
    parts: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class LoadsDone:
    """No load of this step touches engine memory or reads the arena any more; pins may go."""

    session: int
    step: int


@dataclass(frozen=True, slots=True)
class Release:
    """No transfer touches this aborted request's blocks any more."""

    session: int
    request: str


@dataclass(frozen=True, slots=True)
class StepDone:
    """Nothing of this step is left to do."""

    session: int
    step: int
    loaded_bytes: int
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class Call:
    """The host moves layers `layer_lo` to `layer_hi` (counted within the group) of objects `lo` to `hi`, in one call.

    No layers (both ends are the number of layers): it publishes these objects, which are wholly written.
    Objects that are lost are left out. The host ends its calls of one hop in order.
    """

    hop: Hop
    transfer: int
    call: int
    lo: int
    hi: int
    layer_lo: int
    layer_hi: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """Objects of a fetch or follow are whole in the arena: publish them.

    :param readers: (session, step, objects) of every step that still loads them: pin them until its LoadsDone.
    """

    hop: Hop
    transfer: int
    objects: tuple[int, ...]
    readers: tuple[tuple[int, int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class ObjectsLost:
    """Objects of a fetch, follow or write will not be published.

    The room of what was to come is taken until RoomFreed. What the host knows of written ones it is to give up.
    """

    hop: Hop
    transfer: int
    objects: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RoomFreed:
    """Neither a host, nor another server, nor a step's loads touch the room of these lost objects any more."""

    hop: Hop
    transfer: int
    objects: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayersStored:
    """Tell a reader at another server that so many leading layers of what is left of a follow are stored."""

    transfer: int
    layers: int


@dataclass(frozen=True, slots=True)
class WriteBegun:
    """The backlog has room for this write: the host may prepare it."""

    write: int


@dataclass(frozen=True, slots=True)
class ObjectsPublished:
    """Tell that these objects of a write are published at the backend."""

    write: int
    objects: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransferDone:
    """Nothing more of this fetch, follow or write is to come; its host is not asked for anything of it any more."""

    hop: Hop
    transfer: int


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a Tick at this time (replaces the last one asked for)."""

    when: float


Command = (
    Submit
    | Seal
    | LoadFailed
    | Cancel
    | Commit
    | Revoke
    | LoadsDone
    | Release
    | StepDone
    | Call
    | Arrived
    | ObjectsLost
    | RoomFreed
    | LayersStored
    | WriteBegun
    | ObjectsPublished
    | TransferDone
    | WakeAt
)
