"""What loads wait for: fetches from the backend or a peer, and what other steps store.

An object is published once all its layers have come. One that fails fails the blocks that need it, and no
others. A fetch ends when all its objects have come or failed, or when it was wanted and no longer is: then
what is in flight is awaited, and what is wanted again meanwhile goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from layerflow.errors import InvalidTransition
from layerflow.flow.commands import Arrived, Call, Command, LayersStored, ObjectsLost, RoomFreed, TransferDone
from layerflow.flow.events import (
    FetchAvailable,
    FetchesRevoked,
    FetchFailed,
    FetchLeased,
    FetchOpened,
    FollowLent,
    FollowLost,
    FollowMoved,
    FollowOpened,
    Hop,
    Part,
)
from layerflow.flow.graph import (
    Dependency,
    Fetch,
    Follow,
    Incoming,
    Span,
    Transfer,
    TransferJob,
    common,
    fetch_of,
    joined,
)
from layerflow.flow.host_lane import HostLane
from layerflow.flow.progress import fail_blocks
from layerflow.flow.state import State

# The dependencies between what is still to come and the loads that wait for it, wherever it comes from.


def add_dependency(state: State, incoming: Incoming, transfer: Transfer, spans: dict[int, list[Span]]) -> None:
    """Loads of a new step wait for these objects.

    :param spans: by object, its blocks of the transfer.
    """
    transfer.add_cursor(joined(span for mine in spans.values() for span in mine), incoming.number)
    dependency = Dependency(incoming, transfer, spans, sorted(spans))
    incoming.dependencies.append(dependency)
    transfer.job.dependencies.append(dependency)
    layers_available(state, dependency)


def layers_available(state: State, dependency: Dependency) -> None:
    """Layers that have come may be granted."""
    transfer, incoming = dependency.transfer, dependency.incoming
    if not dependency.waiting:
        return
    layers = incoming.layers_ready(dependency.waiting)
    if layers <= transfer.arrivals[incoming.number]:
        return
    transfer.arrivals[incoming.number] = layers
    if layers == incoming.span:
        dependency.waiting = []
    cursor = transfer.arriving(incoming.number)
    if cursor is None:
        return
    cursor.permit(layers)
    if cursor.fresh:
        transfer.merge(cursor)
    state.enqueue(transfer.job)


def mark_stored(incoming: Incoming, objects: Sequence[int], out: list[Command]) -> None:
    """These are whole in the arena: they stay pinned for whoever still loads them."""
    if not objects:
        return
    incoming.whole.update(objects)
    readers: list[tuple[int, int, tuple[int, ...]]] = []
    for dependency in incoming.dependencies:
        mine = tuple(index for index in objects if index in dependency.spans)
        if mine:
            step = dependency.transfer.job.step
            readers.append((step.session.number, step.number, mine))
    out.append(Arrived(incoming.number, tuple(objects), tuple(readers)))


def fail(state: State, incoming: Incoming, objects: Sequence[int], reason: str, out: list[Command]) -> None:
    """These will not come: the blocks that need them fail, for whoever waits."""
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
        out.append(RoomFreed(incoming.number, tuple(free)))


def rebind(state: State, incoming: Incoming, objects: Sequence[int], into: Incoming) -> None:
    """Loads that wait for these `objects` wait for those of another incoming from now on: for number 0, 1, 2, ...

    Of none of them a layer has come.
    """
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
    """The job's loads are done: they hold no room any more. What they held."""
    dependencies, job.dependencies = job.dependencies, []
    for dependency in dependencies:
        dependency.incoming.dependencies.remove(dependency)
    return list(dict.fromkeys(dependency.incoming for dependency in dependencies))


UNWANTED = ""


def open_fetch(state: State, event: FetchOpened, now: float) -> None:
    """Begin.

    :raises InvalidTransition: for a number that was used, or objects that cannot be.
    """
    if event.fetch <= state.newest_fetch:
        raise InvalidTransition(f"fetch {event.fetch} was opened after fetch {state.newest_fetch}; numbers ascend")
    if event.hop is Hop.WRITE:
        raise InvalidTransition(f"fetch {event.fetch} cannot come by the way to the backend")
    if not event.layers or not event.objects or any(min(item) < 1 for item in event.objects):
        raise InvalidTransition(f"fetch {event.fetch} has no layers, no objects, or an object without bytes or blocks")
    available = len(event.layers) if event.available < 0 else event.available
    if available > len(event.layers):
        raise InvalidTransition(f"fetch {event.fetch}: {available} layers are available of {len(event.layers)}")
    lane = state.lane_of(event.hop)
    fetch = fetch_of(event, lane.client(event.engine), available)
    lane.add(fetch)
    _set_deadline(state, fetch, now)


