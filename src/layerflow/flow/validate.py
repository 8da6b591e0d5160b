"""The core's invariants. Costs O(everything); meant for tests, after every event."""

from __future__ import annotations

import itertools

from layerflow.errors import InvalidTransition
from layerflow.flow.budget import Charge
from layerflow.flow.completion import builds_on_loads
from layerflow.flow.cursor import Cohort, joined, touches, without
from layerflow.flow.events import Direction
from layerflow.flow.graph import Flight, Leg, Step, Strand
from layerflow.flow.sessions import Session
from layerflow.flow.state import State
from layerflow.flow.validate_hosts import validate_lane


def validate(state: State) -> None:
    """Raise for the first invariant that does not hold.

    :raises InvalidTransition: with the step's story.
    """
    steps = [step for session in state.sessions.values() for step in session.steps.values()]
    for step in steps:
        _step(state, step)
    _budget(state, steps)
    for session in state.sessions.values():
        _session(state, session)
    _conserving(state)
    for lane in state.lanes:
        validate_lane(state, lane)
    if state.unsettled or state.telling or state.loosened:
        raise InvalidTransition(f"{len(state.unsettled)} steps are left unsettled, {len(state.telling)} strands untold")


def _require(holds: bool, step: Step, what: str) -> None:
    if not holds:
        raise InvalidTransition(f"session {step.session.number} step {step.number}: {what}", step.told())


def _step(state: State, step: Step) -> None:
    _require(step.session.steps.get(step.number) is step, step, "is not where its session keeps it")
    _require(step.alarm == step.next_alarm(), step, f"its alarm {step.alarm} is not {step.next_alarm()}")
    loads, saves = step.loads, step.saves
    for leg in (loads, saves):
        if leg is not None:
            _leg(state, leg)
    if loads is not None:
        _require(loads.done == loads.idle, step, "loads are said to be done exactly when nothing is left of them")
    if saves is not None:
        _saves(saves)
        written = [strand for strand in saves.strands.values() if strand.committed]
        decided = loads is None or loads.done
        _require(not written or decided, step, "committed before its loads were done")
        _require(not builds_on_loads(saves, written), step, "committed what an earlier step still loads for")
        ready = [s for s in saves.strands.values() if not (s.committed or s.carving or s.flights)]
        if decided and any(part not in saves.dead for strand in ready for part in strand.members):
            _require(saves.held and builds_on_loads(saves, ready), step, "holds a commit back for nothing")
    over = (loads is None or loads.done) and (saves is None or not saves.open)
    _require(not (step.closed and over), step, "has nothing left and was not forgotten")


def _leg(state: State, leg: Leg) -> None:
    step = leg.step
    carving = step.session.carving[leg.direction].get(step.number)
    _require((carving is leg) == bool(leg.cohorts), step, f"{leg.direction.name}: queued exactly while it is carved")
    _require(
        leg.flying == sum(len(strand.flights) for strand in leg.strands.values()),
        step,
        f"{leg.direction.name}: {leg.flying} batches in flight do not match the strands",
    )
    _require(not (leg.cancelled and leg.direction is Direction.LOAD and leg.cohorts), step, "carves fenced loads")
    gates = [flight.gate for flight in leg.gated]
    _require(gates == sorted(gates), step, f"{leg.direction.name}: gated batches are out of order")
    _require(not gates or gates[0] > leg.reached, step, f"{leg.direction.name}: holds what may move")
    for strand in leg.strands.values():
        _strand(state, strand)


def _strand(state: State, strand: Strand) -> None:
    leg, layers = strand.leg, len(strand.shape.layers)
    step = leg.step
    cohorts = strand.cohorts()
    _require(strand.carving == len(cohorts), step, "miscounts its cohorts")
    if not leg.cancelled:
        _require(strand.sealed == strand.low(), step, f"sealed {strand.sealed} layers of {strand.low()}")
    _require(0 <= strand.sealed <= layers, step, f"sealed {strand.sealed} layers of {layers}")
    alive = sum(position not in leg.dead for position in strand.members)
    _require(strand.live == alive, step, f"counts {strand.live} live parts of {alive}")
    covered: list[tuple[int, int]] = []
    for cohort in cohorts:
        _cohort(strand, cohort)
        covered += cohort.spans
    covered.sort()
    _require(all(left[1] <= right[0] for left, right in itertools.pairwise(covered)), step, "cohorts overlap")
    _arrivals(strand, cohorts)
    for position in leg.dead:
        if leg.strand_of(position) is strand:
            _require(not touches(covered, *strand.span(position)), step, f"dead part {position} is still carved")
    for number, flight in strand.flights.items():
        _require(flight.number == number and state.flights.get(number) is flight, step, f"lost batch {number}")
        _flight(strand, flight)


