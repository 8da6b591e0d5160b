"""Failure, fence, deadline, abort, loss: who is told, when memory goes back, what is never published."""

from __future__ import annotations

from flow_world import LOAD, SAVE, World, coming, of, submits

from layerflow.flow.commands import Cancel, Commit, LoadFailed, LoadsDone, Release, Revoke, Seal, StepDone
from layerflow.flow.events import (
    LayersComputed,
    Limits,
    LoadsFenced,
    Part,
    RequestAborted,
    SessionLost,
    StepClosed,
    StepsRevoked,
    Tick,
)


def failed(commands):
    return [(c.request, c.group, c.lo, c.hi) for c in of(commands, LoadFailed)]


def two_requests(limits=None, layers=2):
    world = World(limits)
    world.open_session(0, [(0, 10)] * layers)
    parts = [Part("a", 0, 3), Part("b", 0, 4)]
    out = world.open(0, 1, parts, parts, deadline=200.0, save_deadline=300.0)
    return world, submits(out, LOAD), submits(out, SAVE)


def test_a_wholly_granted_part_loses_exactly_the_failed_blocks():
    world, loads, _ = two_requests(Limits(max_transfer_blocks=5))
    assert [(s.layer, s.lo, s.hi) for s in loads] == [(0, 0, 5), (0, 5, 7), (1, 0, 5), (1, 5, 7)]
    assert failed(world.fail(loads[0])) == [("a", 0, 0, 3), ("b", 0, 3, 5)]
    assert failed(world.fail(loads[2])) == []  # the same blocks are not reported twice
    assert failed(world.fail(loads[3])) == [("b", 0, 5, 7)]
    assert of(world.done(loads[1]), LoadsDone)


def test_a_part_with_layers_to_come_fails_whole_and_is_carved_no_further():
    world, loads, _ = two_requests(Limits(max_transfer_blocks=3, max_granted_bytes=60))
    assert [(s.layer, s.lo, s.hi) for s in loads] == [(0, 0, 3), (0, 3, 6)]
    out = world.fail(loads[1])
    assert failed(out) == [("b", 0, 3, 7)]
    assert [(c.direction, c.layer) for c in of(out, Seal)] == [(LOAD, 0)]
    assert [(s.layer, s.lo, s.hi, s.seals) for s in submits(out, LOAD)] == [(1, 0, 3, True)]


def test_what_a_failed_load_spoiled_is_never_published():
    world, loads, saves = two_requests()
    world.send(LayersComputed(0, 1, 2))
    world.done(saves[0])
    world.fail(loads[0])
    assert not of(world.done(saves[1]), Commit)  # waits for the other load: it may still spoil b
    out = world.done(loads[1])
    assert of(out, LoadsDone) and not of(out, Commit)
    assert of(world.send(StepClosed(0, 1, True)), StepDone)
    assert world.steps[0, 1].sides[SAVE].revoked == {0, 1}


def test_a_failed_load_spares_the_other_requests_of_the_step():
    world, loads, saves = two_requests(Limits(max_transfer_blocks=3, max_granted_bytes=10_000))
    world.send(LayersComputed(0, 1, 2))
    first_of_a = next(s for s in loads if s.lo == 0)
    out = world.fail(first_of_a)
    assert failed(out) == [("a", 0, 0, 3)]
    assert not of(out, Revoke)  # save batches are in flight on it
    revoked = [c.parts for s in saves if s.lo == 0 for c in of(world.done(s), Revoke)]
    assert revoked == [(0,)]
    world.drain()
    assert world.steps[0, 1].sides[SAVE].committed == {1}


def test_a_failed_save_revokes_its_parts_once_quiet_and_commits_the_rest():
    world, loads, saves = two_requests(Limits(max_transfer_blocks=3))
    world.send(LayersComputed(0, 1, 2))
    for load in loads:
        world.done(load)
    assert not of(world.fail(saves[0]), Revoke)  # layer 1 of the part is still in flight
    again = next(s for s in saves if s.layer == 1 and s.lo == 0)
    (gone,) = of(world.done(again), Revoke)
    assert gone.parts == (0,)
    world.drain()
    assert world.steps[0, 1].sides[SAVE].committed == {1}


def test_one_commit_with_all_parts_after_the_last_layer():
    world, loads, saves = two_requests()
    for load in loads:
        world.done(load)
    world.send(LayersComputed(0, 1, 2))
    assert not of(world.done(saves[0]), Commit)
    (commit,) = of(world.done(saves[1]), Commit)
    assert commit.parts == (0, 1)
    (end,) = of(world.send(StepClosed(0, 1, True)), StepDone)
    assert (end.loaded_bytes, end.saved_bytes) == (140, 140)


