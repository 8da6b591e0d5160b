"""What loads wait for: fetches from the backend or a peer, and follows of what other steps store.

An object is published once all its layers have come. One that fails fails the blocks that need it, and no
others. A fetch ends when all its objects have come or failed, or when it was wanted and no longer is: then
what is in flight is awaited, and what is wanted again meanwhile goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import TypeVar

from layerflow.errors import InvalidTransition
from layerflow.flow.commands import Arrived, Call, Command, LayersStored, ObjectsLost, RoomFreed, TransferDone
from layerflow.flow.events import (
    FetchAvailable,
    FetchesRevoked,
    FetchOpened,
    FollowMoved,
    FollowOpened,
    Hop,
    IncomingFailed,
    IncomingLeased,
    Part,
)
from layerflow.flow.graph import (
    CANCELLED,
    ENDED,
    OPEN,
    Dependency,
    Incoming,
    IncomingFetch,
    IncomingSave,
    Span,
    Transfer,
    TransferJob,
    common,
    fetch_of,
    joined,
)
from layerflow.flow.host_lane import HostLane
from layerflow.flow.host_transfer import by_reason
from layerflow.flow.progress import fail_blocks
from layerflow.flow.state import State

# The dependencies between what is still to come and the loads that wait for it, wherever it comes from.


def check_needs(state: State, part: Part, layers: tuple[int, ...]) -> str:
    """Say what is wrong with what a load part needs; empty = nothing.

    :param layers: of the part's group.
    """
    end = 0
    for need in part.needs:
        incoming = state.incoming.get(need.incoming)
        if incoming is None or incoming.closed or not 0 <= need.item < incoming.size:
            return f"needs object {need.item} of fetch {need.incoming}, which is not on its way"
        if incoming.layer_numbers != layers:
            return f"needs {incoming}, which has other layers than its group"
        if not incoming.coming(need.item):
            return f"needs object {need.item} of {incoming}, which has come or failed"
        if not end <= need.lo < need.hi <= part.blocks:
            return f"needs blocks {need.lo} to {need.hi} of {part.blocks}, after block {end}"
        end = need.hi
    return ""


def add_cursors(state: State, transfer: Transfer) -> None:
    """Add a cursor for the blocks that are in the arena, and one for each fetch or follow that brings others."""
    ready: list[Span] = []
    needs: dict[int, dict[int, list[Span]]] = {}
    for member, position in enumerate(transfer.members):
        at, end = transfer.starts[member], transfer.starts[member + 1]
        base = at
        for need in transfer.job.parts[position].needs:
            if at < base + need.lo:
                ready.append((at, base + need.lo))
            at = base + need.hi
            needs.setdefault(need.incoming, {}).setdefault(need.item, []).append((base + need.lo, at))
        if at < end:
            ready.append((at, end))
    if ready:
        transfer.add_cursor(joined(ready))
    for number, spans in needs.items():
        incoming = state.incoming[number]
        add_dependency(state, incoming, transfer, spans)
        if isinstance(incoming, IncomingFetch):
            incoming.claimed = True
            state.lane_of(incoming.hop).join(incoming)


def add_dependency(state: State, incoming: Incoming, transfer: Transfer, spans: dict[int, list[Span]]) -> None:
    """Make loads of a new step wait for objects.

    :param spans: by object, its blocks of the transfer.
    """
    transfer.add_cursor(joined(span for mine in spans.values() for span in mine), incoming.number)
    dependency = Dependency(incoming, transfer, spans, sorted(spans))
    incoming.dependencies.append(dependency)
    transfer.job.dependencies.append(dependency)
    layers_available(state, dependency)


def layers_available(state: State, dependency: Dependency) -> None:
    """Let layers that have come be granted."""
    transfer, incoming = dependency.transfer, dependency.incoming
    if not dependency.waiting:
        return
    layers = incoming.layers_ready(dependency.waiting)
    if layers <= transfer.arrivals[incoming.number]:
        return
    transfer.arrivals[incoming.number] = layers
    if layers == len(incoming.layer_numbers):
        dependency.waiting = []
    cursor = transfer.arriving(incoming.number)
    if cursor is None:
        return
    cursor.permit(layers)
    if cursor.fresh:
        transfer.merge(cursor)
    state.enqueue(transfer.job)


def mark_stored(incoming: Incoming, objects: Sequence[int], out: list[Command]) -> None:
    """Publish objects that are whole in the arena. They stay pinned for the steps that still load them."""
    if not objects:
        return
    incoming.whole.update(objects)
    readers: list[tuple[int, int, tuple[int, ...]]] = []
    for dependency in incoming.dependencies:
        mine = tuple(index for index in objects if index in dependency.spans)
        if mine:
            step = dependency.transfer.job.step
            readers.append((step.session.number, step.number, mine))
    out.append(Arrived(incoming.hop, incoming.number, tuple(objects), tuple(readers)))


def fail(state: State, incoming: Incoming, objects: Sequence[int], reason: str, out: list[Command]) -> None:
    """Mark objects as lost, and fail exactly the blocks that need them."""
    if objects:
        incoming.lose(objects)
        out.append(ObjectsLost(incoming.hop, incoming.number, tuple(objects), reason))
        _fail_dependents(state, incoming, objects, reason, out)


def _fail_dependents(state: State, incoming: Incoming, objects: Sequence[int], reason: str, out: list[Command]) -> None:
    reason = f"{incoming.absent}: {reason}"
    gone = set(objects)
    for dependency in list(incoming.dependencies):
        lost = [index for index in dependency.waiting if index in gone]
        if lost:
            dependency.waiting = [index for index in dependency.waiting if index not in gone]
            spans = joined(span for index in lost for span in dependency.spans[index])
            fail_blocks(state, dependency.transfer, spans, reason, out)
            layers_available(state, dependency)


def free_room(incoming: Incoming, out: list[Command]) -> None:
    """Give the room of lost objects back that no step's loads hold."""
    if not incoming.occupied:
        return
    held = {index for dependency in incoming.dependencies for index in dependency.spans}
    free = sorted(incoming.occupied - held)
    if free:
        incoming.occupied.difference_update(free)
        out.append(RoomFreed(incoming.hop, incoming.number, tuple(free)))