def _arrivals(strand: Strand, cohorts: list[Cohort]) -> None:
    leg, layers = strand.leg, len(strand.shape.layers)
    needs = {need.fetch for position in strand.members for need in leg.parts[position].needs}
    _require(strand.arrivals.keys() == needs, leg.step, f"knows fetches {strand.arrivals} of {needs}")
    waiting = {cohort.fetch: cohort for cohort in cohorts if cohort.fetch}
    _require(len(waiting) == sum(bool(c.fetch) for c in cohorts), leg.step, "has two cohorts of one fetch")
    for edge in leg.edges:
        if edge.strand is not strand:
            continue
        number = edge.fetch.number
        there, cohort = strand.arrivals[number], waiting.pop(number, None)
        _require(cohort is None or cohort.limit == there, leg.step, f"fetch {number} has brought {there} layers")
        if edge.waiting:
            _require(there == edge.fetch.reached(edge.waiting), leg.step, f"is behind fetch {number} at {there} layers")
        blocks = joined(span for index in edge.waiting for span in edge.spans[index])
        _require(cohort is None or not without(cohort.spans, blocks), leg.step, "waits for what does not come")
        for flight in strand.flights.values():
            early = there < layers and strand.shape.layers.index(flight.layer) >= there
            _require(not (early and touches(blocks, flight.lo, flight.hi)), leg.step, "carved what was not fetched")
    _require(not waiting, leg.step, f"waits for fetches {sorted(waiting)}, which it does not have")


def _cohort(strand: Strand, cohort: Cohort) -> None:
    step, at = strand.leg.step, cohort.at
    whole = cohort.limit == len(strand.shape.layers)
    _require((cohort.fetch == 0) == whole, step, f"waits for fetch {cohort.fetch} at {cohort.limit} layers")
    past = cohort.index > cohort.limit or (cohort.waiting and not cohort.fresh)
    _require(not past, step, f"carved layer {cohort.layer}, which is not in the arena")
    _require(not cohort.exhausted and bool(cohort.spans), step, "keeps a cohort that has ended")
    lo, hi = cohort.spans[cohort.cursor]
    _require(lo <= at < hi == cohort.end, step, f"cursor {at} is not in {lo}..{hi}")
    _require(0 <= cohort.byte_at < cohort.block_bytes, step, f"byte {cohort.byte_at} is not in a block")
    _require(cohort.layer == strand.shape.layers[cohort.index], step, "cursor and layer disagree")
    _require(cohort.spans[0][0] >= 0 and cohort.spans[-1][1] <= strand.starts[-1], step, "spans leave the strand")


def _flight(strand: Strand, flight: Flight) -> None:
    step = strand.leg.step
    _require(0 <= flight.lo < flight.hi <= strand.starts[-1], step, f"batch {flight.number} leaves its strand")
    size = strand.shape.block_bytes[strand.shape.layers.index(flight.layer)]
    blocks = flight.hi - flight.lo
    whole = flight.nbytes == blocks * size
    _require(whole or (blocks == 1 and 0 < flight.nbytes < size), step, f"batch {flight.number} has the wrong size")
    charges = {Charge.NONE, Charge.GATED if flight.gate > strand.leg.reached else Charge.BUDGET}
    _require(flight.charge in charges, step, f"batch {flight.number} is charged as {flight.charge.name}")
    _require(not strand.leg.cancelled or flight.charge is Charge.NONE, step, f"{flight.number} is still charged")
    _require(all(quiet.pending > 0 for quiet in flight.watch or ()), step, "a quiet watcher is still told")


