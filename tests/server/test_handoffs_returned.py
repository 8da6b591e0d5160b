"""What large hand-offs kept returns in turns with the rest of the loop; all that meets it meanwhile finds it right."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from unittest.mock import Mock

import pytest

from layerflow.errors import REASON_CHARS
from layerflow.pool.base import NewObject, ReserveStatus
from layerflow.pool.memory import MemoryPool
from layerflow.server.handlers.following import view_of_handoff
from layerflow.server.handoffs import registry
from layerflow.server.handoffs.handoff import OBJECTS_PER_SLICE, HandoffRecord, HandoffStatus
from layerflow.server.handoffs.registry import Handoffs
from layerflow.server.mailboxes import Slices
from layerflow.system.memfd import SharedMemory
from layerflow.wire.messages import MAX_REASON

NBYTES, COUNT = 4096, 1000


class Prompt:
    """Objects of a prompt, in slices as the server makes them."""

    tokens = 16 * COUNT

    def __init__(self, count: int = COUNT) -> None:
        self.count = count
        keys = [os.urandom(24) for _ in range(count)]
        self.all = {key: NewObject(key, NBYTES, 1, 16, b"") for key in keys}
        self.parent = os.urandom(24)
        self.all[keys[-1]] = NewObject(keys[-1], NBYTES, 1, 4, self.parent)
        self.keys = keys

    def nbytes(self, _: object) -> int:
        return self.count * NBYTES

    def objects(self, _: object) -> Iterator[Mapping[bytes, NewObject]]:
        for start in range(0, self.count, OBJECTS_PER_SLICE):
            yield {key: self.all[key] for key in self.keys[start : start + OBJECTS_PER_SLICE]}


class Arena:
    """Room for two such prompts, and hand-offs in it that may keep one and a half; a turn gives back one piece."""

    def __init__(self) -> None:
        memory = SharedMemory.create(2 * COUNT * 2 * NBYTES)
        self.pool = MemoryPool(Mock(nbytes=memory.nbytes, view=memory.view, warm_bytes=0))
        self.soon: list[Callable[[], object]] = []
        self.handoffs = Handoffs(
            self.pool,
            int(1.5 * COUNT * NBYTES),
            lambda: 1.0,
            revoke_reservations=lambda keys, owner, _: self.pool.revoke(list(keys), owner),
            soon=self.soon.append,
            changed=lambda: None,
        )

    def opening(self, name: str, prompt: Prompt, engine: str = "P", key: str = "") -> Slices[str]:
        charge = self.charge = Mock()
        return self.handoffs.open(
            name, engine, 1, specs=[Mock()], prompt=prompt, lease_s=60.0, due=1e12, charge=charge, key=key
        )  # type: ignore[arg-type]

    def open(self, name: str, prompt: Prompt, engine: str = "P", key: str = "") -> str:
        opening = self.opening(name, prompt, engine, key)
        while True:
            try:
                next(opening)
            except StopIteration as ended:
                return str(ended.value)

    def take(self, objects: Sequence[NewObject], engine: str = "P") -> dict[bytes, int]:
        """A step of an engine that loads none of these saves them."""
        return self.handoffs.take_reservations(engine, objects, ("step", 1, 1), loads=lambda key: False)

    def store(self, name: str, prompt: Prompt, engine: str = "P") -> None:
        """A step saves all of it, and its engine ends it."""
        for new in prompt.all.values():
            assert self.take([new], engine)
        self.pool.commit(prompt.keys, ("step", 1, 1))
        self.handoffs.stored(prompt.keys, 0.0)
        self.handoffs.end(name, engine, prompt.tokens, "", 0.0)

    def turns(self) -> int:
        """Do what was put off until there is none; how often."""
        count = 0
        while self.soon:
            self.soon.pop(0)()
            count += 1
        return count

    @property
    def kept(self) -> int:
        return self.handoffs.statistics().kept_bytes


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Arena:
    monkeypatch.setattr(registry, "SLICE_S", 0.0)
    return Arena()


@pytest.mark.parametrize("complete", [False, True])
def test_a_large_one_is_given_back_in_turns_and_all_of_it(arena: Arena, complete: bool) -> None:
    prompt = Prompt()
    assert arena.open("h", prompt) == ""
    if complete:
        arena.store("h", prompt)
        arena.turns()
    charge = arena.charge
    arena.handoffs.release("h", 0.0)
    handoff = arena.handoffs.get("h")
    assert handoff is not None and handoff.status is HandoffStatus.RELEASED
    assert 0 < arena.kept < COUNT * NBYTES and not charge.release.called, "one piece is back, and told as such"
    assert arena.turns() >= COUNT // registry.PIECE
    figures = arena.pool.statistics()
    assert (arena.kept, figures.pinned, figures.half_written) == (0, 0, 0)
    assert charge.release.called
    arena.pool.validate()


def test_who_opens_the_next_one_waits_for_the_room_of_the_last(arena: Arena) -> None:
    first, second = Prompt(), Prompt()
    assert arena.open("first", first) == ""
    arena.handoffs.end("first", "P", 0, "its engine was stopped", 0.0)
    assert arena.open("second", second) == "", "there is room for one and a half"
    arena.store("second", second)
    third = Prompt()
    assert arena.open("third", third) == "", "the complete one is taken back for it"
    old = arena.handoffs.get("second")
    assert old is not None and old.status is HandoffStatus.REVOKED
    assert arena.kept == COUNT * NBYTES
    arena.pool.validate()


def test_a_slice_without_room_takes_nothing_from_those_before_it(arena: Arena) -> None:
    arena.handoffs._room_bytes = 4 * COUNT * NBYTES
    old, prompt = Prompt(), Prompt()
    prefix = prompt.keys[: 2 * OBJECTS_PER_SLICE]
    arena.pool.reserve([prompt.all[key] for key in prefix], "saved")
    arena.pool.commit(prefix, "saved")
    arena.pool.hold(prefix, "a load", float("inf"))
    assert arena.open("old", old) == ""
    arena.store("old", old)
    arena.turns()
    while arena.pool.reserve([NewObject(os.urandom(24), NBYTES, 1, 16)], "saves")[0].outcome is ReserveStatus.RESERVED:
        pass
    arena.pool.release("a load")
    assert arena.open("h", prompt) == "", "the older one is taken back for its third slice"
    handoff, revoked = arena.handoffs.get("h"), arena.handoffs.get("old")
    assert handoff is not None and revoked is not None and revoked.status is HandoffStatus.REVOKED
    assert handoff.pending == set(prompt.keys[len(prefix) :])
    assert arena.pool.pinned_by(handoff.owner) == len(prefix)
    arena.pool.reserve([NewObject(os.urandom(24), NBYTES, 1, 16) for _ in range(4 * COUNT)], "more saves")
    assert all(arena.pool.lookup(prefix)), "saves that look for room leave what the hand-off counts on"
    arena.pool.validate()
    arena.handoffs.release("h", 0.0)
    arena.turns()
    assert (arena.kept, arena.pool.statistics().pinned) == (0, 0)


def test_those_that_nobody_has_come_for_stay_longer(arena: Arena) -> None:
    arena.handoffs._room_bytes = 4 * COUNT * NBYTES
    small = [Prompt() for _ in range(3)]
    for number, prompt in enumerate(small):
        prompt.keys = prompt.keys[:64]
        prompt.all = {key: prompt.all[key] for key in prompt.keys}
        assert arena.open(str(number), prompt) == ""
        arena.store(str(number), prompt)
        arena.turns()
    second = arena.handoffs.get("1")
    assert second is not None
    arena.handoffs.claim(second, 0.0, 1.0)
    gone = []
    while arena.handoffs._make_room("", 0):
        arena.turns()
        states = {str(n): arena.handoffs.get(str(n)).status for n in range(3)}  # type: ignore[union-attr]
        gone.append([name for name, status in states.items() if status is HandoffStatus.REVOKED])
    assert gone == [["1"], ["0", "1"], ["0", "1", "2"]]


def test_what_is_still_to_be_given_back_is_nobodys_hand_off(arena: Arena) -> None:
    """Saves of the same objects may take its room over, be stored and be lost meanwhile."""
    prompt = Prompt()
    assert arena.open("h", prompt) == ""
    arena.handoffs.end("h", "P", 0, "its engine was stopped", 0.0)
    saved, lost, late = prompt.keys[0], prompt.keys[1], prompt.keys[2]
    assert arena.take([prompt.all[saved], prompt.all[lost]]).keys() == {
        saved,
        lost,
    }
    arena.pool.commit([saved], ("step", 1, 1))
    arena.handoffs.stored([saved], 0.0)
    arena.pool.revoke([lost], ("step", 1, 1))
    arena.handoffs.lost([lost], "it was given up")
    arena.handoffs.cancel_reservations("P", [late])
    arena.turns()
    assert arena.pool.lookup([saved, lost, late]) == [True, False, False]
    figures = arena.pool.statistics()
    assert (arena.kept, figures.pinned, figures.half_written) == (0, 0, 0)
    assert arena.open("h", prompt) == "", "the same prompt again"
    arena.pool.validate()


@pytest.mark.parametrize("all_of_it", [False, True])
def test_saves_that_begin_within_the_grace_take_as_long_as_any(arena: Arena, all_of_it: bool) -> None:
    """An engine's end may come before its last step: their sockets are two. A slow link takes longer than the grace."""
    prompt = Prompt()
    assert arena.open("h", prompt) == ""
    handoff = arena.handoffs.get("h")
    assert handoff is not None
    arena.handoffs.end("h", "P", prompt.tokens, "", 10.0)
    assert arena.handoffs.due(handoff) == 10.0 + registry.ENDED_GRACE_S
    for new in [*prompt.all.values()][: None if all_of_it else -1]:
        assert arena.take([new])
    arena.handoffs.expire(10.0 + registry.ENDED_GRACE_S)
    if not all_of_it:
        assert handoff.story() == "failed: its engine ended it and did not save 1 of its objects"
        return
    assert handoff.status is HandoffStatus.OPEN
    arena.pool.commit(prompt.keys, ("step", 1, 1))
    arena.handoffs.stored(prompt.keys, 12.0)
    arena.turns()
    assert handoff.status is HandoffStatus.COMPLETE


