"""Follows: loads of what another step is still saving, layer by layer as it is stored.

A follow ends when all its objects are published or given up: its save is cancelled, its session is lost. Then exactly
the blocks fail that need what is given up. Objects that have room and that no step saves yet (a hand-off's) wait: a
step will save them, or they are given up. Steps can come to wait for each other so: each loads what the other saves,
and publishes nothing before its loads have ended. The load that closes such a circle fails at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from layerflow.errors import InvalidTransition
from layerflow.flow.arrivals.edges import fail_waiting, move_edges, progress, publish, vacate
from layerflow.flow.commands import Command, LayersStored, ObjectsLost, TransferDone
from layerflow.flow.events import FollowLent, FollowLost, FollowMoved, FollowOpened
from layerflow.flow.graph.cursor import joined
from layerflow.flow.graph.follow import FollowTransfer
from layerflow.flow.graph.step import Transfer, TransferJob
from layerflow.flow.host_events import Hop
from layerflow.flow.progress.completion import fail_blocks
from layerflow.flow.state import State

CANCELLED = "its save was cancelled"
CIRCLE = "the step that stores it waits for what this one stores"


def open_follow(state: State, event: FollowOpened, out: list[Command]) -> None:
    """Begin. What is cancelled already is lost at once.

    :raises InvalidTransition: for a number that was used, objects that cannot be, or another group's layers.
    """
    if event.follow >= state.newest_follow:
        raise InvalidTransition(f"follow {event.follow} was opened after {state.newest_follow}; numbers descend")
    if not event.layers or event.objects < 1 or (event.parts and len(event.parts) != event.objects):
        raise InvalidTransition(f"follow {event.follow} has no layers, no objects, or one without its part")
    save: Transfer | None = None
    if event.parts:
        session = state.sessions.get(event.session)
        step = session.steps.get(event.step) if session is not None else None
        if step is not None and step.saves is not None:
            save = step.saves.transfers.get(event.group)
        if save is not None and (save.shape.layers != event.layers or not set(event.parts) <= set(save.members)):
            raise InvalidTransition(f"follow {event.follow}: step {event.step} saves no such parts of a group")
    if save is not None and save.committed:
        save = None  # what is left of it was cancelled
    follow = FollowTransfer(event.follow, event.layers, event.objects, save, event.parts, lent=event.lent)
    state.newest_follow = event.follow
    state.follows[event.follow] = follow
    state.counters.follows += 1
    if save is not None:
        save.follows.append(follow)
        lose_followed(state, save, save.job.dropped, CANCELLED, out)
        _tell(follow, out)
    elif event.parts:
        state.counters.late_reports += 1
        _lose(state, follow, follow.unfinished(), "its step saves nothing any more", out)


def move_follow(state: State, event: FollowMoved, out: list[Command]) -> None:
    """What nobody saved is saved by a step now, or fetched.

    :raises InvalidTransition: a follow of a save, objects that are over, or others than those they become.
    """
    follow, into = state.follows.get(event.follow), state.upstream(event.into)
    if follow is None or follow.closed:
        if event.follow < state.newest_follow:
            raise InvalidTransition(f"follow {event.follow} was never opened")
        state.counters.late_reports += 1
        return
    known = state.newest_follow <= event.into < 0 or 0 < event.into <= state.newest_fetch
    unlike = into is not None and (len(event.objects) != into.size or into.edges or into is follow)
    if follow.parts or not known or unlike or not set(event.objects) <= set(follow.unfinished()):
        raise InvalidTransition(f"follow {event.follow}: {event.objects[:4]} cannot be those of {event.into}")
    if into is None:
        _lose(state, follow, event.objects, CANCELLED, out)  # over before it began
        return
    follow.moved.update(event.objects)
    lost = [new for new in range(into.size) if new in into.lost]
    move_edges(state, follow, event.objects, into)
    if isinstance(into, FollowTransfer):
        _cut_circles(state, into, out)
    if lost:
        fail_waiting(state, into, lost, f"not stored: {CANCELLED}", out)
    settle_follow(state, follow, out)


def _cut_circles(state: State, follow: FollowTransfer, out: list[Command]) -> None:
    """Loads have just come to wait for this save: those fail that it waits for itself.

    A circle is closed only here: a new step's loads wait for saves that began before it.
    """
    for edge in list(follow.edges) if follow.save is not None else ():
        if edge.waiting and follow.save is not None and _waits_for(follow.save.job, edge.transfer.job, set()):
            spans = joined(span for index in edge.waiting for span in edge.spans[index])
            edge.waiting = []
            fail_blocks(state, edge.transfer, spans, f"not stored: {CIRCLE}", out)


def _waits_for(saves: TransferJob, loads: TransferJob, seen: set[int]) -> bool:
    """Can these saves not be published before those loads have ended? :func:`.completion.settle` says when they are.

    :param seen: loads that were looked at, by identity.
    """
    for other in _holding(saves):
        if other is loads:
            return True
        if id(other) in seen:
            continue
        seen.add(id(other))
        sources = (edge.upstream for edge in other.edges if edge.waiting)
        saves_of = (source.save for source in sources if isinstance(source, FollowTransfer))
        if any(save is not None and _waits_for(save.job, loads, seen) for save in saves_of):
            return True
    return False


def _holding(saves: TransferJob) -> Iterator[TransferJob]:
    """The loads that must end before these saves are published: their step's, and earlier ones of their requests."""
    own = saves.step.loads
    if own is not None and not own.done:
        yield own
    requests = {part.request for position, part in enumerate(saves.parts) if position not in saves.dropped}
    for step in saves.step.session.steps.values():
        if step is saves.step:
            return
        if step.loads is not None and step.loads.undecided and not requests.isdisjoint(step.loads.requests()):
            yield step.loads