def _saves(leg: Leg) -> None:
    step = leg.step
    committed = {
        position
        for strand in leg.strands.values()
        if strand.committed
        for position in strand.members
        if position not in leg.dead
    }
    _require(not committed & leg.revoked, step, "committed and revoked the same part")
    _require(leg.revoked <= leg.dead, step, "revoked a part that lives")
    _require(leg.open == len(leg.parts) - len(committed) - len(leg.revoked), step, f"miscounts open saves {leg.open}")
    for strand in leg.strands.values():
        order = [flight.layer for flight in strand.flights.values()]
        _require(order == sorted(order), step, "has saves in flight out of order")
        stored = strand.stored() if leg.tell else 0
        _require(strand.told <= stored, step, f"told {strand.told} layers of {stored} that are stored")
        _require(not strand.live or strand.told == stored, step, f"told {strand.told} layers, not {stored}")
        _require(not (strand.committed and (strand.flights or strand.carving)), step, "writes a committed object")
    watched = any(flight.watch for strand in leg.strands.values() for flight in strand.flights.values())
    _require(watched or leg.dead == leg.revoked, step, "a dead save part waits for nothing and is not revoked")


def _budget(state: State, steps: list[Step]) -> None:
    sums, counts, charged, gated = [0, 0], [0, 0], [0, 0], [0, 0]
    for flight in state.flights.values():
        direction = flight.strand.leg.direction
        sums[direction] += flight.nbytes
        counts[direction] += 1
        charged[direction] += flight.nbytes * (flight.charge is not Charge.NONE)
        gated[direction] += flight.nbytes * (flight.charge is Charge.GATED)
    legs = [leg for step in steps for leg in (step.loads, step.saves) if leg is not None]
    budget = state.budget
    if sums != budget.inflight or counts != budget.batches or sum(leg.flying for leg in legs) != len(state.flights):
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


def _session(state: State, session: Session) -> None:
    unsaved, gated = 0, [0, 0]
    for step in session.steps.values():
        for leg in (step.loads, step.saves):
            for strand in leg.strands.values() if leg is not None else ():
                held = (flight.nbytes for flight in strand.flights.values() if flight.charge is Charge.GATED)
                gated[strand.leg.direction] += sum(held)
        if step.saves is None:
            continue
        for cohort in step.saves.cohorts:
            blocks = sum(hi - lo for lo, hi in cohort.spans)
            carved = sum(max(0, min(hi, cohort.at) - lo) for lo, hi in cohort.spans) * cohort.block_bytes
            unsaved += blocks * cohort.strand.shape.tail_bytes[cohort.index] - carved - cohort.byte_at
        flights = [flight for strand in step.saves.strands.values() for flight in strand.flights.values()]
        unsaved += sum(flight.nbytes for flight in flights)
    if unsaved != session.unsaved:
        raise InvalidTransition(f"session {session.number} has {unsaved} unsaved bytes and booked {session.unsaved}")
    if gated != session.gated:
        raise InvalidTransition(f"session {session.number} has {gated} gated bytes in flight, booked {session.gated}")
    for request, quiet in session.aborting.items():
        if quiet.pending <= 0 or quiet.release != request:
            raise InvalidTransition(f"session {session.number}: aborted request {request!r} waits for nothing")


def _conserving(state: State) -> None:
    """No permitted batch idles while there is room for it, unless the core was told to pause."""
    if state.paused:
        return
    limits, budget = state.budget.limits, state.budget
    for direction in Direction:
        for session in state.sessions.values():
            cohort = session.next_cohort(direction, budget)
            if cohort is not None and not session.queued[direction]:
                raise InvalidTransition(
                    f"session {session.number}: permitted {direction.name} work is not queued",
                    cohort.strand.leg.step.told(),
                )
        queue = state.rings[direction].queue
        first = queue[0].next_cohort(direction, budget) if queue else None
        if first is None and queue and direction is Direction.LOAD:
            raise InvalidTransition(f"session {queue[0].number} has its turn with no load that is permitted")
        if first is not None:
            cut = first.next_cut(limits.max_transfer_blocks, budget.max_batch[direction])
            if budget.fits(direction, cut.nbytes):
                raise InvalidTransition(f"{direction.name} work idles although it fits", first.strand.leg.step.told())
            return