def rebind(state: State, incoming: Incoming, objects: Sequence[int], into: Incoming) -> None:
    """Make loads that wait for `objects` wait for objects 0, 1, 2, ... of `into` instead. No layer of them has come."""
    gone = set(objects)
    for dependency in list(incoming.dependencies):
        spans = {new: dependency.spans.pop(old) for new, old in enumerate(objects) if old in dependency.spans}
        if not spans:
            continue
        waiting = set(dependency.waiting)
        dependency.waiting = [index for index in dependency.waiting if index not in gone]
        transfer, job = dependency.transfer, dependency.transfer.job
        moved = Dependency(into, transfer, spans, [new for new, old in enumerate(objects) if old in waiting])
        into.dependencies.append(moved)
        job.dependencies.append(moved)
        cursor = transfer.arriving(incoming.number)
        blocks = joined(span for mine in spans.values() for span in mine)
        coming = common(cursor.spans, blocks) if cursor is not None else []
        transfer.arrivals.setdefault(into.number, 0)
        if cursor is not None and coming:
            transfer.add_cursor(coming, into.number)
            cursor.drop(coming)
            if cursor.exhausted:
                transfer.remove(cursor)
        if not dependency.spans:
            incoming.dependencies.remove(dependency)
            job.dependencies.remove(dependency)
        layers_available(state, moved)


def release(job: TransferJob) -> list[Incoming]:
    """Drop the dependencies of loads that are done. Returns what they depended on."""
    dependencies, job.dependencies = job.dependencies, []
    for dependency in dependencies:
        dependency.incoming.dependencies.remove(dependency)
    return list(dict.fromkeys(dependency.incoming for dependency in dependencies))


UNWANTED = ""


def finalize_incoming_if_done(state: State, incoming: Incoming, out: list[Command]) -> None:
    """Give up what nothing wants, free room that nothing uses, close what is over, and forget it with its last room."""
    if not (incoming.closed or incoming.wanted or incoming.moving):
        fail(state, incoming, incoming.unfinished(), UNWANTED, out)
    if not incoming.room_in_use:
        free_room(incoming, out)
    if not (incoming.closed or incoming.moving or incoming.unfinished()):
        incoming.closed = True  # type: ignore[misc]  # a slot of IncomingFetch and IncomingSave
        if isinstance(incoming, IncomingFetch):
            state.deadlines.set(incoming, math.inf)
            state.lane_of(incoming.hop).remove(incoming)
        elif isinstance(incoming, IncomingSave) and incoming.save is not None:
            incoming.save.follows.remove(incoming)
            incoming.save = None
        out.append(TransferDone(incoming.hop, incoming.number))
    if incoming.closed and not incoming.occupied:
        state.incoming.pop(incoming.number, None)