def extend_fetch(state: State, event: FetchAvailable, now: float) -> None:
    """Its source has stored more of it.

    :raises InvalidTransition: for a fetch that was never opened, or layers that it does not have.
    """
    fetch = _living(state, event.fetch)
    if fetch is None:
        return
    if not 0 <= event.layers <= fetch.layers:
        raise InvalidTransition(f"fetch {event.fetch}: {event.layers} layers are available of {fetch.layers}")
    if event.layers > fetch.limit:
        fetch.limit = event.layers
        _set_deadline(state, fetch, now)
        state.lane_of(fetch.hop).join(fetch)


def fail_fetch(state: State, event: FetchFailed, out: list[Command]) -> None:
    """Some of its objects will not come. What the host is doing with them is awaited.

    :raises InvalidTransition: for a fetch that was never opened, or objects that it does not have.
    """
    fetch = _living(state, event.fetch)
    if fetch is None:
        return
    if any(not 0 <= index < len(fetch.objects) for index, _ in event.failed):
        raise InvalidTransition(f"fetch {event.fetch} does not have objects {event.failed[:3]}")
    for reason, lost in fetch.fresh(event.failed).items():
        _lose_fetched(state, fetch, lost, reason, out)
    finalize_fetch_if_done(state, fetch, out)


def _living(state: State, number: int) -> Fetch | None:
    """A fetch that is not over; None = it is, and this news of it is late."""
    fetch = state.fetch(number)
    if fetch is None or fetch.closed:
        if number > state.newest_fetch:
            raise InvalidTransition(f"fetch {number} was never opened")
        state.counters.late_reports += 1
        return None
    return fetch


def _set_deadline(state: State, fetch: Fetch, now: float) -> None:
    """It is given up if nothing comes of it; while it waits for its source, the steps that need it have deadlines."""
    stuck = len(fetch.lost) + len(fetch.whole) < len(fetch.objects) and not fetch.stalled
    state.deadlines.set(fetch, now + state.budget.limits.fetch_timeout_s if stuck else math.inf)


def lease_fetch(state: State, event: FetchLeased, out: list[Command]) -> None:
    """Lookups lease it, or no longer do."""
    fetch = _living(state, event.fetch)
    if fetch is None:
        return
    fetch.leased = event.leased
    fetch.claimed = fetch.claimed or event.leased
    state.lane_of(fetch.hop).join(fetch)
    finalize_fetch_if_done(state, fetch, out)


def check_needs(state: State, part: Part, layers: tuple[int, ...]) -> str:
    """What is wrong with what a load part needs; empty = nothing.

    :param layers: of the part's group.
    """
    end = 0
    for need in part.needs:
        fetch = state.incoming(need.fetch)
        if fetch is None or fetch.closed or not 0 <= need.item < fetch.size:
            return f"needs object {need.item} of fetch {need.fetch}, which is not on its way"
        if fetch.numbers != layers:
            return f"needs fetch {need.fetch}, which has other layers than its group"
        if need.item in fetch.lost or need.item in fetch.whole or need.item in _moved(fetch):
            return f"needs object {need.item} of fetch {need.fetch}, which has come or failed"
        if not end <= need.lo < need.hi <= part.blocks:
            return f"needs blocks {need.lo} to {need.hi} of {part.blocks}, after block {end}"
        end = need.hi
    return ""