@pytest.mark.parametrize("ended", [False, True])
def test_room_of_one_that_is_over_is_kept_for_another_engines(arena: Arena, ended: bool) -> None:
    """Two engines have the same prompt; the first one's is given up in its queue."""
    prompt = Prompt()
    assert arena.open("first", prompt) == ""
    assert arena.open("second", prompt, engine="Q") == ""
    second = arena.handoffs.get("second")
    assert second is not None
    if ended:
        arena.handoffs.end("second", "Q", prompt.tokens, "", 10.0)
    arena.handoffs.release("first", 0.0)
    arena.turns()
    if ended:
        arena.handoffs.expire(10.0 + registry.ENDED_GRACE_S)
        assert second.story() == f"failed: its engine ended it and did not save {COUNT} of its objects"
    else:
        arena.store("second", prompt, engine="Q")
        arena.turns()
        assert second.status is HandoffStatus.COMPLETE
        arena.handoffs.release("second", 0.0)
    arena.turns()
    figures = arena.pool.statistics()
    assert (arena.kept, figures.pinned, figures.half_written) == (0, 0, 0)


def test_an_engine_leaves_room_to_the_one_that_it_loads_from(arena: Arena) -> None:
    """Its step would wait for itself: what it saves lies behind what it loads."""
    prompt = Prompt()
    assert arena.open("h", prompt) == ""
    loaded, saved = prompt.keys[:2]
    taken = arena.handoffs.take_reservations(
        "D", [prompt.all[loaded], prompt.all[saved]], ("step", 2, 1), loads=lambda key: key == loaded
    )
    assert taken.keys() == {saved}
    assert arena.take([prompt.all[loaded]]).keys() == {loaded}