# What the core is told of fetches and follows alike.


Kind = TypeVar("Kind", bound=Incoming)


def _register(state: State, incoming: Incoming) -> None:
    state.newest_incoming = incoming.number
    state.incoming[incoming.number] = incoming


def _check_ascending(state: State, number: int) -> None:
    if number <= state.newest_incoming:
        raise InvalidTransition(f"{number} was opened after {state.newest_incoming}; numbers ascend")


def _find(state: State, number: int, wanted: type[Kind], *, or_closed: bool = False) -> Kind | None:
    """Return what is still on its way; None = it is over, and this news of it late.

    :param or_closed: also what is kept only for its room.
    :raises InvalidTransition: nothing of this kind was opened with this number.
    """
    found = state.incoming.get(number)
    if number > state.newest_incoming or number < 1:
        raise InvalidTransition(f"{wanted.kind} {number} was never opened")
    if found is None or (found.closed and not or_closed):
        state.counters.late_reports += 1
        return None
    if not isinstance(found, wanted):
        raise InvalidTransition(f"{found} is no {wanted.kind}")
    return found


def fail_incoming(state: State, event: IncomingFailed, out: list[Command]) -> None:
    """Give up objects that will not come. What a host is doing with them is awaited.

    :raises InvalidTransition: for what was never opened, objects that it does not have, or those that a step saves.
    """
    incoming = _find(state, event.incoming, Incoming)
    if incoming is None:
        return
    unknown = any(not 0 <= index < incoming.size for index, _ in event.failed)
    if unknown or (isinstance(incoming, IncomingSave) and incoming.parts):
        raise InvalidTransition(f"{incoming} does not have objects {event.failed[:3]}, or a step saves them")
    for reason, lost in by_reason(event.failed, incoming.unfinished()).items():
        fail(state, incoming, lost, reason, out)
    finalize_incoming_if_done(state, incoming, out)


def lease_incoming(state: State, event: IncomingLeased, out: list[Command]) -> None:
    """Note that somebody wants it beside the loads, or nobody any more.

    :raises InvalidTransition: for what was never opened.
    """
    incoming = _find(state, event.incoming, Incoming, or_closed=True)
    if incoming is None:
        return
    incoming.leased = event.leased  # type: ignore[misc]  # a slot of IncomingFetch and IncomingSave
    if isinstance(incoming, IncomingFetch):
        incoming.claimed = incoming.claimed or event.leased
        state.lane_of(incoming.hop).join(incoming)
    elif isinstance(incoming, IncomingSave):
        _tell(incoming, out)
    finalize_incoming_if_done(state, incoming, out)


# Fetches: objects that a host brings.


def check_fetch(event: FetchOpened) -> None:
    """May this be opened? Who opens a fetch asks before anything is done for it.

    :raises InvalidTransition: its objects, its layers or its way cannot be.
    """
    if event.hop not in (Hop.FETCH, Hop.PEER):
        raise InvalidTransition(f"fetch {event.fetch} cannot come by the way {event.hop.name}")
    if not event.layers or not event.objects or any(min(item) < 1 for item in event.objects):
        raise InvalidTransition(f"fetch {event.fetch} has no layers, no objects, or an object without bytes or blocks")
    if event.available > len(event.layers):
        raise InvalidTransition(f"fetch {event.fetch}: {event.available} layers are available of {len(event.layers)}")


def open_fetch(state: State, event: FetchOpened, now: float) -> None:
    """Begin.

    :raises InvalidTransition: for a number that was used, and as :func:`check_fetch`.
    """
    _check_ascending(state, event.fetch)
    check_fetch(event)
    available = len(event.layers) if event.available < 0 else event.available
    lane = state.lane_of(event.hop)
    fetch = fetch_of(event, lane.client(event.engine), available)
    _register(state, fetch)
    lane.add(fetch)
    _set_deadline(state, fetch, now)


