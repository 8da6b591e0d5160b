"""The core's invariants. Costs O(everything); meant for tests, after every event."""

from __future__ import annotations

import itertools
import math

from layerflow.errors import InvalidTransition
from layerflow.flow.events import Direction
from layerflow.flow.graph import (
    ENDED,
    OPEN,
    Accounting,
    Cursor,
    FlowStep,
    Incoming,
    IncomingFetch,
    IncomingObjectState,
    IncomingSave,
    InFlightBatch,
    JobState,
    PartState,
    Session,
    Transfer,
    TransferJob,
    WriteTransfer,
    joined,
    touches,
    without,
)
from layerflow.flow.host_lane import HostLane, T
from layerflow.flow.host_transfer import HostTransfer
from layerflow.flow.progress import builds_on_loads
from layerflow.flow.scheduler import next_cursor
from layerflow.flow.state import State

# The invariants of what moves between arena and backend, and of the loads that wait for it.


def validate_incoming(state: State) -> None:
    """Raise for the first invariant of the ways into the arena that does not hold.

    :raises InvalidTransition: naming it.
    """
    for number, incoming in state.incoming.items():
        _require_transfer(
            incoming.number == number <= state.newest_incoming, incoming, "is not where the core keeps it"
        )
        _incoming(incoming)
        if isinstance(incoming, IncomingFetch):
            _fetch(state, incoming)
        elif isinstance(incoming, IncomingSave):
            _follow(incoming)
    for lane in (state.fetches, state.peers):
        _lane(state, lane)
        for number, fetch in lane.transfers.items():
            _require_transfer(state.incoming.get(number) is fetch, fetch, "is not known as coming")
            _require_transfer(fetch.hop is lane.hop, fetch, "is in the lane of another hop")
    for session in state.sessions.values():
        for step in session.steps.values():
            for transfer in step.saves.transfers.values() if step.saves is not None else ():
                for follow in transfer.follows:
                    known = state.incoming.get(follow.number) is follow
                    _require_transfer(known and follow.save is transfer, follow, "follows another save")
            for dependency in step.loads.dependencies if step.loads is not None else ():
                incoming = dependency.incoming
                mine = dependency in incoming.dependencies and state.incoming.get(incoming.number) is incoming
                over = incoming.closed and not incoming.occupied
                if not (mine or over):
                    raise InvalidTransition(f"step {step.number} waits for {incoming.number}, which is forgotten")


def validate_writes(state: State) -> None:
    """The same of the way to the backend.

    :raises InvalidTransition: naming it.
    """
    lane = state.writes
    _lane(state, lane)
    for write in lane.transfers.values():
        _write(write)
    begun = sum(write.nbytes for write in lane.transfers.values() if write.begun)
    if begun != lane.backlog:
        raise InvalidTransition(f"{lane.backlog} bytes of backlog are booked, of {begun}")


def _lane(state: State, lane: HostLane[T]) -> None:
    calls = {number: call for one in lane.transfers.values() for number, call in one.calls.items()}
    if calls.keys() != lane.calls.keys() or lane.inflight != sum(call.nbytes for call in calls.values()):
        raise InvalidTransition(f"{lane.hop.name}: {lane.inflight} bytes in calls {lane.calls.keys()}, not {calls}")
    for number, transfer in lane.transfers.items():
        _require_transfer(transfer.number == number, transfer, "is not where its lane keeps it")
        mine = transfer.client.transfers.get(number) is transfer
        _require_transfer(mine and not transfer.closed, transfer, "is with its client exactly until it is closed")
        queued = transfer.client.queued[lane.hop]
        _require_transfer(not transfer.permitted or queued, transfer, "has permitted work and is not queued")
    for client in lane.clients.values():
        if not client.transfers or lane.clients[client.name] is not client:
            raise InvalidTransition(f"{lane.hop.name}: client {client.name} is kept without a transfer")
    if lane.ring.queue:
        ready = (client.next_transfer() for client in lane.ring.queue)
        first = next((one for one in ready if one is not None), None)
        if first is not None:
            limits = state.budget.limits
            extent = first.next_extent(limits.max_transfer_blocks, lane.most_bytes(first, state.budget))
            _require_transfer(not lane.fits(extent.nbytes, state.budget), first, f"idles although {extent} may move")


