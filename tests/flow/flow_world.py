"""A model of everything around the core: agents, server and engine memory, tracked byte by byte.

It carries out the core's commands and asserts, command by command, what the core promises.
"""

from __future__ import annotations

import sys

from flow_books import Pass, Side, covered, side_of
from flow_fetches import Fetch, Fetches
from flow_follows import Follow, Follows
from flow_lives import Lives
from flow_writes import Writes

from layerflow.flow import Flow
from layerflow.flow.commands import (
    Arrived,
    Call,
    Cancel,
    Command,
    Commit,
    LayersStored,
    LoadFailed,
    LoadsDone,
    ObjectsLost,
    ObjectsPublished,
    Release,
    Revoke,
    RoomFreed,
    Seal,
    StepDone,
    Submit,
    TransferDone,
    WakeAt,
    WriteBegun,
)
from layerflow.flow.events import (
    BatchDone,
    BatchFailed,
    CallDone,
    Direction,
    Event,
    FailedRange,
    FetchAvailable,
    FetchOpened,
    FollowMoved,
    FollowOpened,
    FrontierReached,
    Hop,
    HostLost,
    IncomingFailed,
    IncomingLeased,
    Item,
    LayersComputed,
    LayerShape,
    Limits,
    LimitsChanged,
    LoadsFenced,
    LoadsLost,
    LoadsMoved,
    Need,
    Part,
    RequestAborted,
    SessionLost,
    SessionOpened,
    StepClosed,
    StepOpened,
    Tick,
    WriteOpened,
)

LOAD, SAVE = Direction.LOAD, Direction.SAVE