def add_cursors(state: State, transfer: Transfer) -> None:
    """One cursor for the blocks that are in the arena, and one for each fetch."""
    ready: list[Span] = []
    needs: dict[int, dict[int, list[Span]]] = {}
    for member, position in enumerate(transfer.members):
        at, end = transfer.starts[member], transfer.starts[member + 1]
        base = at
        for need in transfer.job.parts[position].needs:
            if at < base + need.lo:
                ready.append((at, base + need.lo))
            at = base + need.hi
            needs.setdefault(need.fetch, {}).setdefault(need.item, []).append((base + need.lo, at))
        if at < end:
            ready.append((at, end))
    if ready:
        transfer.add_cursor(joined(ready))
    for number, spans in needs.items():
        incoming = state.incoming(number)
        assert incoming is not None
        add_dependency(state, incoming, transfer, spans)
        if isinstance(incoming, Fetch):
            incoming.claimed = True
            state.lane_of(incoming.hop).join(incoming)


def fetch_done(
    state: State, fetch: Fetch, call: Call, failed: dict[str, list[int]], now: float, out: list[Command]
) -> None:
    """The host has ended a call, and failed objects for these reasons."""
    for reason, lost in failed.items():
        _lose_fetched(state, fetch, lost, reason, out)
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
    finalize_fetch_if_done(state, fetch, out)


def fail_fetches(state: State, lane: HostLane[Fetch], reason: str, out: list[Command]) -> None:
    """The host is dead: nothing of any of its fetches moves any more."""
    for fetch in list(lane.transfers.values()):
        fetch.calls.clear()
        _lose_fetched(state, fetch, fetch.unfinished(), reason, out)
        finalize_fetch_if_done(state, fetch, out)
    lane.lost()


def revoke_fetches(state: State, event: FetchesRevoked, out: list[Command]) -> None:
    """What has not come is given up. It can be fetched again once the host has ended its calls."""
    reason = event.reason
    for fetch in [*state.fetches.transfers.values(), *state.peers.transfers.values()]:
        if event.unwanted and (
            fetch.leased or any(not dependency.transfer.job.cancelled for dependency in fetch.dependencies)
        ):
            continue
        _lose_fetched(state, fetch, fetch.unfinished(), reason, out)
        finalize_fetch_if_done(state, fetch, out)


def expire_fetch(state: State, fetch: Fetch, out: list[Command]) -> None:
    """Nothing has come of it for too long."""
    state.counters.expired_fetches += 1
    timeout = state.budget.limits.fetch_timeout_s
    _lose_fetched(state, fetch, fetch.unfinished(), f"nothing of it came for {timeout:g} s", out)
    finalize_fetch_if_done(state, fetch, out)


def finalize_fetch_if_done(state: State, fetch: Fetch, out: list[Command]) -> None:
    """Say what has become true of a fetch, and forget it when nothing is left."""
    lane = state.lane_of(fetch.hop)
    if not fetch.closed and not fetch.wanted and not fetch.calls:
        _lose_fetched(state, fetch, fetch.unfinished(), UNWANTED, out)
    if not fetch.calls:
        free_room(fetch, out)
    over = not fetch.calls and len(fetch.lost) + len(fetch.whole) == len(fetch.objects)
    if over and not fetch.closed:
        fetch.closed = True
        state.deadlines.set(fetch, math.inf)
        lane.remove(fetch)
        out.append(TransferDone(fetch.hop, fetch.number))
    if fetch.closed and not fetch.occupied:
        lane.transfers.pop(fetch.number, None)


def _lose_fetched(state: State, fetch: Fetch, objects: Sequence[int], reason: str, out: list[Command]) -> None:
    """These will not come: the blocks that need them fail, for whoever waits."""
    if not objects:
        return
    fetch.lose(objects)
    out.append(ObjectsLost(fetch.hop, fetch.number, tuple(objects), reason))
    fail(state, fetch, objects, f"not fetched: {reason}", out)


def _moved(incoming: Incoming) -> Collection[int]:
    return incoming.moved if isinstance(incoming, Follow) else ()


# Follows: loads of what another step is still saving, layer by layer as it is stored.
#
# A follow ends when all its objects are published or given up: its save is cancelled, its session is lost. Then exactly
# the blocks fail that need what is given up. Objects that have room and that no step saves yet (a hand-off's) wait: a
# step will save them, or they are given up. Steps can come to wait for each other so: each loads what the other saves,
# and publishes nothing before its loads have ended. The load that closes such a circle fails at once.


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
    follow = Follow(event.follow, event.layers, event.objects, save, event.parts, lent=event.lent)
    state.newest_follow = event.follow
    state.follows[event.follow] = follow
    state.counters.follows += 1
    if save is not None:
        save.follows.append(follow)
        lose_followed(state, save, save.job.dropped, CANCELLED, out)
        _tell(follow, out)
    elif event.parts:
        state.counters.late_reports += 1
        _lose_followed(state, follow, follow.unfinished(), "its step saves nothing any more", out)