def _require_transfer(holds: bool, transfer: HostTransfer | Incoming, what: str) -> None:
    if not holds:
        raise InvalidTransition(f"{transfer.hop.name} {transfer.number}: {what}")


def _common(transfer: HostTransfer) -> None:
    lost, whole, everything = transfer.lost, transfer.whole, set(range(len(transfer.objects)))
    _require_transfer(not lost & whole and lost | whole <= everything, transfer, "has objects that are lost and whole")
    live = [item for index, item in enumerate(transfer.objects) if index not in lost]
    sums = (sum(item.layer_bytes for item in live), sum(item.blocks for item in live))
    _require_transfer(sums == (transfer.layer_bytes, transfer.layer_blocks), transfer, "miscounts its live objects")
    over = not transfer.calls and lost | whole == everything
    _require_transfer(transfer.closed == over, transfer, "is closed exactly when all is over")
    _require_transfer(0 <= transfer.index <= transfer.limit <= transfer.layers, transfer, "is past what may move")


def _incoming(incoming: Incoming) -> None:
    held = {index for dependency in incoming.dependencies for index in dependency.spans}
    for holds, what in (
        (incoming.occupied <= incoming.lost, "keeps room that it has not lost"),
        (not incoming.closed or bool(incoming.occupied), "is over and was not forgotten"),
        (incoming.wanted or incoming.moving or incoming.closed, "is not wanted and was not ended"),
        (incoming.closed == (not incoming.moving and not incoming.unfinished()), "is closed exactly when all is over"),
        (incoming.room_in_use or incoming.occupied <= held, "keeps room that nothing touches"),
    ):
        _require_transfer(holds, incoming, what)
    for dependency in incoming.dependencies:
        step = dependency.transfer.job.step
        living = dependency in dependency.transfer.job.dependencies and dependency.transfer.job.state is not ENDED
        _require_transfer(living, incoming, f"is held by loads of step {step.number} that ended")
        waiting = set(dependency.waiting)
        _require_transfer(not incoming.lost & waiting, incoming, "is waited for where it is lost")
        if isinstance(incoming, IncomingSave):
            _require_transfer(not incoming.rebound & waiting, incoming, "is waited for where it has moved")


def _fetch(state: State, fetch: IncomingFetch) -> None:
    _common(fetch)
    kept = fetch.number in state.lane_of(fetch.hop).transfers
    _require_transfer(kept != fetch.closed, fetch, "is in its lane exactly until it is closed")
    for index in set(range(len(fetch.objects))) - fetch.lost:
        _require_transfer(
            (fetch.layers_ready((index,)) == fetch.layers) == (index in fetch.whole), fetch, "hides an object"
        )
    _require_transfer(not fetch.closed or fetch.alarm == math.inf, fetch, "has a deadline and is over")


def _follow(follow: IncomingSave) -> None:
    lost, whole, rebound, save = follow.lost, follow.whole, follow.rebound, follow.save
    stored = follow.layers_ready(())
    for holds, what in (
        (not (lost & whole or lost & rebound or whole & rebound), "has an object in two states"),
        (not whole or follow.committed, "published what its save has not"),
        (not (rebound and follow.parts), "gave what a step saves to another"),
        (follow.closed == (save is None) or not follow.parts, "follows a save exactly until it is over"),
        (
            follow.closed or follow.reported_layers <= stored,
            f"told its reader of {follow.reported_layers} layers of {stored}",
        ),
        (
            follow.closed or not follow.leased or follow.reported_layers == stored,
            f"kept {stored} layers from its reader",
        ),
    ):
        _require_transfer(holds, follow, what)
    if save is not None:
        _require_transfer(follow in save.follows, follow, "is unknown to the save that it follows")
        dead = {index for index in follow.unfinished() if follow.parts[index] in save.job.dropped}
        _require_transfer(not dead, follow, f"waits for {dead}, which is cancelled")