def lose_follow(state: State, event: FollowLost, out: list[Command]) -> None:
    """Nobody will save these.

    :raises InvalidTransition: objects of which that is not for the caller to say.
    """
    follow = state.follows.get(event.follow)
    if follow is None or follow.closed:
        if event.follow < state.newest_follow:
            raise InvalidTransition(f"follow {event.follow} was never opened")
        state.counters.late_reports += 1
        return
    if follow.parts or not set(event.objects) <= set(range(follow.size)):
        raise InvalidTransition(f"follow {event.follow}: objects {event.objects[:4]} are saved by a step, or unknown")
    left = set(follow.unfinished())
    _lose(state, follow, [index for index in event.objects if index in left], event.reason, out)


def lend_follow(state: State, event: FollowLent, out: list[Command]) -> None:
    """Another server reads it, or no longer does.

    :raises InvalidTransition: for one that was never opened.
    """
    follow = state.follows.get(event.follow)
    if follow is None:
        if event.follow < state.newest_follow:
            raise InvalidTransition(f"follow {event.follow} was never opened")
        state.counters.late_reports += 1
        return
    follow.lent = event.lent
    _tell(follow, out)
    settle_follow(state, follow, out)


def _tell(follow: FollowTransfer, out: list[Command]) -> None:
    """Who reads a lent follow learns of the layers that are stored; of the last one when all of it is published."""
    layers = follow.reached(())
    if follow.lent and not follow.closed and layers > follow.told:
        follow.told = layers
        out.append(LayersStored(follow.number, layers))


def advance_follows(state: State, save: Transfer, out: list[Command]) -> None:
    """More of the save may be stored now."""
    for follow in save.follows:
        _tell(follow, out)
        for edge in follow.edges:
            progress(state, edge)


def lose_followed(state: State, save: Transfer, parts: Collection[int], reason: str, out: list[Command]) -> None:
    """These parts of a save are never published."""
    for follow in list(save.follows) if parts else ():
        _lose(state, follow, [index for index in follow.unfinished() if follow.parts[index] in parts], reason, out)


def commit_follows(state: State, save: Transfer, out: list[Command]) -> None:
    """What the save has stored is published, whatever was not cancelled of it."""
    lose_followed(state, save, save.job.dropped, CANCELLED, out)
    for follow in list(save.follows):
        follow.committed = True
        publish(follow, follow.unfinished(), out)
        for edge in follow.edges:
            progress(state, edge)
        settle_follow(state, follow, out)


def settle_follow(state: State, follow: FollowTransfer, out: list[Command]) -> None:
    """Say what has become true of a follow, and forget it when nothing is left."""
    if not follow.lent:
        vacate(follow, out)
    if not follow.closed and not follow.unfinished():
        follow.closed = True
        if follow.save is not None:
            follow.save.follows.remove(follow)
            follow.save = None
        out.append(TransferDone(Hop.FETCH, follow.number))
    if follow.closed and not follow.occupied:
        state.follows.pop(follow.number, None)


def _lose(state: State, follow: FollowTransfer, objects: Sequence[int], reason: str, out: list[Command]) -> None:
    if not objects:
        return
    follow.lose(objects)
    out.append(ObjectsLost(Hop.FETCH, follow.number, tuple(objects), reason))
    fail_waiting(state, follow, objects, f"not stored: {reason}", out)
    settle_follow(state, follow, out)