def extend_fetch(state: State, event: FetchAvailable, now: float) -> None:
    """Let more layers be fetched: its source has stored them.

    :raises InvalidTransition: for a fetch that was never opened, or layers that it does not have.
    """
    fetch = _find(state, event.fetch, IncomingFetch)
    if fetch is None:
        return
    if not 0 <= event.layers <= fetch.layers:
        raise InvalidTransition(f"fetch {event.fetch}: {event.layers} layers are available of {fetch.layers}")
    if event.layers > fetch.limit:
        fetch.limit = event.layers
        _set_deadline(state, fetch, now)
        state.lane_of(fetch.hop).join(fetch)


def _set_deadline(state: State, fetch: IncomingFetch, now: float) -> None:
    # A fetch that waits for its source needs no deadline: the steps that need it have theirs.
    stuck = len(fetch.lost) + len(fetch.whole) < len(fetch.objects) and not fetch.stalled
    state.deadlines.set(fetch, now + state.budget.limits.fetch_timeout_s if stuck else math.inf)


def fetch_done(
    state: State, fetch: IncomingFetch, call: Call, failed: dict[str, list[int]], *, now: float, out: list[Command]
) -> None:
    """Take over what a call has brought; its host failed objects for these reasons."""
    for reason, lost in failed.items():
        fail(state, fetch, lost, reason, out)
    moved = fetch.carried(call)
    if moved:
        state.counters.fetched_bytes += sum(fetch.objects[index].layer_bytes for index in moved) * (
            call.layer_hi - call.layer_lo
        )
        _set_deadline(state, fetch, now)
    come = [index for index in moved if index not in fetch.whole and fetch.layers_ready((index,)) == fetch.layers]
    state.counters.fetched_objects += len(come)
    mark_stored(fetch, come, out)
    for dependency in fetch.dependencies:
        layers_available(state, dependency)
    finalize_incoming_if_done(state, fetch, out)


def fail_fetches(state: State, lane: HostLane[IncomingFetch], reason: str, out: list[Command]) -> None:
    """Fail what a dead host has not brought."""
    for fetch in list(lane.transfers.values()):
        fetch.calls.clear()
        fail(state, fetch, fetch.unfinished(), reason, out)
        finalize_incoming_if_done(state, fetch, out)
    lane.lost()


def revoke_fetches(state: State, event: FetchesRevoked, out: list[Command]) -> None:
    """Give up what has not come. It can be fetched again once its host has ended its calls."""
    reason = event.reason
    for fetch in [*state.fetches.transfers.values(), *state.peers.transfers.values()]:
        if event.unwanted and (
            fetch.leased or any(dependency.transfer.job.state is not CANCELLED for dependency in fetch.dependencies)
        ):
            continue
        fail(state, fetch, fetch.unfinished(), reason, out)
        finalize_incoming_if_done(state, fetch, out)


def expire_fetch(state: State, fetch: IncomingFetch, out: list[Command]) -> None:
    """Give up a fetch of which nothing has come for too long."""
    state.counters.expired_fetches += 1
    timeout = state.budget.limits.fetch_timeout_s
    fail(state, fetch, fetch.unfinished(), f"nothing of it came for {timeout:g} s", out)
    finalize_incoming_if_done(state, fetch, out)


# Follows: loads of what another step is still saving, layer by layer as it is stored.
#
# A follow ends when all its objects are published or given up: its save is cancelled, its session is lost. Then exactly
# the blocks fail that need what is given up. Objects that have room and that no step saves yet (a hand-off's) wait: a
# step will save them, or they are given up. Steps can come to wait for each other so: each loads what the other saves,
# and publishes nothing before its loads have ended. The load that closes such a circle fails at once.


SAVE_CANCELLED = "its save was cancelled"
CIRCLE = "the step that stores it waits for what this one stores"


def open_follow(state: State, event: FollowOpened, out: list[Command]) -> None:
    """Begin. What is cancelled already is lost at once.

    :raises InvalidTransition: for a number that was used, objects that cannot be, or another group's layers.
    """
    _check_ascending(state, event.follow)
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
    follow = IncomingSave(event.follow, event.layers, event.objects, save, event.parts, leased=event.leased)
    _register(state, follow)
    state.counters.follows += 1
    if save is not None:
        save.follows.append(follow)
        lose_followed(state, save, save.job.dropped, SAVE_CANCELLED, out)
        _tell(follow, out)
    elif event.parts:
        state.counters.late_reports += 1
        fail(state, follow, follow.unfinished(), "its step saves nothing any more", out)
        finalize_incoming_if_done(state, follow, out)