def rebind_follow(state: State, event: FollowMoved, out: list[Command]) -> None:
    """What nobody saved is saved by a step now, or fetched.

    :raises InvalidTransition: a follow of a save, objects that are over, or others than those they become.
    """
    follow, into = state.follows.get(event.follow), state.incoming(event.into)
    if follow is None or follow.closed:
        if event.follow < state.newest_follow:
            raise InvalidTransition(f"follow {event.follow} was never opened")
        state.counters.late_reports += 1
        return
    known = state.newest_follow <= event.into < 0 or 0 < event.into <= state.newest_fetch
    unlike = into is not None and (len(event.objects) != into.size or into.dependencies or into is follow)
    if follow.parts or not known or unlike or not set(event.objects) <= set(follow.unfinished()):
        raise InvalidTransition(f"follow {event.follow}: {event.objects[:4]} cannot be those of {event.into}")
    if into is None:
        _lose_followed(state, follow, event.objects, CANCELLED, out)  # over before it began
        return
    follow.moved.update(event.objects)
    lost = [new for new in range(into.size) if new in into.lost]
    rebind(state, follow, event.objects, into)
    if isinstance(into, Follow):
        _cut_circles(state, into, out)
    if lost:
        fail(state, into, lost, f"not stored: {CANCELLED}", out)
    finalize_follow_if_done(state, follow, out)


def _cut_circles(state: State, follow: Follow, out: list[Command]) -> None:
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
        saves_of = (source.save for source in sources if isinstance(source, Follow))
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
    _lose_followed(state, follow, [index for index in event.objects if index in left], event.reason, out)


def share_follow(state: State, event: FollowLent, out: list[Command]) -> None:
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
    finalize_follow_if_done(state, follow, out)


def _tell(follow: Follow, out: list[Command]) -> None:
    """Who reads a lent follow learns of the layers that are stored; of the last one when all of it is published."""
    layers = follow.layers_ready(())
    if follow.lent and not follow.closed and layers > follow.told:
        follow.told = layers
        out.append(LayersStored(follow.number, layers))


def advance_follows(state: State, save: Transfer, out: list[Command]) -> None:
    """More of the save may be stored now."""
    for follow in save.follows:
        _tell(follow, out)
        for dependency in follow.dependencies:
            layers_available(state, dependency)


def lose_followed(state: State, save: Transfer, parts: Collection[int], reason: str, out: list[Command]) -> None:
    """These parts of a save are never published."""
    for follow in list(save.follows) if parts else ():
        _lose_followed(
            state, follow, [index for index in follow.unfinished() if follow.parts[index] in parts], reason, out
        )


def commit_follows(state: State, save: Transfer, out: list[Command]) -> None:
    """What the save has stored is published, whatever was not cancelled of it."""
    lose_followed(state, save, save.job.dropped, CANCELLED, out)
    for follow in list(save.follows):
        follow.committed = True
        mark_stored(follow, follow.unfinished(), out)
        for dependency in follow.dependencies:
            layers_available(state, dependency)
        finalize_follow_if_done(state, follow, out)


def finalize_follow_if_done(state: State, follow: Follow, out: list[Command]) -> None:
    """Say what has become true of a follow, and forget it when nothing is left."""
    if not follow.lent:
        free_room(follow, out)
    if not follow.closed and not follow.unfinished():
        follow.closed = True
        if follow.save is not None:
            follow.save.follows.remove(follow)
            follow.save = None
        out.append(TransferDone(Hop.FETCH, follow.number))
    if follow.closed and not follow.occupied:
        state.follows.pop(follow.number, None)


def _lose_followed(state: State, follow: Follow, objects: Sequence[int], reason: str, out: list[Command]) -> None:
    if not objects:
        return
    follow.lose(objects)
    out.append(ObjectsLost(Hop.FETCH, follow.number, tuple(objects), reason))
    fail(state, follow, objects, f"not stored: {reason}", out)
    finalize_follow_if_done(state, follow, out)