def test_a_fence_fails_what_is_not_done_and_awaits_what_is_in_flight():
    world = World(Limits(max_transfer_blocks=3, max_granted_bytes=60))
    world.open_session(0, [(0, 10)])
    world.bring(1, 1)
    first, second = submits(world.open(0, 1, [Part("a", 0, 3), Part("b", 0, 3), coming("c", 0, 3, 1)]))
    world.done(first)
    out = world.send(LoadsFenced(0, 1, "cut"))
    assert failed(out) == [("b", 0, 3, 6), ("c", 0, 6, 9)]
    assert not of(out, LoadsDone) and not of(out, Seal) and not of(out, Cancel)
    out = world.fail(second)
    assert failed(out) == [] and of(out, LoadsDone)
    assert world.send(LoadsFenced(0, 1, "cut")) == []


def test_deadline_fails_loads_and_cancels_them():
    world, loads, _ = two_requests(Limits(max_granted_bytes=140, max_transfer_bytes=70))
    world.now = 200.0
    out = world.send(Tick())
    assert failed(out) == [("a", 0, 0, 3), ("b", 0, 3, 7)]
    assert [c.direction for c in of(out, Cancel)] == [LOAD]
    assert [of(world.fail(load), LoadsDone) != [] for load in loads] == [False, True]


def test_a_completion_that_arrives_with_the_deadline_still_counts():
    world = World()
    world.open_session(0, [(0, 10)])
    (load,) = submits(world.open(0, 1, [Part("a", 0, 1)], deadline=200.0))
    world.now = 201.0
    out = world.done(load)
    assert of(out, LoadsDone) and not of(out, LoadFailed)


def test_save_deadline_cancels_and_revokes_once_quiet():
    world, loads, saves = two_requests()
    for load in loads:
        world.done(load)
    world.now = 300.0
    out = world.send(Tick())
    assert [c.direction for c in of(out, Cancel)] == [SAVE] and not of(out, Revoke)
    assert not of(world.fail(saves[0]), Revoke)
    out = world.fail(saves[1])
    assert [c.parts for c in of(out, Revoke)] == [(0, 1)] and of(out, StepDone)


def test_a_step_that_is_never_closed_ends_with_its_last_deadline():
    world = World()
    world.open_session(0, [(0, 10)])
    world.open(0, 1, (), (), deadline=200.0, save_deadline=250.0)
    world.now = 249.0
    assert not of(world.send(Tick()), StepDone)
    world.now = 250.0
    assert of(world.send(Tick()), StepDone)


def test_a_failed_forward_pass_kills_what_misses_a_layer():
    world = World()
    world.open_session(0, [(0, 10), (0, 10), (1, 10)])
    saves = submits(world.open(0, 1, (), [Part("a", 0, 1), Part("a", 1, 1), Part("b", 1, 1)]))
    world.send(LayersComputed(0, 1, 2))
    out = world.send(StepClosed(0, 1, False))
    assert [c.direction for c in of(out, Cancel)] == [SAVE]
    assert [of(world.done(s), Commit) for s in saves[:1]] == [[]]
    assert [c.parts for c in of(world.done(saves[1]), Commit)] == [(0,)]
    out = world.fail(saves[2])
    assert [c.parts for c in of(out, Revoke)] == [(1, 2)] and of(out, StepDone)


def test_a_failed_forward_pass_fails_unfinished_loads():
    world, _, _ = two_requests()
    out = world.send(StepClosed(0, 1, False))
    assert failed(out) == [("a", 0, 0, 3), ("b", 0, 3, 7)]
    world.drain()


def test_revoked_steps_fail_their_loads_and_publish_nothing_that_was_not():
    world, loads, saves = two_requests()
    world.open_session(1, [(0, 10)])
    world.open(1, 5, [Part("x", 0, 7)], [Part("x", 0, 7)])
    world.send(LayersComputed(0, 1, 2))
    world.done(saves[0])
    out = world.send(StepsRevoked(0, True, "replaced"))
    assert failed(out) == [("a", 0, 0, 3), ("b", 0, 3, 7)]
    assert {c.direction for c in of(out, Cancel)} == {LOAD, SAVE}
    assert {getattr(c, "session", 0) for c in out} == {0}, "another session goes on"
    assert world.send(StepsRevoked(0, True, "replaced")) == []
    for batch in [*loads, *saves[1:]]:
        world.done(batch)
    assert world.steps[0, 1].sides[SAVE].revoked == {0, 1}
    world.drain()