def test_without_room_to_save_it_again_one_fails(arena: Arena) -> None:
    prompt = Prompt()
    assert arena.open("h", prompt) == ""
    handoff = arena.handoffs.get("h")
    assert handoff is not None
    assert len(arena.take([*prompt.all.values()])) == COUNT
    arena.pool.revoke(prompt.keys, ("step", 1, 1))
    while arena.pool.reserve([NewObject(os.urandom(24), NBYTES, 1, 16)], "saves")[0].outcome is ReserveStatus.RESERVED:
        pass
    arena.handoffs.lost(prompt.keys, "a late deadline")
    assert (
        handoff.story() == "failed: a save of it was given up: a late deadline; the arena has no room to save it again"
    )
    arena.turns()
    assert arena.kept == 0
    arena.pool.validate()


def test_an_opening_that_is_cut_off_keeps_nothing(arena: Arena) -> None:
    prompt = Prompt()
    arena.handoffs.announce("h", 1e12)
    opening = arena.handoffs.open("h", "P", 1, specs=[Mock()], prompt=prompt, lease_s=60.0, due=1e12, charge=Mock())  # type: ignore[arg-type]
    while not arena.kept:
        next(opening)
    opening.close()
    handoff = arena.handoffs.get("h")
    assert handoff is not None and handoff.story() == "failed: its client ended while it was being opened"
    arena.handoffs.stored(prompt.keys[:1], 0.0)
    assert arena.open("h", prompt) == "", "another engine may open it"
    arena.handoffs.release("h", 0.0)
    arena.turns()
    figures = arena.pool.statistics()
    assert (arena.kept, figures.pinned, figures.half_written) == (0, 0, 0)