class World:
    """Sends events to a flow, keeps the books, checks every command and the core's own invariants."""

    def __init__(self, limits: Limits | None = None, *, validate: bool = True, most: int = sys.maxsize):
        self.limits = limits or Limits()
        self.flow = Flow(self.limits)
        self.validate = validate
        self.lives = Lives()
        self.most = most
        self.now = 100.0
        self.layers: dict[int, tuple[LayerShape, ...]] = {}
        self.layers_ever: dict[int, tuple[LayerShape, ...]] = {}
        self.steps: dict[tuple[int, int], Pass] = {}
        self.live: dict[tuple[int, int], Pass] = {}
        self.flying: dict[int, Submit] = {}
        self.called_back: set[int] = set()
        self.aborted: dict[tuple[int, str], set[int | tuple[int, int]]] = {}
        self.released: list[tuple[int, str]] = []
        self.wake: float | None = None
        self.sharing = 0
        self.newest = 0
        self.fetches = Fetches()
        self.writes = Writes(self)
        self.follows = Follows(self)

    # -- events

    def open_session(self, session: int, layers) -> list[Command]:
        self.layers[session] = self.layers_ever[session] = tuple(LayerShape(*shape) for shape in layers)
        return self.send(SessionOpened(session, self.layers[session]))

    def open(
        self, session, step, loads=(), saves=(), deadline=1e6, save_deadline=1e6, write=False, planned=False
    ) -> list[Command]:
        """:param write: what it saves is written to the backend, by writes that are numbered onwards."""
        commands = self.send(StepOpened(session, step, deadline, save_deadline, tuple(loads), tuple(saves), planned))
        for group in sorted({part.group for part in saves}) if write else ():
            commands += self.write(session, step, group, saves)
        return commands

    def write(self, session, step, group, saves, source="e", size=1) -> list[Command]:
        """Each part is an object of `size` bytes a block and layer."""
        parts = [index for index, part in enumerate(saves) if part.group == group]
        items = tuple(Item(size * saves[index].blocks, saves[index].blocks) for index in parts)
        number = len(self.writes.all) + 1
        return self.send(WriteOpened(number, source, session, step, group, items, tuple(parts)))

    def bring(self, fetch, layers, items=1, source="e", size=1, hop=Hop.FETCH) -> list[Command]:
        numbers = layers if isinstance(layers, tuple) else tuple(range(layers))
        return self.send(FetchOpened(fetch, source, numbers, (Item(size, 1),) * items, hop=hop))

    def follow(self, session, step, group, parts, leased=False) -> int:
        """Follow save parts of a step, one object each; the number."""
        number, layers = self.newest + 1, self.layers_of(session, group)
        self.send(FollowOpened(number, layers, len(parts), session, step, group, tuple(parts), leased))
        return number

    def promise(self, layers, objects=1, leased=False) -> int:
        """Objects that no step saves yet; the number."""
        number = self.newest + 1
        self.send(FollowOpened(number, tuple(layers), objects, leased=leased))
        return number

    def layers_of(self, session, group) -> tuple[int, ...]:
        return tuple(number for number, shape in enumerate(self.layers_ever[session]) if shape.group == group)

    def fetched(self, fetch, layers) -> list[Command]:
        """End calls of a fetch, oldest first, until so many layers of all that is left of it have come."""
        said = []
        one = self.fetches.all[fetch]
        while any(len(one.come[index]) < layers for index in one.coming):
            calls = sorted(self.fetches.calls.values(), key=lambda call: call.transfer != fetch)
            said += self.end_call(calls[0])
        return said

    def end_call(self, call: Call, *failed: int, reason: str = "gone") -> list[Command]:
        return self.send(CallDone(call.hop, call.call, tuple((index, reason) for index in failed)))

    def written(self) -> list[Command]:
        """End the calls of all writes, until none is left."""
        said = []
        while self.writes.calls:
            said += self.end_call(next(iter(self.writes.calls.values())))
        return said

    def lose(self, session, step, failed) -> list[Command]:
        """A worker tells what has failed of the loads that it moves itself, whose end follows: (group, lo, hi)."""
        self.live[session, step].lost += failed
        return self.send(LoadsLost(session, step, tuple(FailedRange(*one, "gone") for one in failed)))

    def moved(self, session, step, failed=(), layers=sys.maxsize, told=None) -> list[Command]:
        """A worker ends the loads that it moves itself.

        :param failed: beside what was told before: (group, lo, hi).
        :param layers: so many have come, where the loads were cut off. :param told: so many ranges, it says, were told
            before; None = all that were.
        """
        one, nbytes = self.live[session, step], 0
        side = one.sides[LOAD]
        for layer, shape in enumerate(self.layers[session][:layers]):
            holes = [(lo, hi) for group, lo, hi in [*one.lost, *failed] if group == shape.group]
            for part, (lo, hi) in zip(side.parts, side.ranges, strict=True):
                for block in range(lo, hi) if part.group == shape.group else ():
                    if not any(start <= block < end for start, end in holes):
                        at = block * shape.block_bytes
                        side.done.setdefault(layer, []).append((at, at + shape.block_bytes))
                        nbytes += shape.block_bytes
        ranges = tuple(FailedRange(*each, "replaced") for each in failed)
        return self.send(LoadsMoved(session, step, nbytes, ranges, len(one.lost) if told is None else told))

    def moving(self) -> list[tuple[int, int]]:
        """Steps whose loads are moved by their worker, and have not ended."""
        return [key for key, one in self.live.items() if one.moving]

    def telling(self) -> set[int]:
        """Sessions whose worker tells of loads that have failed: it opens no step until it has told of their end."""
        return {key[0] for key in self.moving() if self.live[key].lost and not self.live[key].sides[LOAD].cut}

    def done(self, batch: Submit) -> list[Command]:
        return self.send(BatchDone(batch.session, batch.batch))

    def fail(self, batch: Submit, reason: str = "checksum") -> list[Command]:
        return self.send(BatchFailed(batch.session, batch.batch, reason))

    def send(self, event: Event) -> list[Command]:
        lost = self._before(event)
        self.sharing = len(self.layers) - (lost is not None)
        commands = self.flow.handle(event, self.now, self.most)
        granted = of(commands, Submit)
        assert len(granted) <= self.most or all(batch.direction is SAVE for batch in granted)
        for command in commands:
            self._obey(command, lost)
        if self.flow.paused:
            self._ready()
            self._check()
            rest = self.flow.handle(Tick(), self.now)
            assert of(rest, Submit), "paused for nothing"
            for command in rest:
                self._obey(command, None)
            commands += rest
        assert not self.flow.paused
        if lost is not None:
            assert not [key for key in self.live if key[0] == lost]
            del self.layers[lost]
        self._ready()
        self._check()
        return commands

    def _check(self) -> None:
        if self.validate:
            self.flow.validate()
            self.lives.look(self.flow)

    def _before(self, event: Event) -> int | None:
        match event:
            case StepOpened(session=session, step=number):
                one = Pass(event, (side_of(event.loads), side_of(event.saves)))
                one.moving = event.planned and bool(event.loads)
                self.steps[session, number] = self.live[session, number] = one
            case BatchDone(batch=batch) if batch in self.flying:
                submit = self.flying.pop(batch)
                self._book(submit, "done")
            case BatchFailed(batch=batch) if batch in self.flying:
                submit = self.flying.pop(batch)
                side = self._side_of(submit)
                if submit.direction is SAVE:
                    side.dead |= self._overlapping(submit, side)
            case FrontierReached(session=session, step=number, layer=layer) if (session, number) in self.live:
                one = self.live[session, number]
                one.frontier = max(one.frontier, layer)
            case LayersComputed(session=session, step=number, count=count) if (session, number) in self.live:
                one = self.live[session, number]
                one.computed = max(one.computed, count)
                one.frontier = max(one.frontier, count - 1)
            case StepClosed(session=session, step=number, ok=ok) if (session, number) in self.live:
                one = self.live[session, number]
                one.closed = True
                if ok:
                    one.computed = len(self.layers[session])
                    one.frontier = one.computed - 1
                else:
                    layers = self.layers[session]
                    lost = {shape.group for shape in layers[one.computed :]}
                    self._call_back(session, number, SAVE, {i for i, s in enumerate(layers) if s.group in lost})
            case LoadsMoved(session=session, step=number) if (session, number) in self.live:
                self.live[session, number].moving = False
            case LoadsFenced(session=session, step=number) if (session, number) in self.live:
                self.live[session, number].sides[LOAD].cut = True
                self._call_back(session, number, LOAD)
            case FetchOpened():
                self.newest = event.fetch
                self.fetches.open(event)
            case IncomingLeased(incoming=number, leased=leased):
                self._incoming(number).leased = leased
            case FetchAvailable(fetch=fetch, layers=layers) if fetch in self.fetches.all:
                one = self.fetches.all[fetch]
                one.available = max(one.available, layers)
            case FollowOpened():
                self.newest = event.follow
                self.follows.open(event)
            case FollowMoved(into=into):
                over = into in self.follows.all and into not in self.follows.known()
                if not over:
                    self.follows.move(event)
            case WriteOpened():
                self.writes.open(event)
            case CallDone(hop=hop, call=call, failed=failed) if (hop, call) in self._of(hop).calls:
                self._of(hop).ended((hop, call), {index for index, _ in failed})
            case HostLost(hops=hops):
                for hop in hops:
                    calls = self._of(hop).calls
                    for key in [key for key in calls if key[0] is hop]:
                        del calls[key]
            case RequestAborted(session=session, request=request):
                watch = set()
                for (owner, number), one in self.live.items():
                    if owner == session:
                        if one.moving and any(part.request == request for part in one.sides[LOAD].parts):
                            watch.add((session, number))
                        for side in one.sides:
                            side.dead |= {i for i, part in enumerate(side.parts) if part.request == request}
                for batch, submit in self.flying.items():
                    if submit.session == session:
                        side = self._side_of(submit)
                        if any(side.parts[i].request == request for i in self._overlapping(submit, side)):
                            watch.add(batch)
                self.aborted[session, request] = self.aborted.get((session, request), set()) | watch
            case SessionLost(session=session):
                for batch in [number for number, submit in self.flying.items() if submit.session == session]:
                    del self.flying[batch]
                return session
            case LimitsChanged(limits=limits):
                self.limits = limits
                self._excuse_gated()
            case _:
                pass
        return None

    # -- books

    def _of(self, hop: Hop) -> Fetches | Writes:
        return self.writes if hop is Hop.WRITE else self.fetches

    def _incoming(self, number: int) -> Fetch | Follow:
        return self.follows.all[number] if number in self.follows.all else self.fetches.all[number]

    def _side_of(self, submit: Submit) -> Side:
        return self.steps[submit.session, submit.step].sides[submit.direction]

    def _overlapping(self, submit: Submit, side: Side) -> set[int]:
        group = self.layers[submit.session][submit.layer].group
        return {
            i
            for i, (lo, hi) in enumerate(side.ranges)
            if side.parts[i].group == group and lo < submit.hi and submit.lo < hi
        }

    def _book(self, submit: Submit, book: str) -> None:
        size = self.layers[submit.session][submit.layer].block_bytes
        lo, hi = submit.lo * size, submit.hi * size
        if submit.byte_hi:
            lo, hi = submit.lo * size + submit.byte_lo, submit.lo * size + submit.byte_hi
        assert submit.nbytes == hi - lo > 0
        ranges = getattr(self._side_of(submit), book).setdefault(submit.layer, [])
        assert all(hi <= start or end <= lo for start, end in ranges), f"{submit} moves bytes a second time"
        ranges.append((lo, hi))

    def needed(self, session: int, step: int) -> set[tuple[int, int]]:
        parts = self.live[session, step].sides[LOAD].parts
        return {self.follows.place((need.incoming, need.item)) for part in parts for need in part.needs}

    def wanted(self) -> set[int]:
        """Fetches that are leased, or that a step needs whose loads were not called back."""
        loads = [one.sides[LOAD] for one in self.live.values() if not one.loads_done and not one.sides[LOAD].cut]
        needed = {
            self.follows.place((need.incoming, need.item))[0]
            for side in loads
            for part in side.parts
            for need in part.needs
        }
        return needed | {number for number, one in self.fetches.all.items() if one.leased}

    def inflight(self, direction: Direction) -> int:
        return sum(submit.nbytes for submit in self.flying.values() if submit.direction is direction)

    def _call_back(self, session: int, step: int, direction: Direction, layers: set[int] | None = None) -> None:
        self.called_back |= {
            number
            for number, f in self.flying.items()
            if (f.session, f.step, f.direction) == (session, step, direction) and (layers is None or f.layer in layers)
        }

    def most_gated(self, direction: Direction) -> int:
        """How much that cannot move may be granted: one whole batch that can move has room beside it."""
        half = self.limits.max_granted_bytes // 2
        room = half if direction is SAVE else self.limits.max_granted_bytes - half
        batch = room // 2 if direction is SAVE or self.limits.prefetch_layers else room
        return room - max(1, min(self.limits.max_transfer_bytes, batch))

    def _excuse_gated(self) -> None:
        """What cannot move yet counts no more where the new limits allow less of it."""
        for direction in Direction:
            held = {n: f.nbytes for n, f in self.flying.items() if f.direction is direction and not self.can_move(f)}
            counted = sum(nbytes for number, nbytes in held.items() if number not in self.called_back)
            if counted > self.most_gated(direction):
                self.called_back |= held.keys()

    def can_move(self, submit: Submit) -> bool:
        """Would its lane start it now?"""
        one = self.steps[submit.session, submit.step]
        return submit.gate <= (one.frontier if submit.direction is LOAD else one.computed - 1)

    def _within_budget(self, submit: Submit) -> None:
        whole = self.limits.max_granted_bytes
        half = whole // 2
        counted = [f for number, f in self.flying.items() if number not in self.called_back]
        loads = sum(f.nbytes for f in counted if f.direction is LOAD)
        saves = sum(f.nbytes for f in counted if f.direction is SAVE)
        assert loads + saves + submit.nbytes <= whole
        assert submit.direction is LOAD or saves + submit.nbytes <= half
        if submit.direction is LOAD and self.sharing > 1:
            room = max(1, min(self.limits.max_transfer_bytes, half // 2))
            assert loads + submit.nbytes + max(room, saves) <= whole, "left no room for a save"
        if not self.can_move(submit):
            held = [f for f in counted if f.direction is submit.direction and not self.can_move(f)]
            most = self.most_gated(submit.direction)
            assert sum(f.nbytes for f in held) + submit.nbytes <= most, "granted too much that cannot move"
            own = [f.nbytes for f in held if f.session == submit.session]
            assert not own or sum(own) + submit.nbytes <= most // self.sharing, "took more than its share"

    # -- commands

    def _obey(self, command: Command, lost: int | None) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Seal(session=session, step=step, direction=direction, layer=layer):
                self._seal(self.live[session, step], direction, layer)
            case LoadFailed():
                self._load_failed(command)
            case Cancel(session=session, step=step, direction=direction, reason=reason):
                self.live[session, step].sides[direction].cut = True
                if direction is LOAD or reason in ("deadline", "replaced"):
                    self._call_back(session, step, direction)
            case Commit(session=session, step=step, parts=parts):
                self._commit(session, self.live[session, step], parts)
            case Revoke(session=session, step=step, parts=parts):
                one = self.live[session, step]
                side = one.sides[SAVE]
                assert parts and not set(parts) & (side.committed | side.revoked)
                for submit in self.flying.values():
                    if (submit.session, submit.step, submit.direction) == (session, step, SAVE):
                        assert not self._overlapping(submit, side) & set(parts), "revoked under a writer"
                side.revoked |= set(parts)
                side.dead |= set(parts)
            case LoadsDone(session=session, step=step):
                self._loads_done(session, self.live[session, step], lost == session)
            case Release(session=session, request=request):
                watch = self.aborted[session, request]
                assert not watch & self.flying.keys(), "released while a batch touches it"
                assert not watch & set(self.moving()), "released while its worker moves it"
                self.released.append((session, request))
            case StepDone(session=session, step=step):
                one = self.live.pop((session, step))
                self._step_done(one, command, lost == session)
            case Call(hop=Hop.WRITE):
                self.writes.call(command)
            case Call():
                self.fetches.call(command, self.limits)
            case WriteBegun():
                self.writes.begun(command)
            case ObjectsPublished():
                self.writes.written(command)
            case Arrived():
                (self.follows if command.hop is Hop.LOCAL else self.fetches).arrived(command)
                for session, step, objects in command.readers:
                    assert not self.live[session, step].loads_done, "pins for loads that are over"
                    assert {(command.transfer, index) for index in objects} <= self.needed(session, step)
            case ObjectsLost(hop=Hop.LOCAL):
                self.follows.lose(command)
            case ObjectsLost(hop=hop):
                self._of(hop).lose(command)
            case RoomFreed():
                keys = [key for key, one in self.live.items() if not one.loads_done]
                held = {need for key in keys for need in self.needed(*key)}
                (self.follows if command.hop is Hop.LOCAL else self.fetches).vacate(command, held)
            case TransferDone(hop=Hop.LOCAL):
                self.follows.end(command)
            case TransferDone(hop=hop):
                self._of(hop).done(command)
            case LayersStored():
                self.follows.stored(command)
            case WakeAt(when=when):
                assert when != self.wake
                self.wake = when
            case _:
                raise AssertionError(command)

    def _submit(self, submit: Submit) -> None:
        one = self.live[submit.session, submit.step]
        side = one.sides[submit.direction]
        limits = self.limits
        shape = self.layers[submit.session][submit.layer]
        assert submit.batch not in self.flying
        assert submit.nbytes <= limits.max_transfer_bytes
        assert submit.hi - submit.lo <= limits.max_transfer_blocks
        self._within_budget(submit)
        if submit.direction is LOAD:
            assert submit.gate == (submit.layer - limits.prefetch_layers if limits.prefetch_layers else -1)
            assert one.loads_done == 0 and not one.event.planned
        else:
            assert submit.gate == submit.layer
        hit = self._overlapping(submit, side)
        assert hit and submit.hi <= max(
            hi for i, (_, hi) in enumerate(side.ranges) if side.parts[i].group == shape.group
        )
        place = sum(other.group == shape.group for other in self.layers[submit.session][: submit.layer])
        for index in hit:
            base = side.ranges[index][0]
            for need in side.parts[index].needs:
                touched = base + need.lo < submit.hi and submit.lo < base + need.hi
                assert not touched or self._there(need, place), "not there"
        assert not hit & side.dead, "carved a dead part"
        assert not hit & (side.committed | side.revoked)
        assert submit.layer not in side.sealed, "carved after the seal"
        self._book(submit, "submitted")
        if submit.seals:
            self._seal(one, submit.direction, submit.layer)
        self.flying[submit.batch] = submit

    def _there(self, need: Need, layer: int) -> bool:
        place = self.follows.place((need.incoming, need.item))
        if place[0] in self.follows.all:
            return self.follows.there(place, layer)
        return self.fetches.there(Need(*place, 0, 0), layer)

    def _seal(self, one: Pass, direction: Direction, layer: int) -> None:
        side = one.sides[direction]
        assert layer not in side.sealed, "sealed twice"
        assert direction is SAVE or not one.event.planned
        group = self.layers[one.event.session][layer].group
        assert any(part.group == group for part in side.parts)
        side.sealed.append(layer)

    def _load_failed(self, command: LoadFailed) -> None:
        one = self.live[command.session, command.step]
        side = one.sides[LOAD]
        for group, lo, hi in side.failed:
            assert group != command.group or hi <= command.lo or command.hi <= lo, "reported twice"
        owners = [
            i
            for i, (lo, hi) in enumerate(side.ranges)
            if side.parts[i].group == command.group and lo <= command.lo < command.hi <= hi
        ]
        assert len(owners) == 1 and side.parts[owners[0]].request == command.request
        side.failed.append((command.group, command.lo, command.hi))
        for (session, step), other in self.live.items():
            if session == command.session:
                saves = other.sides[SAVE]
                spoiled = {i for i, part in enumerate(saves.parts) if part.request == command.request}
                if step >= command.step:
                    assert not spoiled & saves.committed, "published what a failed load had spoiled"
                saves.dead |= spoiled - saves.committed

    def _commit(self, session: int, one: Pass, parts: tuple[int, ...]) -> None:
        side = one.sides[SAVE]
        assert parts and not set(parts) & (side.committed | side.revoked | side.dead), "commit of the dead"
        for part in parts:
            assert self._whole(session, side, part, "done"), "commit before every layer is stored"
        side.committed |= set(parts)

    def _whole(self, session: int, side: Side, part: int, book: str) -> bool:
        lo, hi = side.ranges[part]
        return all(
            covered(getattr(side, book).get(layer, []), lo * shape.block_bytes, hi * shape.block_bytes)
            for layer, shape in enumerate(self.layers[session])
            if shape.group == side.parts[part].group
        )

    def _missing(self, one: Pass, layer: int) -> bool:
        """Whether a load block of this layer is neither in place, nor reported as failed, nor aborted."""
        session, side = one.event.session, one.sides[LOAD]
        shape = self.layers[session][layer]
        size = shape.block_bytes
        known = [(lo * size, hi * size) for group, lo, hi in side.failed if group == shape.group]
        return any(
            part.group == shape.group
            and (session, part.request) not in self.aborted
            and not covered([*side.done.get(layer, []), *known], lo * size, hi * size)
            for part, (lo, hi) in zip(side.parts, side.ranges, strict=True)
        )

    def _ready(self) -> None:
        """No layer is ready without its bytes."""
        for (session, step), one in self.live.items():
            waiting = {
                f.layer for f in self.flying.values() if (f.session, f.step, f.direction) == (session, step, LOAD)
            }
            for layer in one.sides[LOAD].sealed:
                if layer not in waiting:
                    assert not self._missing(one, layer), f"layer {layer} is ready without its bytes"

    def _loads_done(self, session: int, one: Pass, lost: bool) -> None:
        side = one.sides[LOAD]
        assert side.parts and not one.loads_done
        one.loads_done += 1
        if lost:
            return
        number = one.event.step
        assert not one.moving, "its worker still moves them"
        self._only_published(session, side)
        assert not [f for f in self.flying.values() if (f.session, f.step, f.direction) == (session, number, LOAD)]
        for layer, shape in enumerate(self.layers[session]):
            if any(part.group == shape.group for part in side.parts):
                sealed = side.cut or one.event.planned or side.sealed.count(layer) == 1
                assert sealed, f"layer {layer} was never sealed"
                assert not self._missing(one, layer)

    def _only_published(self, session: int, side: Side) -> None:
        """What another step has not published in the end was reported as failed, however much of it had come."""
        for part, (base, _) in zip(side.parts, side.ranges, strict=True):
            failed = [(lo, hi) for group, lo, hi in side.failed if group == part.group]
            for need in part.needs:
                number, item = self.follows.place((need.incoming, need.item))
                if (
                    number in self.follows.all
                    and item not in self.follows.all[number].whole
                    and (session, part.request) not in self.aborted
                ):
                    assert covered(failed, base + need.lo, base + need.hi), "took what was never published"

    def _step_done(self, one: Pass, command: StepDone, lost: bool) -> None:
        assert one.done is None
        one.done = command
        expired = self.now >= max(one.event.deadline, one.event.save_deadline)
        assert lost or one.closed or expired
        assert one.loads_done == (1 if one.event.loads else 0)
        saves = one.sides[SAVE]
        assert saves.committed | saves.revoked == set(range(len(saves.parts)))
        assert not saves.committed & saves.revoked
        for direction, moved in ((LOAD, command.loaded_bytes), (SAVE, command.saved_bytes)):
            assert moved == sum(hi - lo for ranges in one.sides[direction].done.values() for lo, hi in ranges)

    # -- driving

    def drain(self) -> None:
        """Let everything end well from here, and check that the core has forgotten all of it."""
        for number, follow in self.follows.all.items():
            if follow.coming and not follow.event.parts:
                self.send(IncomingFailed(number, tuple((index, "nobody saves it") for index in follow.coming)))
        for number, fetch in self.fetches.all.items():
            if fetch.coming:
                self.send(FetchAvailable(number, len(fetch.event.layers)))
        while self.fetches.calls:
            self.end_call(next(iter(self.fetches.calls.values())))
        for number, fetch in self.fetches.all.items():
            assert not fetch.coming, f"objects {fetch.coming} of fetch {number} never end"
        for session, step in list(self.live):
            self.send(LayersComputed(session, step, len(self.layers[session])))
            self.send(StepClosed(session, step, True))
        self._land()
        self._check_no_circle()
        self.written()
        for number, follow in self.follows.all.items():
            if follow.leased:
                self.send(IncomingLeased(number, False))
        for number, write in self.writes.all.items():
            assert write.done, f"write {number} never ends"
        for side, part in [*self.writes.cancelled, *self.follows.cancelled]:
            assert part in side.revoked or part in side.dead, "gave up what its save went on with"
        assert not self.live, f"steps {list(self.live)} never end"
        statistics = self.flow.statistics()
        assert statistics.steps == statistics.load_inflight_bytes == statistics.save_inflight_bytes == 0
        assert statistics.load_inflight_batches == statistics.save_inflight_batches == statistics.unsaved_bytes == 0
        assert set(self.released) >= {key for key in self.aborted if key[0] in self.layers}
        state = self.flow._state
        assert not state.in_flight and not state.dirty_steps and not state.finished_loads and not len(state.deadlines)
        assert not any(ring.queue for ring in state.rings)
        assert not state.progressed_saves and not state.writes.backlog
        assert not state.incoming and not state.committed_saves and not state.cancelled_saves
        for number, follow in self.follows.all.items():
            assert follow.done and follow.vacated == follow.lost, f"follow {number} keeps room"
        for lane in (state.fetches, state.peers, state.writes):
            assert not (lane.transfers or lane.calls or lane.clients or lane.ring.queue or lane.inflight)
        for number, fetch in self.fetches.all.items():
            assert fetch.done and fetch.vacated == fetch.lost, f"fetch {number} keeps room"
        assert not any(s.steps or s.aborting or any(s.pending) for s in state.sessions.values())

    def _check_no_circle(self) -> None:
        """Steps never wait for each other, whatever promises allow."""
        for key in self.live:
            assert not self.follows.awaited(*key), f"step {key} waits for {self.follows.awaited(*key)}"

    def _land(self) -> None:
        """Everything that moves between arena and engine memory ends well."""
        while moving := self.moving():
            self.moved(*moving[0])
        while self.flying:
            self.done(next(iter(self.flying.values())))


def coming(request, group, blocks, fetch, item=0) -> Part:
    """A load part that waits for one object."""
    return Part(request, group, blocks, (Need(fetch, item, 0, blocks),))


def submits(commands: list[Command], direction: Direction | None = None) -> list[Submit]:
    """The batches among the commands."""
    return [c for c in commands if isinstance(c, Submit) and direction in (None, c.direction)]


def of(commands: list[Command], kind: type) -> list:
    """The commands of one kind."""
    return [command for command in commands if isinstance(command, kind)]