def _write(write: WriteTransfer) -> None:
    _common(write)
    _require_transfer(write.begun or not (write.limit or write.calls), write, "moves before it has begun")
    following = write.save is not None or not write.unfinished()
    _require_transfer(following or write.limit == write.layers, write, "follows no save and waits for layers")
    _require_transfer(write.save is None or write.save.write is write, write, "is unknown to the save that it follows")
    _require_transfer(
        not write.publishing or (write.save is None and write.index == write.layers), write, "publishes too early"
    )


def validate(state: State) -> None:
    """Raise for the first invariant that does not hold.

    :raises InvalidTransition: with the step's story.
    """
    steps = [step for session in state.sessions.values() for step in session.steps.values()]
    for step in steps:
        _step(state, step)
    _budget(state, steps)
    for session in state.sessions.values():
        _session(session)
    _conserving(state)
    validate_incoming(state)
    validate_writes(state)
    if (
        state.dirty_steps
        or state.progressed_saves
        or state.finished_loads
        or state.cancelled_saves
        or state.committed_saves
    ):
        raise InvalidTransition(
            f"{len(state.dirty_steps)} steps are left unsettled, {len(state.progressed_saves)} saves unfollowed"
        )


def lives(state: State) -> dict[tuple[object, ...], JobState | PartState | IncomingObjectState]:
    """By name, where each direction of a step is, each of its parts, and each object on its way."""
    found: dict[tuple[object, ...], JobState | PartState | IncomingObjectState] = {}
    for session in state.sessions.values():
        for step in session.steps.values():
            for job in (step.loads, step.saves):
                if job is not None:
                    name = (session.number, step.number, job.direction)
                    found[name] = job.state
                    found.update(((*name, position), job.part_state(position)) for position in range(len(job.parts)))
    for number, incoming in state.incoming.items():
        found.update(((number, index), incoming.object_state(index)) for index in range(incoming.size))
    return found


def _require(holds: bool, step: FlowStep, what: str) -> None:
    if not holds:
        raise InvalidTransition(f"session {step.session.number} step {step.number}: {what}", step.recent_events())


def _step(state: State, step: FlowStep) -> None:
    _require(step.session.steps.get(step.number) is step, step, "is not where its session keeps it")
    _require(step.alarm == step.next_alarm(), step, f"its alarm {step.alarm} is not {step.next_alarm()}")
    loads, saves = step.loads, step.saves
    for job in (loads, saves):
        if job is not None:
            _job(state, job)
    if loads is not None:
        over = loads.state is ENDED
        _require(over == loads.idle, step, "loads are said to be done exactly when nothing is left of them")
    if saves is not None:
        _saves(saves)
        written = [transfer for transfer in saves.transfers.values() if transfer.committed]
        decided = loads is None or loads.state is ENDED
        _require(not written or decided, step, "committed before its loads were done")
        _require(not builds_on_loads(saves, written), step, "committed what an earlier step still loads for")
        ready = [s for s in saves.transfers.values() if not (s.committed or s.pending or s.in_flight)]
        if decided and any(part not in saves.dropped for transfer in ready for part in transfer.members):
            _require(saves.held and builds_on_loads(saves, ready), step, "holds a commit back for nothing")
    over = (loads is None or loads.state is ENDED) and (saves is None or not saves.open)
    _require(not (step.closed and over), step, "has nothing left and was not forgotten")