def rebind_follow(state: State, event: FollowMoved, out: list[Command]) -> None:
    """Let objects that no step saved come from the step that saves them now, or from a fetch.

    :raises InvalidTransition: a follow of a save, objects that are over, or others than those they become.
    """
    follow, into = _find(state, event.follow, IncomingSave), state.incoming.get(event.into)
    if follow is None:
        return
    known = 0 < event.into <= state.newest_incoming
    unlike = into is not None and (len(event.objects) != into.size or into.dependencies or into is follow)
    if follow.parts or not known or unlike or not set(event.objects) <= set(follow.unfinished()):
        raise InvalidTransition(f"follow {event.follow}: {event.objects[:4]} cannot be those of {event.into}")
    if into is None:
        fail(state, follow, event.objects, SAVE_CANCELLED, out)  # over before it began
        finalize_incoming_if_done(state, follow, out)
        return
    follow.rebound.update(event.objects)
    lost = [new for new in range(into.size) if new in into.lost]
    rebind(state, follow, event.objects, into)
    if isinstance(into, IncomingSave):
        _cut_circles(state, into, out)
    if lost:
        _fail_dependents(state, into, lost, SAVE_CANCELLED, out)
    finalize_incoming_if_done(state, follow, out)


def _cut_circles(state: State, follow: IncomingSave, out: list[Command]) -> None:
    """Loads have just come to wait for this save: those fail that it waits for itself.

    A circle is closed only here: a new step's loads wait for saves that began before it.
    """
    for dependency in list(follow.dependencies) if follow.save is not None else ():
        if (
            dependency.waiting
            and follow.save is not None
            and _waits_for(follow.save.job, dependency.transfer.job, set())
        ):
            spans = joined(span for index in dependency.waiting for span in dependency.spans[index])
            dependency.waiting = []
            fail_blocks(state, dependency.transfer, spans, f"not stored: {CIRCLE}", out)


def _waits_for(saves: TransferJob, loads: TransferJob, seen: set[int]) -> bool:
    """Whether these saves are published only after those loads have ended, see :func:`.finalize_step_if_done`.

    :param seen: loads that were looked at, by identity.
    """
    for other in _holding(saves):
        if other is loads:
            return True
        if id(other) in seen:
            continue
        seen.add(id(other))
        sources = (dependency.incoming for dependency in other.dependencies if dependency.waiting)
        saves_of = (source.save for source in sources if isinstance(source, IncomingSave))
        if any(save is not None and _waits_for(save.job, loads, seen) for save in saves_of):
            return True
    return False


def _holding(saves: TransferJob) -> Iterator[TransferJob]:
    """The loads that must end before these saves are published: their step's, and earlier ones of their requests."""
    own = saves.step.loads
    if own is not None and own.state is not ENDED:
        yield own
    requests = {part.request for position, part in enumerate(saves.parts) if position not in saves.dropped}
    for step in saves.step.session.steps.values():
        if step is saves.step:
            return
        if step.loads is not None and step.loads.state is OPEN and not requests.isdisjoint(step.loads.requests()):
            yield step.loads


def _tell(follow: IncomingSave, out: list[Command]) -> None:
    """Report the layers that are stored of a leased follow; the last one is, once all of it is published."""
    layers = follow.layers_ready(())
    if follow.leased and not follow.closed and layers > follow.reported_layers:
        follow.reported_layers = layers
        out.append(LayersStored(follow.number, layers))


def advance_follows(state: State, save: Transfer, out: list[Command]) -> None:
    """Let loads, and readers at other servers, take what a save has stored."""
    for follow in save.follows:
        _tell(follow, out)
        for dependency in follow.dependencies:
            layers_available(state, dependency)


def lose_followed(state: State, save: Transfer, parts: Collection[int], reason: str, out: list[Command]) -> None:
    """Fail the objects of save parts that are never published."""
    for follow in list(save.follows) if parts else ():
        fail(state, follow, [index for index in follow.unfinished() if follow.parts[index] in parts], reason, out)
        finalize_incoming_if_done(state, follow, out)


def commit_follows(state: State, save: Transfer, out: list[Command]) -> None:
    """Publish what the save has stored, whatever was not cancelled of it."""
    lose_followed(state, save, save.job.dropped, SAVE_CANCELLED, out)
    for follow in list(save.follows):
        follow.committed = True
        mark_stored(follow, follow.unfinished(), out)
        for dependency in follow.dependencies:
            layers_available(state, dependency)
        finalize_incoming_if_done(state, follow, out)