@pytest.mark.parametrize("first", [False, True], ids=["comes-meanwhile", "waits-already"])
def test_a_reader_is_told_at_once_that_the_opening_is_refused(arena: Arena, first: bool) -> None:
    told: list[str] = []
    reader = arena.handoffs.announce("h", 60.0) if first else None
    assert arena.open("other", Prompt()) == ""
    opening = arena.handoffs.open("h", "P", 1, specs=[Mock()], prompt=Prompt(), lease_s=60.0, due=1e12, charge=Mock())  # type: ignore[arg-type]
    next(opening)
    reader = reader or arena.handoffs.announce("h", 60.0)
    arena.handoffs.watch(reader, lambda handoff: told.append(handoff.story()))
    with pytest.raises(StopIteration) as refused:
        while True:
            next(opening)
    arena.turns()
    assert told == [f"failed: {refused.value.value}"] and "pd.handoff_share" in told[0]
    assert arena.handoffs.announce("h", 60.0) is reader, "one that comes later is told the same"
    figures = arena.handoffs.statistics()
    assert (figures.refused, figures.failed, figures.announced) == (1, 0, 0)
    arena.handoffs.release("other", 0.0)
    arena.turns()
    assert arena.open("h", Prompt()) == "", "it may be opened all the same"


def test_a_readers_lookup_sees_the_partial_chunk(arena: Arena) -> None:
    prompt = Prompt()
    assert arena.open("h", prompt) == ""
    handoff = arena.handoffs.get("h")
    assert handoff is not None
    source = view_of_handoff(arena.pool, handoff, lambda key: False)
    assert [tail.key for tail in source.tails(prompt.parent)] == [prompt.keys[-1]]
    assert not list(source.tails(prompt.keys[0]))


def test_many_watchers_are_told_in_turns_and_one_that_raises_keeps_it_from_no_other(arena: Arena) -> None:
    handoff, told = arena.handoffs.announce("h", 1e12), list[int]()

    def watcher(number: int) -> Callable[[HandoffRecord], None]:
        def tell(_: HandoffRecord) -> None:
            if number == 2:
                raise ValueError("a bug")
            told.append(number)

        return tell

    for number in range(5):
        arena.handoffs.watch(handoff, watcher(number))
    assert arena.open("h", Prompt()) == ""
    turns = 0
    while arena.soon:
        turns += 1
        assert len(arena.soon) == 1, "what the loop's next round does is one slice"
        with contextlib.suppress(ValueError):
            arena.soon.pop(0)()
        assert len(told) <= turns, "others get their turn between two of them"
    assert told == [0, 1, 3, 4]


LONG = "no room: " + "x" * MAX_REASON
CUT = f"{LONG[: REASON_CHARS - 3]}..."


def test_reasons_of_hand_offs_that_are_over_are_cut(arena: Arena) -> None:
    """They are remembered beyond the client that gave them, and charged to nobody."""
    arena.handoffs._room_bytes = 4 * COUNT * NBYTES
    arena.handoffs.end("unopened", "P", 0, LONG, 0.0)
    assert arena.open("ended", Prompt()) == "" and arena.open("open", Prompt()) == ""
    arena.handoffs.end("ended", "P", 0, LONG, 0.0)
    assert arena.handoffs.refuse("open", "P", LONG) == CUT, "the one of this name stays; this is told and logged"
    found = [arena.handoffs.get(name) for name in ("unopened", "ended", "open")]
    assert [handoff.reason for handoff in found if handoff is not None] == [CUT, CUT, ""]