def test_revoked_saves_leave_loads_alone():
    world, loads, _ = two_requests()
    out = world.send(StepsRevoked(0, False, "purged"))
    assert {c.direction for c in of(out, Cancel)} == {SAVE} and not failed(out)
    world.done(loads[0])
    assert of(world.done(loads[1]), LoadsDone)
    world.drain()


def test_abort_revokes_and_releases_only_when_nothing_touches_the_request():
    world, loads, saves = two_requests()
    out = world.send(RequestAborted(0, "a"))
    assert not of(out, Release) and not of(out, Revoke) and not of(out, LoadFailed)
    world.send(LayersComputed(0, 1, 2))
    told = []
    for batch in [*saves, *loads]:
        told += [type(c) for c in world.done(batch) if isinstance(c, Release | Revoke)]
    assert told == [Revoke, Release]
    assert world.released == [(0, "a")]
    world.drain()
    assert world.steps[0, 1].sides[SAVE].committed == {1}


def test_abort_of_an_unknown_request_releases_at_once():
    world = World()
    world.open_session(0, [(0, 10)])
    assert of(world.send(RequestAborted(0, "nobody")), Release)


def test_abort_said_twice_releases_once():
    world, *_ = two_requests()
    world.send(RequestAborted(0, "a"))
    world.send(RequestAborted(0, "a"))
    world.drain()
    assert world.released == [(0, "a")]


def test_abort_ends_the_wait_for_a_fetch_that_never_comes():
    world = World()
    world.open_session(0, [(0, 10)] * 2)
    world.bring(1, 2)
    world.open(0, 1, [coming("a", 0, 1, 1)])
    out = world.send(RequestAborted(0, "a"))
    assert [c.layer for c in of(out, Seal)] == [0, 1] and of(out, LoadsDone) and of(out, Release)


def test_a_lost_session_vanishes_at_once_and_frees_the_budget():
    world, loads, _ = two_requests(Limits(max_granted_bytes=280))
    world.open_session(1, [(0, 10)] * 40)
    world.open(1, 5, [Part("x", 0, 7)])
    out = world.send(SessionLost(0))
    assert [type(c) for c in out if getattr(c, "session", None) == 0] == [Revoke, LoadsDone, StepDone]
    assert of(out, Revoke)[0].parts == (0, 1)
    assert submits(out) and world.inflight(LOAD) == 280
    before = world.flow.statistics().late_reports
    world.done(loads[0])
    world.send(LayersComputed(0, 1, 1))
    assert world.flow.statistics().late_reports == before + 2
    world.drain()


def test_a_lost_session_gives_back_what_was_cut_and_waited_for_a_batch_of_another_group():
    world = World(Limits(max_granted_bytes=20))
    world.open_session(0, [(0, 10), (1, 10)])
    (save,) = submits(world.open(0, 1, (), [Part("a", 0, 1), Part("a", 1, 1)], save_deadline=200.0))
    assert save.layer == 0
    world.now = 200.0
    assert not of(world.send(Tick()), Revoke)
    assert [c.parts for c in of(world.send(SessionLost(0)), Revoke)] == [(0, 1)]


def test_saves_past_the_backlog_are_shed_and_counted():
    world = World(Limits(save_backlog_bytes=100))
    world.open_session(0, [(0, 10)] * 2)
    first = world.open(0, 1, (), [Part("a", 0, 4)])
    assert not of(first, Revoke)
    (shed,) = of(world.open(0, 2, [Part("b", 0, 1)], [Part("b", 0, 1), Part("c", 0, 1)]), Revoke)
    assert shed.parts == (0, 1) and shed.reason == "shed"
    assert world.flow.statistics().shed_parts == 2
    world.done(submits(first)[0])
    assert not of(world.open(0, 3, (), [Part("d", 0, 3)]), Revoke)
    world.drain()


def test_a_save_that_died_no_longer_counts_as_backlog():
    world = World(Limits(save_backlog_bytes=100, max_granted_bytes=40, max_transfer_bytes=10))
    world.open_session(0, [(0, 10)] * 2)
    world.open(0, 1, (), [Part("a", 0, 4)])
    assert world.flow.statistics().unsaved_bytes == 80
    world.send(RequestAborted(0, "a"))
    assert world.flow.statistics().unsaved_bytes == world.inflight(SAVE) == 10