def _job(state: State, job: TransferJob) -> None:
    step = job.step
    pending = step.session.pending[job.direction].get(step.number)
    _require((pending is job) == bool(job.cursors), step, f"{job.direction.name}: queued exactly while it is granted")
    _require(
        job.in_flight_count == sum(len(transfer.in_flight) for transfer in job.transfers.values()),
        step,
        f"{job.direction.name}: {job.in_flight_count} batches in flight do not match the transfers",
    )
    _require(
        not (job.state is not OPEN and job.direction is Direction.LOAD and job.cursors), step, "grants fenced loads"
    )
    _require(not (job.planned and job.cursors), step, "grants loads that its worker moves")
    gates = [batch.gate for batch in job.gated]
    _require(gates == sorted(gates), step, f"{job.direction.name}: gated batches are out of order")
    _require(not gates or gates[0] > job.gates_open_to, step, f"{job.direction.name}: holds what may move")
    for transfer in job.transfers.values():
        _transfer_holds(state, transfer)


def _transfer_holds(state: State, transfer: Transfer) -> None:
    job, layers = transfer.job, len(transfer.shape.layers)
    step = job.step
    cursors = transfer.cursors()
    _require(transfer.pending == len(cursors), step, "miscounts its cursors")
    if job.state is OPEN:
        _require(
            transfer.sealed == transfer.first_open_layer(),
            step,
            f"sealed {transfer.sealed} layers of {transfer.first_open_layer()}",
        )
    _require(0 <= transfer.sealed <= layers, step, f"sealed {transfer.sealed} layers of {layers}")
    live = sum(position not in job.dropped for position in transfer.members)
    _require(transfer.live_parts == live, step, f"counts {transfer.live_parts} live parts of {live}")
    covered: list[tuple[int, int]] = []
    for cursor in cursors:
        _cursor(transfer, cursor)
        covered += cursor.spans
    covered.sort()
    _require(all(left[1] <= right[0] for left, right in itertools.pairwise(covered)), step, "cursors overlap")
    _arrivals(state, transfer, cursors)
    for position in job.dropped:
        if job.transfer_of(position) is transfer:
            _require(
                not touches(covered, *transfer.span(position)), step, f"cancelled part {position} is still granted"
            )
    for number, batch in transfer.in_flight.items():
        _require(batch.number == number and state.in_flight.get(number) is batch, step, f"lost batch {number}")
        _flight(transfer, batch)


def _arrivals(state: State, transfer: Transfer, cursors: list[Cursor]) -> None:
    job, layers = transfer.job, len(transfer.shape.layers)
    needs = {need.incoming for position in transfer.members for need in job.parts[position].needs}
    told = transfer.arrivals.keys()
    unasked = {number for number in told - needs if number in state.incoming and job.state is not ENDED}
    served = {dependency.incoming.number for dependency in job.dependencies if dependency.transfer is transfer}
    _require(needs <= told and unasked <= served, job.step, f"knows fetches {transfer.arrivals} of {needs}")
    waiting = {cursor.incoming: cursor for cursor in cursors if cursor.incoming}
    _require(len(waiting) == sum(bool(c.incoming) for c in cursors), job.step, "has two cursors of one fetch")
    for dependency in job.dependencies:
        if dependency.transfer is not transfer:
            continue
        number = dependency.incoming.number
        there, cursor = transfer.arrivals[number], waiting.pop(number, None)
        _require(cursor is None or cursor.limit == there, job.step, f"fetch {number} has brought {there} layers")
        if dependency.waiting:
            _require(
                there == dependency.incoming.layers_ready(dependency.waiting),
                job.step,
                f"is behind fetch {number} at {there} layers",
            )
        blocks = joined(span for index in dependency.waiting for span in dependency.spans[index])
        _require(cursor is None or not without(cursor.spans, blocks), job.step, "waits for what does not come")
        for batch in transfer.in_flight.values():
            early = there < layers and transfer.shape.layers.index(batch.layer) >= there
            _require(not (early and touches(blocks, batch.lo, batch.hi)), job.step, "granted what was not fetched")
    _require(not waiting, job.step, f"waits for fetches {sorted(waiting)}, which it does not have")