def test_why_a_save_was_given_up_is_cut(arena: Arena) -> None:
    prompt = Prompt()
    assert arena.open("h", prompt) == ""
    key = prompt.keys[0]
    arena.take([prompt.all[key]])
    arena.pool.revoke([key], ("step", 1, 1))
    arena.handoffs.lost([key], LONG)
    handoff = arena.handoffs.get("h")
    assert handoff is not None and handoff.status is HandoffStatus.OPEN
    assert handoff.given_up.startswith("a save of it was given up: no room") and len(handoff.given_up) == REASON_CHARS


# Whose hand-offs make room.


def states(arena: Arena, *names: str) -> list[HandoffStatus]:
    return [handoff.status for name in names if (handoff := arena.handoffs.get(name)) is not None]


def fill(arena: Arena, key: str, count: int = 15) -> list[str]:
    """Open so many hand-offs of a tenth of a prompt: together they keep the whole share."""
    names = [f"{key}-{number}" for number in range(count)]
    for name in names:
        assert arena.open(name, Prompt(COUNT // 10), key=key) == ""
    return names


def test_this_machines_engines_are_never_kept_out_by_a_remote_key(arena: Arena) -> None:
    theirs = fill(arena, "remote")
    assert "pd.handoff_share" in arena.open("remote-more", Prompt(COUNT // 10), key="remote"), "alone it may keep all"
    assert arena.open("mine", Prompt()) == "", "more than half of it"
    assert states(arena, *theirs) == [HandoffStatus.OPEN] * 5 + [HandoffStatus.FAILED] * 10, "the last go, as needed"
    victim = arena.handoffs.get(theirs[-1])
    assert victim is not None and "pd.handoff_share" in victim.reason
    assert "pd.handoff_share" in arena.open("remote-more", Prompt(COUNT // 10), key="remote")
    assert states(arena, "mine") == [HandoffStatus.OPEN]
    arena.turns()
    arena.pool.validate()


def test_another_key_gets_an_equal_part_and_no_more(arena: Arena) -> None:
    theirs = fill(arena, "one")
    others = [f"two-{number}" for number in range(8)]
    told = [arena.open(name, Prompt(COUNT // 10), key="two") for name in others]
    assert told[:7] == [""] * 7 and "pd.handoff_share" in told[7]
    assert states(arena, *theirs) == [HandoffStatus.OPEN] * 8 + [HandoffStatus.FAILED] * 7
    assert arena.open("two-large", Prompt(), key="two"), "more than its part takes nothing from anyone"
    assert states(arena, *theirs) == [HandoffStatus.OPEN] * 8 + [HandoffStatus.FAILED] * 7


def test_a_key_takes_nothing_of_this_machines_engines_that_is_not_complete(arena: Arena) -> None:
    mine = fill(arena, "")
    assert "pd.handoff_share" in arena.open("theirs", Prompt(COUNT // 10), key="remote")
    assert states(arena, *mine) == [HandoffStatus.OPEN] * 15


def test_new_ones_of_a_key_take_back_its_own_complete_ones_and_past_their_part_no_others(arena: Arena) -> None:
    prompts = {name: Prompt(COUNT // 2) for name in ("mine", "theirs", "theirs too", "third")}
    for name in ("mine", "theirs", "theirs too"):
        assert arena.open(name, prompts[name], key="" if name == "mine" else "remote") == ""
        arena.store(name, prompts[name])
        arena.turns()
    assert arena.open("third", prompts["third"], key="remote") == ""
    assert states(arena, "mine", "theirs", "theirs too", "third") == [
        HandoffStatus.COMPLETE,
        HandoffStatus.REVOKED,
        HandoffStatus.COMPLETE,
        HandoffStatus.OPEN,
    ], "this machine's was opened first, and is within its part"


def test_what_is_made_room_for_is_not_taken_by_whoever_made_it(arena: Arena) -> None:
    """Both are opened in turns: a key opens anew as fast as its hand-offs end."""
    fill(arena, "remote")
    opening = arena.opening("mine", Prompt())
    refused = 0
    with contextlib.suppress(StopIteration):
        while True:
            next(opening)
            arena.turns()
            refused += arena.open(f"again-{refused}", Prompt(COUNT // 10), key="remote") != ""
    assert states(arena, "mine") == [HandoffStatus.OPEN] and refused


def test_a_key_takes_nothing_back_while_all_that_goes_is_for_this_machines_engines(arena: Arena) -> None:
    prompts = {name: Prompt(COUNT // 2) for name in ("one", "two", "three")}
    for name, prompt in prompts.items():
        assert arena.open(name, prompt, key="remote") == ""
        arena.store(name, prompt)
        arena.turns()
    opening = arena.opening("mine", Prompt(COUNT // 10))
    while not arena.handoffs._share._lacking:
        next(opening)
    assert arena.open("more", Prompt(8), key="remote")
    with contextlib.suppress(StopIteration):
        while True:
            next(opening)
    assert states(arena, "mine", *prompts) == [
        HandoffStatus.OPEN,
        HandoffStatus.REVOKED,
        HandoffStatus.COMPLETE,
        HandoffStatus.COMPLETE,
    ]


def test_one_that_makes_room_while_it_is_being_opened_says_so(arena: Arena) -> None:
    opening = arena.opening("theirs", Prompt(), key="remote")
    while not arena.kept:
        next(opening)
    assert arena.open("mine", Prompt(COUNT * 3 // 2)) == ""
    with pytest.raises(StopIteration) as refused:
        while True:
            next(opening)
    assert "pd.handoff_share" in str(refused.value.value)
    arena.handoffs.release("mine", 0.0)
    arena.turns()
    figures = arena.pool.statistics()
    assert (arena.kept, figures.pinned, figures.half_written) == (0, 0, 0)
    assert not arena.handoffs._share._parts


def test_objects_that_engines_of_two_models_name_alike_are_given_back_as_they_were_counted(arena: Arena) -> None:
    """A client chooses the digests: what one engine stores in 4 KiB another one would in 8."""
    small, large = Prompt(8), Prompt(8)
    large.keys, large.all = small.keys, {key: NewObject(key, 2 * NBYTES, 1, 16, b"") for key in small.keys}
    assert arena.open("small", small) == ""
    arena.store("small", small)
    arena.turns()
    assert arena.open("large", large, engine="Q") == ""
    assert arena.kept == 8 * NBYTES
    for name in ("small", "large"):
        arena.handoffs.release(name, 0.0)
    arena.turns()
    assert arena.kept == 0 and not arena.handoffs._share._parts and not arena.pool.statistics().pinned


@pytest.mark.parametrize("key", ["", "remote"])
def test_a_prompt_that_another_engine_opens_between_two_slices_is_counted_once(arena: Arena, key: str) -> None:
    prompt = Prompt()
    assert arena.open("others", Prompt(8), key="another key") == ""
    opening = arena.opening("first", prompt, key=key)
    for _ in range(COUNT // OBJECTS_PER_SLICE):
        next(opening)
    assert arena.open("second", prompt, engine="Q", key=key) == ""
    with pytest.raises(StopIteration) as opened:
        while True:
            next(opening)
    assert opened.value.value == ""
    assert states(arena, "first", "second", "others") == [HandoffStatus.OPEN] * 3
    assert arena.kept == (COUNT + 8) * NBYTES


def test_what_ends_between_two_slices_keeps_no_other_out(arena: Arena) -> None:
    assert arena.open("first", Prompt()) == ""
    opening = arena.opening("second", Prompt())
    next(opening)
    arena.handoffs.release("first", 0.0)
    arena.turns()
    with pytest.raises(StopIteration) as opened:
        while True:
            next(opening)
    assert opened.value.value == "" and states(arena, "second") == [HandoffStatus.OPEN]


# Many that end together.

MANY = 40


def many(arena: Arena) -> tuple[list[str], list[Prompt]]:
    names, prompts = [str(number) for number in range(MANY)], [Prompt(8) for _ in range(MANY)]
    for name, prompt in zip(names, prompts, strict=True):
        assert arena.open(name, prompt) == ""
    return names, prompts


@pytest.mark.parametrize("how", ["engine", "session", "purge"])
def test_many_end_in_turns(arena: Arena, how: str) -> None:
    names, _ = many(arena)
    over = HandoffStatus.REVOKED if how == "purge" else HandoffStatus.FAILED
    if how == "engine":
        arena.handoffs.lose_engine("P", "gone")
    elif how == "session":
        arena.handoffs.lose_session(1, "gone")
    else:
        arena.handoffs.purge("purged")
    assert states(arena, *names).count(over) == 1, "one piece of the work"
    assert arena.open("new", Prompt(8)) == "", "who opens another one waits for that"
    assert states(arena, *names) == [over] * MANY
    assert states(arena, "new") == [HandoffStatus.OPEN]
    arena.handoffs.release("new", 0.0)
    arena.turns()
    figures = arena.pool.statistics()
    assert (arena.kept, figures.pinned, figures.half_written) == (0, 0, 0)
    assert not arena.handoffs._to_end


def test_one_that_is_to_end_is_not_complete_in_between_and_takes_no_room_again(arena: Arena) -> None:
    names, prompts = many(arena)
    stored, lost = prompts[-1], prompts[-2]
    assert len(arena.take([*stored.all.values(), *lost.all.values()])) == 16
    arena.handoffs.end(names[-1], "P", stored.tokens, "", 0.0)
    arena.handoffs.lose_engine("P", "gone")
    arena.pool.commit(stored.keys, ("step", 1, 1))
    arena.handoffs.stored(stored.keys, 0.0)
    arena.pool.revoke(lost.keys, ("step", 1, 1))
    arena.handoffs.lost(lost.keys, "the session was lost")
    assert states(arena, names[-1]) == [HandoffStatus.OPEN]
    assert not any(map(arena.pool.writer, lost.keys))
    arena.turns()
    assert states(arena, *names) == [HandoffStatus.FAILED] * MANY
    assert arena.handoffs.statistics().completed == 0


def test_many_hand_offs_of_what_is_stored_hear_of_it_in_turns_and_nothing_takes_it_meanwhile(arena: Arena) -> None:
    """One prompt, handed over to many decoders, and saved by one step."""
    prompt = Prompt(8)
    names = [str(number) for number in range(MANY)]
    for name in names:
        assert arena.open(name, prompt) == ""
    assert len(arena.take([*prompt.all.values()])) == 8
    arena.pool.commit(prompt.keys, ("step", 1, 1))
    arena.handoffs.stored(prompt.keys, 0.0)
    first = arena.handoffs.get("0")
    assert first is not None and len(first.pending) == 7, "one pair of the work"
    arena.handoffs._look_for_others(first, 0.0)
    for name in names:
        arena.handoffs.end(name, "P", prompt.tokens, "", 0.0)
    arena.handoffs.release(names[-1], 0.0)
    full = arena.pool.reserve([NewObject(os.urandom(24), NBYTES, 1, 16) for _ in range(4 * COUNT)], "saves")
    assert full[-1].outcome is ReserveStatus.FULL and all(arena.pool.lookup(prompt.keys))
    assert arena.turns() >= 8 * (MANY - 1)
    assert states(arena, *names) == [HandoffStatus.COMPLETE] * (MANY - 1) + [HandoffStatus.RELEASED]
    assert all(arena.pool.pinned_by(handoff.owner) == 8 for handoff in arena.handoffs.live())
    assert len(arena.pool.owners()) == MANY - 1
    arena.pool.validate()


def test_what_others_bring_has_come_where_its_hand_off_has_not_heard_of_it_yet(arena: Arena) -> None:
    prompt = Prompt(8)
    arena.pool.reserve([*prompt.all.values()], "fetch")
    assert arena.open("h", prompt) == ""
    handoff = arena.handoffs.get("h")
    assert handoff is not None and handoff.stored_by_others == set(prompt.keys)
    arena.handoffs.end("h", "P", prompt.tokens, "", 0.0)
    arena.pool.commit(prompt.keys, "fetch")
    arena.handoffs.expire(0.0)
    assert handoff.status is HandoffStatus.OPEN
    arena.turns()
    assert handoff.status is HandoffStatus.COMPLETE


def test_what_others_brought_and_is_hidden_before_its_hand_off_hears_of_it_gets_no_room_again(arena: Arena) -> None:
    """As where a load finds its header broken."""
    prompt = Prompt(8)
    arena.pool.reserve([*prompt.all.values()], "fetch")
    assert arena.open("h", prompt) == ""
    handoff = arena.handoffs.get("h")
    assert handoff is not None
    arena.pool.commit(prompt.keys, "fetch")
    arena.handoffs.expire(0.0)
    arena.pool.hide(prompt.keys[-3:])
    arena.handoffs.expire(0.0)
    assert len(handoff.pending) == 7 and not handoff.reserved_here, "it has heard of one"
    arena.turns()
    arena.handoffs.end("h", "P", prompt.tokens, "", 0.0)
    arena.handoffs.release("h", 0.0)
    arena.turns()
    figures = arena.pool.statistics()
    assert (arena.kept, figures.pinned, figures.half_written) == (0, 0, 0)
    arena.pool.validate()
