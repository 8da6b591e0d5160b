"""The core against a model agent, server and engine that do everything in any order."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from flow_rules import TransferRules
from flow_world import World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from layerflow.errors import InvalidTransition
from layerflow.flow.events import (
    BatchDone,
    CallDone,
    Direction,
    FailedRange,
    FetchAvailable,
    FetchOpened,
    FollowMoved,
    FollowOpened,
    FrontierReached,
    Hop,
    IncomingFailed,
    IncomingLeased,
    Item,
    LayersComputed,
    Limits,
    LimitsChanged,
    LoadsFenced,
    LoadsLost,
    LoadsMoved,
    Need,
    Part,
    RequestAborted,
    SessionLost,
    StepClosed,
    StepOpened,
    StepsRevoked,
    Tick,
    WriteOpened,
)

SHAPES = (
    ((0, 4),) * 4,
    ((0, 3), (1, 10), (0, 3), (1, 10), (0, 7)),
    ((1, 1),),
    ((0, 25), (2, 2), (2, 5)),
)
limits = st.builds(
    Limits,
    prefetch_layers=st.sampled_from([0, 0, 1, 2]),
    max_transfer_blocks=st.sampled_from([1, 3, 100]),
    max_transfer_bytes=st.sampled_from([6, 16, 1000]),
    max_granted_bytes=st.sampled_from([2, 20, 60, 10_000]),
    save_backlog_bytes=st.sampled_from([150, 100_000, 100_000]),
    write_backlog_bytes=st.sampled_from([40, 100_000, 100_000]),
    fetch_timeout_s=st.sampled_from([1.0, 8.0, 1000.0]),
)
REQUESTS = st.sampled_from("abcde")


class FlowMachine(TransferRules):
    """Several sessions, random parts and groups, completions in any order, and everything that goes wrong."""

    @initialize(limits=limits, most=st.sampled_from([0, 1, 4, sys.maxsize]))
    def start(self, limits, most):
        self.world = World(limits, most=most)
        self.sessions = 0
        self.numbers = 0
        self.stale = []

    def _any_step(self, data):
        return data.draw(st.sampled_from(sorted(self.world.live)))

    @rule(shape=st.sampled_from(SHAPES))
    @precondition(lambda self: len(self.world.layers) < 3)
    def session_opened(self, shape):
        self.world.open_session(self.sessions, shape)
        self.sessions += 1

    @rule(data=st.data())
    @precondition(lambda self: self.world.layers.keys() - self.world.telling() and len(self.world.live) < 6)
    def step_opened(self, data):
        session = data.draw(st.sampled_from(sorted(self.world.layers.keys() - self.world.telling())))
        groups = sorted({shape.group for shape in self.world.layers[session]})
        part = st.builds(Part, REQUESTS, st.sampled_from(groups), st.integers(1, 6))
        loads = [self._needing(data, session, one) for one in data.draw(st.lists(part, max_size=5))]
        saves = data.draw(st.lists(part, max_size=4))
        deadline = self.world.now + data.draw(st.sampled_from([1.0, 8.0, 50.0]))
        save_deadline = self.world.now + data.draw(st.sampled_from([1.0, 8.0, 50.0]))
        planned = data.draw(st.sampled_from([False, False, True]))
        if planned:
            loads = [replace(one, needs=()) for one in loads]
        self.numbers += 1
        write = data.draw(st.booleans())
        self.world.open(session, self.numbers, loads, saves, deadline, save_deadline, write, planned)

    def _needing(self, data, session, part):
        """The part, some of its blocks being on their way."""
        layers = self._layers_of(session, part.group)
        known = {**self.world.fetches.all, **self.world.follows.all}
        objects = [(number, item) for number, one in known.items() if one.event.layers == layers for item in one.coming]
        if not objects or data.draw(st.sampled_from([True, False, False])):
            return part
        # What a step is storing now, rather than what may never come.
        follows = self.world.follows.all
        stored = [one for one in objects if one[0] in follows and follows[one[0]].event.parts]
        if stored and data.draw(st.booleans()):
            objects = stored
        cuts = sorted(data.draw(st.sets(st.integers(0, part.blocks), min_size=2, max_size=4)))
        needs = []
        for lo, hi in pairwise(cuts):
            if data.draw(st.sampled_from([True, True, False])):
                needs.append(Need(*data.draw(st.sampled_from(objects)), lo, hi))
        return replace(part, needs=tuple(needs))

    @rule(data=st.data(), count=st.integers(1, 8))
    @precondition(lambda self: self._landable())
    def batches_done(self, data, count):
        for _ in range(count):
            landable = self._landable()
            if landable:
                submit = data.draw(st.sampled_from(landable))
                self.stale.append(BatchDone(submit.session, submit.batch))
                self.world.done(submit)

    def _landable(self):
        """Batches whose lane can be at work."""
        return [
            submit
            for submit in self.world.flying.values()
            if self.world.can_move(submit) or self.world.steps[submit.session, submit.step].sides[submit.direction].cut
        ]

    @rule(data=st.data(), layers=st.integers(0, 5), told=st.sampled_from([None, 0, 3]))
    @precondition(lambda self: self.world.moving())
    def loads_moved(self, data, layers, told):
        """What a worker moves by itself has ended: in full but for what it says has failed, or what was cut off."""
        key = data.draw(st.sampled_from(sorted(self.world.moving())))
        cut = self.world.live[key].sides[Direction.LOAD].cut
        self.stale += [LoadsMoved(*key, 0), LoadsLost(*key, ())]
        self.world.moved(*key, self._failing(data, key), *((layers, told) if cut else ()))

    @rule(data=st.data())
    @precondition(lambda self: self.world.moving())
    def loads_lost(self, data):
        """Some of it has failed, and its end is yet to be told."""
        key = data.draw(st.sampled_from(sorted(self.world.moving())))
        self.world.lose(*key, self._failing(data, key))

    def _failing(self, data, key):
        side, failed = self.world.live[key].sides[Direction.LOAD], []
        for index in data.draw(st.lists(st.integers(0, len(side.parts) - 1), max_size=4)):
            group, (lo, hi) = side.parts[index].group, side.ranges[index]
            last = max(end for part, (_, end) in zip(side.parts, side.ranges, strict=True) if part.group == group)
            first = data.draw(st.integers(lo, hi - 1))
            failed.append((group, first, data.draw(st.integers(first + 1, last))))
        return failed

    @rule(data=st.data())
    @precondition(lambda self: self.world.flying)
    def batch_failed(self, data):
        self.world.fail(data.draw(st.sampled_from(list(self.world.flying.values()))))

    @rule(data=st.data(), more=st.integers(1, 3))
    @precondition(lambda self: self.world.live)
    def frontier_and_compute(self, data, more):
        session, step = self._any_step(data)
        one = self.world.live[session, step]
        count = min(len(self.world.layers[session]), one.computed + more)
        self.world.send(FrontierReached(session, step, count - 1))
        self.world.send(LayersComputed(session, step, count))

    @rule(data=st.data())
    @precondition(lambda self: self.world.live)
    def loads_fenced(self, data):
        session, step = self._any_step(data)
        self.world.send(LoadsFenced(session, step, "the engine's wait was cut"))

    @rule(data=st.data(), ok=st.booleans())
    @precondition(lambda self: self.world.live)
    def step_closed(self, data, ok):
        session, step = self._any_step(data)
        self.world.send(StepClosed(session, step, ok))

    @rule(data=st.data(), request=REQUESTS)
    @precondition(lambda self: self.world.layers)
    def request_aborted(self, data, request):
        session = data.draw(st.sampled_from(sorted(self.world.layers)))
        self.world.send(RequestAborted(session, request))

    @rule(data=st.data(), loads=st.booleans())
    @precondition(lambda self: self.world.layers)
    def steps_revoked(self, data, loads):
        self.world.send(StepsRevoked(data.draw(st.sampled_from(sorted(self.world.layers))), loads, "replaced"))

    @rule(data=st.data(), sure=st.sampled_from([False, False, True]))
    @precondition(lambda self: self.world.layers)
    def session_lost(self, data, sure):
        if sure:
            self.world.send(SessionLost(data.draw(st.sampled_from(sorted(self.world.layers)))))

    @rule(limits=limits)
    def limits_changed(self, limits):
        self.world.send(LimitsChanged(limits))

    @rule(seconds=st.sampled_from([0.1, 2.0, 10.0]))
    def time_passes(self, seconds):
        self.world.now += seconds
        self.world.send(Tick())

    @rule(data=st.data())
    @precondition(lambda self: self.stale)
    def late_report(self, data):
        before = self.world.flow.statistics().late_reports
        self.world.send(data.draw(st.sampled_from(self.stale)))
        assert self.world.flow.statistics().late_reports == before + 1

    @rule(data=st.data())
    @precondition(lambda self: self.world.live)
    def impossible_event(self, data):
        session, step = self._any_step(data)
        event = data.draw(
            st.sampled_from(
                [
                    StepOpened(session, step, 1.0, 1.0),
                    StepOpened(session, step + 1000, 1.0, 1.0, (Part("a", 9, 1),)),
                    StepOpened(session, step + 1000, 1.0, 1.0, (Part("a", 0, 2, (Need(10**9, 0, 0, 2),)),)),
                    StepOpened(session, step + 1000, 1.0, 1.0, (Part("a", 0, 2, (Need(1, 0, 0, 2),)),), (), True),
                    LoadsMoved(session, step, -1),
                    LoadsLost(session, step, (FailedRange(0, -1, 1, "x"),)),
                    FetchOpened(0, "x", (0,), (Item(1, 1),)),
                    FetchOpened(10**9, "x", (0,), (Item(1, 1),), hop=Hop.WRITE),
                    FetchOpened(10**9, "x", (0,), (Item(1, 1),), hop=Hop.LOCAL),
                    IncomingFailed(10**9, ((0, "never opened"),)),
                    IncomingLeased(0, True),
                    IncomingLeased(10**9, True),
                    FetchAvailable(10**9, 1),
                    FollowOpened(0, (0,), 1),
                    FollowOpened(10**9, (0,), 2, session, step, 0, (0,)),
                    IncomingFailed(-1, ((0, "never opened"),)),
                    FollowMoved(10**9, (0,), 1),
                    WriteOpened(0, "x", session, step, 0, (Item(1, 1),), (0,)),
                    WriteOpened(10**9, "x", session, step, 0, (Item(1, 1),), ()),
                    CallDone(Hop.FETCH, 10**9),
                    CallDone(Hop.PEER, 10**9),
                    CallDone(Hop.WRITE, 10**9),
                    FrontierReached(session, step, 99),
                    LayersComputed(session, step, 99),
                    BatchDone(session, 10**9),
                ]
            )
        )
        before = self.world.flow.statistics()
        with pytest.raises(InvalidTransition):
            self.world.flow.handle(event, self.world.now)
        assert self.world.flow.statistics() == before
        self.world.flow.validate()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()
            assert all(one.done is not None for one in self.world.steps.values())
            assert all(isinstance(one.event, StepOpened) for one in self.world.steps.values())


TestFlowMachine = FlowMachine.TestCase
TestFlowMachine.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