def _cursor(transfer: Transfer, cursor: Cursor) -> None:
    step, at = transfer.job.step, cursor.at
    whole = cursor.limit == len(transfer.shape.layers)
    _require((cursor.incoming == 0) == whole, step, f"waits for fetch {cursor.incoming} at {cursor.limit} layers")
    past = cursor.index > cursor.limit or (cursor.waiting and not cursor.fresh)
    _require(not past, step, f"granted layer {cursor.layer}, which is not in the arena")
    _require(not cursor.exhausted and bool(cursor.spans), step, "keeps a cursor that has ended")
    lo, hi = cursor.spans[cursor.span_index]
    _require(lo <= at < hi == cursor.end, step, f"cursor {at} is not in {lo}..{hi}")
    _require(0 <= cursor.byte_at < cursor.block_bytes, step, f"byte {cursor.byte_at} is not in a block")
    _require(cursor.layer == transfer.shape.layers[cursor.index], step, "cursor and layer disagree")
    _require(cursor.spans[0][0] >= 0 and cursor.spans[-1][1] <= transfer.starts[-1], step, "spans leave the transfer")


def _flight(transfer: Transfer, batch: InFlightBatch) -> None:
    step = transfer.job.step
    _require(0 <= batch.lo < batch.hi <= transfer.starts[-1], step, f"batch {batch.number} leaves its transfer")
    size = transfer.shape.block_bytes[transfer.shape.layers.index(batch.layer)]
    blocks = batch.hi - batch.lo
    whole = batch.nbytes == (0 if transfer.job.planned else blocks * size)
    _require(whole or (blocks == 1 and 0 < batch.nbytes < size), step, f"batch {batch.number} has the wrong size")
    charges = {Accounting.NONE, Accounting.GATED if batch.gate > transfer.job.gates_open_to else Accounting.BUDGET}
    _require(batch.accounting in charges, step, f"batch {batch.number} is charged as {batch.accounting.name}")
    _require(
        transfer.job.state is OPEN or batch.accounting is Accounting.NONE, step, f"{batch.number} is still charged"
    )
    _require(all(barrier.pending > 0 for barrier in batch.watch or ()), step, "a quiet watcher is still told")


def _saves(job: TransferJob) -> None:
    step = job.step
    committed = {
        position
        for transfer in job.transfers.values()
        if transfer.committed
        for position in transfer.members
        if position not in job.dropped
    }
    _require((job.state is ENDED) == (not job.open), step, "saves are over exactly when no part is open")
    _require(not committed & job.revoked, step, "committed and revoked the same part")
    _require(job.revoked <= job.dropped, step, "revoked a part that is not cancelled")
    _require(job.open == len(job.parts) - len(committed) - len(job.revoked), step, f"miscounts open saves {job.open}")
    for transfer in job.transfers.values():
        order = [batch.layer for batch in transfer.in_flight.values()]
        _require(order == sorted(order), step, "has saves in flight out of order")
        write = transfer.write
        if write is not None:
            _require(write.save is transfer and not write.closed, step, "has a write that follows another save")
            _require(
                not transfer.live_parts or write.limit == transfer.stored(), step, f"its write is at {write.limit}"
            )
            _require(not transfer.committed, step, "is committed, and its write still follows it")
        _require(
            not (transfer.committed and (transfer.in_flight or transfer.pending)), step, "writes a committed object"
        )
    watched = any(batch.watch for transfer in job.transfers.values() for batch in transfer.in_flight.values())
    _require(
        watched or job.dropped == job.revoked,
        step,
        "a cancelled save part waits for nothing and is not revoked",
    )


