"""Writes: objects on their way from the arena to the backend, layer by layer behind the saves that store them.

A write begins with its step, so that the host has asked the pool for room when the first layer is stored in the arena.
If the write backlog is full when the step opens, the decision is made again when the first layer is stored. A write
moves what is stored, publishes what is committed, and gives up what is revoked. A call that has begun ends, or its
host does, so writes need no deadline.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from layerflow.errors import InvalidTransition
from layerflow.flow.commands import Call, Command, ObjectsLost, ObjectsPublished, TransferDone, WriteBegun
from layerflow.flow.events import Hop, WriteOpened, WritesRevoked
from layerflow.flow.graph import Transfer, WriteTransfer
from layerflow.flow.state import State

SHED = "shed"
SAVE_CANCELLED = "its save was cancelled"


def open_write(state: State, event: WriteOpened, out: list[Command]) -> None:
    """Begin, as far as the backlog has room; what belongs to parts that are cancelled already is lost at once.

    :raises InvalidTransition: for a number that was used, or objects that cannot be.
    """
    lane = state.writes
    if event.write <= state.newest_write:
        raise InvalidTransition(f"write {event.write} was opened after write {state.newest_write}; numbers ascend")
    if not event.objects or any(min(item) < 1 for item in event.objects) or len(event.parts) != len(event.objects):
        raise InvalidTransition(f"write {event.write} has no objects, one that is empty, or one without its part")
    session = state.sessions.get(event.session)
    step = session.steps.get(event.step) if session is not None else None
    save = step.saves.transfers.get(event.group) if step is not None and step.saves is not None else None
    if save is None:
        state.counters.late_reports += 1
        state.newest_write = event.write
        out.append(ObjectsLost(Hop.WRITE, event.write, tuple(range(len(event.objects))), "its step saves nothing"))
        out.append(TransferDone(Hop.WRITE, event.write))
        return
    if save.write is not None or save.committed or not set(event.parts) <= set(save.members):
        raise InvalidTransition(
            f"write {event.write}: step {event.step} has no such parts of group {event.group}, or a write of it already"
        )
    layers = len(save.shape.layers)
    nbytes = layers * sum(item.layer_bytes for item in event.objects)
    write = WriteTransfer(
        event.write, lane.client(event.engine), event.objects, layers, 0, parts=event.parts, save=save, nbytes=nbytes
    )
    save.write = write
    state.newest_write = event.write
    lane.add(write)
    if _fits(state, write):
        _begin(state, write, out)
    lose_parts(state, save, save.job.dropped, SAVE_CANCELLED, out)
    follow_save(state, save, out)


def follow_save(state: State, save: Transfer, out: list[Command]) -> None:
    """More of what a write follows may be stored in the arena now."""
    write = save.write
    if write is None or not save.live_parts:
        return
    stored = save.stored()
    if stored <= write.limit:
        return
    if not write.begun and not _fits(state, write):
        lost = write.unfinished()
        state.counters.shed_writes += len(lost)
        _lose(state, write, lost, SHED, out)
        return
    if not write.begun:
        _begin(state, write, out)
    write.limit = stored
    state.writes.join(write)


def commit_write(state: State, save: Transfer, out: list[Command]) -> None:
    """What the save has stored is published in the arena: it may be at the backend."""
    write = save.write
    if write is None:
        return
    lose_parts(state, save, save.job.dropped, SAVE_CANCELLED, out)
    follow_save(state, save, out)
    _part(write)
    state.writes.join(write)


def lose_parts(state: State, save: Transfer, parts: Collection[int], reason: str, out: list[Command]) -> None:
    """Cancel the writes of save parts that are never published."""
    write = save.write
    if write is not None and parts:
        _lose(state, write, [index for index in write.unfinished() if write.parts[index] in parts], reason, out)


def write_done(
    state: State, write: WriteTransfer, call: Call, failed: dict[str, list[int]], out: list[Command]
) -> None:
    """The host has ended a call, and failed objects for these reasons."""
    for reason, lost in failed.items():
        _lose(state, write, lost, reason, out)
    moved = write.carried(call)
    layers = call.layer_hi - call.layer_lo
    state.counters.written_bytes += layers * sum(write.objects[index].layer_bytes for index in moved)
    if not layers and moved:
        write.whole.update(moved)
        state.counters.written_objects += len(moved)
        out.append(ObjectsPublished(write.number, tuple(moved)))
    state.writes.join(write)
    _close(state, write, out)


def revoke_writes(state: State, event: WritesRevoked, out: list[Command]) -> None:
    """What is not published at the backend is given up."""
    for write in list(state.writes.transfers.values()):
        _lose(state, write, write.unfinished(), event.reason, out)


def lose_writes(state: State, reason: str, out: list[Command]) -> None:
    """The host is dead: nothing of any write moves any more."""
    lane = state.writes
    for write in list(lane.transfers.values()):
        write.calls.clear()
        _lose(state, write, write.unfinished(), reason, out)
        _close(state, write, out)
    lane.lost()


def _fits(state: State, write: WriteTransfer) -> bool:
    return state.writes.backlog + write.nbytes <= state.budget.limits.write_backlog_bytes


def _begin(state: State, write: WriteTransfer, out: list[Command]) -> None:
    write.begun = True
    state.writes.backlog += write.nbytes
    out.append(WriteBegun(write.number))


def _lose(state: State, write: WriteTransfer, objects: Sequence[int], reason: str, out: list[Command]) -> None:
    if not objects:
        return
    write.lose(objects)
    out.append(ObjectsLost(Hop.WRITE, write.number, tuple(objects), reason))
    _close(state, write, out)


def _close(state: State, write: WriteTransfer, out: list[Command]) -> None:
    if write.closed or write.calls or len(write.lost) + len(write.whole) < len(write.objects):
        return
    write.closed = True
    _part(write)
    lane = state.writes
    lane.remove(write)
    lane.backlog -= write.nbytes * write.begun
    out.append(TransferDone(Hop.WRITE, write.number))


def _part(write: WriteTransfer) -> None:
    """The write follows its save no more."""
    if write.save is not None:
        write.save.write = None
        write.save = None