def _budget(state: State, steps: list[FlowStep]) -> None:
    sums, counts, charged, gated = [0, 0], [0, 0], [0, 0], [0, 0]
    for batch in state.in_flight.values():
        direction = batch.transfer.job.direction
        sums[direction] += batch.nbytes
        counts[direction] += 1
        charged[direction] += batch.nbytes * (batch.accounting is not Accounting.NONE)
        gated[direction] += batch.nbytes * (batch.accounting is Accounting.GATED)
    jobs = [job for step in steps for job in (step.loads, step.saves) if job is not None]
    budget = state.budget
    if (
        sums != budget.inflight
        or counts != budget.batches
        or sum(job.in_flight_count for job in jobs) != len(state.in_flight)
    ):
        raise InvalidTransition(f"in flight: counted {sums} bytes in {counts} batches, booked {budget.inflight}")
    if charged != budget.charged or gated != budget.gated:
        booked = (budget.charged, budget.gated)
        raise InvalidTransition(f"{charged} bytes in flight are to be charged, {gated} of them gated; booked {booked}")
    if any(used > most for used, most in zip((*charged, sum(charged)), budget.ceiling, strict=True)):
        raise InvalidTransition(f"{charged} bytes in flight are more than {budget.ceiling} for loads, saves and both")
    if any(used > most for used, most in zip(gated, budget.most_gated, strict=True)):
        raise InvalidTransition(f"{gated} gated bytes in flight are more than {budget.most_gated}")
    if budget.sessions != len(state.sessions):
        raise InvalidTransition(f"{budget.sessions} sessions share the budget, of {len(state.sessions)}")


def _session(session: Session) -> None:
    unsaved, gated = 0, [0, 0]
    for step in session.steps.values():
        for job in (step.loads, step.saves):
            for transfer in job.transfers.values() if job is not None else ():
                held = (batch.nbytes for batch in transfer.in_flight.values() if batch.accounting is Accounting.GATED)
                gated[transfer.job.direction] += sum(held)
        if step.saves is None:
            continue
        for cursor in step.saves.cursors:
            blocks = sum(hi - lo for lo, hi in cursor.spans)
            granted = sum(max(0, min(hi, cursor.at) - lo) for lo, hi in cursor.spans) * cursor.block_bytes
            unsaved += blocks * cursor.transfer.shape.tail_bytes[cursor.index] - granted - cursor.byte_at
        in_flight = [batch for transfer in step.saves.transfers.values() for batch in transfer.in_flight.values()]
        unsaved += sum(batch.nbytes for batch in in_flight)
    if unsaved != session.unsaved:
        raise InvalidTransition(f"session {session.number} has {unsaved} unsaved bytes and booked {session.unsaved}")
    if gated != session.gated:
        raise InvalidTransition(f"session {session.number} has {gated} gated bytes in flight, booked {session.gated}")
    for request, barrier in session.aborting.items():
        if barrier.pending <= 0 or barrier.release != request:
            raise InvalidTransition(f"session {session.number}: aborted request {request!r} waits for nothing")


def _conserving(state: State) -> None:
    """No permitted batch idles while there is room for it, unless the core was told to pause."""
    if state.paused:
        return
    limits, budget = state.budget.limits, state.budget
    for direction in Direction:
        ring = state.rings[direction]
        for session in state.sessions.values():
            cursor, lacking = next_cursor(state, session, direction)
            if cursor is not None and not session.queued[direction]:
                raise InvalidTransition(
                    f"session {session.number}: permitted {direction.name} work is not queued",
                    cursor.transfer.job.step.recent_events(),
                )
            if lacking and not session.queued[direction] and not ring.waits(session):
                raise InvalidTransition(f"session {session.number} waits for room and would never be asked again")
        queue = ring.queue
        first = next_cursor(state, queue[0], direction)[0] if queue else None
        if first is None and queue and direction is Direction.LOAD:
            raise InvalidTransition(f"session {queue[0].number} has its turn with no load that is permitted")
        if first is not None:
            extent = first.next_extent(limits.max_transfer_blocks, budget.max_batch[direction])
            if budget.fits(direction, extent.nbytes):
                raise InvalidTransition(
                    f"{direction.name} work idles although it fits", first.transfer.job.step.recent_events()
                )
            return
