"""What happens to transfers behind the arena, and to what follows saves: rules of the machine of the core."""

from __future__ import annotations

from flow_world import of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from layerflow.flow.commands import ObjectsLost
from layerflow.flow.events import (
    Direction,
    FetchAvailable,
    FetchesRevoked,
    FetchOpened,
    FollowMoved,
    Hop,
    HostLost,
    IncomingFailed,
    IncomingLeased,
    Item,
    WritesRevoked,
)


class TransferRules(RuleBasedStateMachine):
    """Fetches on both hops, follows, promises, writes, and their hosts.

    :ivar world: the model. :ivar numbers: used so far.
    """

    def _layers_of(self, session, group):
        return self.world.layers_of(session, group)

    @rule(
        data=st.data(),
        source=st.sampled_from("xy"),
        hop=st.sampled_from([Hop.FETCH, Hop.FETCH, Hop.PEER]),
        items=st.lists(st.builds(Item, st.sampled_from([1, 5, 9]), st.integers(1, 3)), min_size=1, max_size=5),
    )
    @precondition(lambda self: self.world.layers and sum(not one.done for one in self._fetches()) < 4)
    def fetch_opened(self, data, source, hop, items):
        session = data.draw(st.sampled_from(sorted(self.world.layers)))
        group = data.draw(st.sampled_from(sorted({shape.group for shape in self.world.layers[session]})))
        number = self.world.newest + 1
        available = data.draw(st.sampled_from([-1, -1, 0, 1]))
        layers = self._layers_of(session, group)
        self.world.send(FetchOpened(number, source, layers, tuple(items), available, hop))

    @rule(data=st.data(), more=st.integers(1, 3))
    @precondition(lambda self: any(self._limited()))
    def fetch_available(self, data, more):
        number = data.draw(st.sampled_from(self._limited()))
        one = self.world.fetches.all[number]
        self.world.send(FetchAvailable(number, min(one.available + more, len(one.event.layers))))

    @rule(data=st.data(), sure=st.booleans())
    @precondition(lambda self: any(one.coming for one in self._fetches()))
    def fetch_failed(self, data, sure):
        """Its source says that some of it will not come, whatever the host is doing with it."""
        if sure:
            known = self.world.fetches.all
            number = data.draw(st.sampled_from(sorted(number for number, one in known.items() if one.coming)))
            chosen = data.draw(st.sets(st.integers(0, len(known[number].event.objects) - 1), min_size=1))
            self.world.send(IncomingFailed(number, tuple((index, "given up") for index in sorted(chosen))))
            assert not chosen & set(known[number].coming), "waits for what does not come"

    def _limited(self):
        known = self.world.fetches.all
        return sorted(number for number, one in known.items() if one.coming and one.available < len(one.event.layers))

    def _savings(self, layers=None):
        """Session, step, group and open save parts of what can be followed."""
        found = []
        for (session, step), one in self.world.live.items():
            side = one.sides[Direction.SAVE]
            for group in {part.group for part in side.parts}:
                mine = [index for index, part in enumerate(side.parts) if part.group == group]
                over = side.committed.intersection(mine) or side.revoked.issuperset(range(len(side.parts)))
                if not over and layers in (None, self._layers_of(session, group)):
                    found.append((session, step, group, tuple(mine)))
        return sorted(found)

    @rule(data=st.data(), lent=st.booleans())
    @precondition(lambda self: self._savings() and len(self.world.follows.all) < 30)
    def save_followed(self, data, lent):
        session, step, group, parts = data.draw(st.sampled_from(self._savings()))
        chosen = data.draw(st.lists(st.sampled_from(parts), min_size=1, max_size=4))
        self.world.follow(session, step, group, chosen, lent)

    @rule(data=st.data(), lent=st.booleans())
    @precondition(lambda self: self.world.follows.known())
    def follow_lent(self, data, lent):
        self.world.send(IncomingLeased(data.draw(st.sampled_from(self.world.follows.known())), lent))

    @rule(data=st.data(), objects=st.integers(1, 4), lent=st.sampled_from([False, False, True]))
    @precondition(lambda self: self.world.layers and len(self.world.follows.all) < 30)
    def save_promised(self, data, objects, lent):
        session = data.draw(st.sampled_from(sorted(self.world.layers)))
        group = data.draw(st.sampled_from(sorted({shape.group for shape in self.world.layers[session]})))
        self.world.promise(self._layers_of(session, group), objects, lent)

    def _promised(self):
        known = self.world.follows.all
        return sorted(number for number, one in known.items() if one.coming and not one.event.parts)

    @rule(data=st.data())
    @precondition(lambda self: self._promised() and len(self.world.follows.all) < 40)
    def promise_kept(self, data):
        """By a step that saves it now, or by a fetch."""
        number = data.draw(st.sampled_from(self._promised()))
        one = self.world.follows.all[number]
        chosen = data.draw(st.lists(st.sampled_from(one.coming), min_size=1, max_size=4, unique=True))
        savings = self._savings(one.event.layers)
        if savings and data.draw(st.sampled_from([True, True, False])):
            session, step, group, parts = data.draw(st.sampled_from(savings))
            taken = [data.draw(st.sampled_from(parts)) for _ in chosen]
            into = self.world.follow(session, step, group, taken, data.draw(st.booleans()))
        else:
            into, items = self.world.newest + 1, (Item(3, 1),) * len(chosen)
            self.world.send(FetchOpened(into, "peer", one.event.layers, items, 0, Hop.PEER))
        self.world.send(FollowMoved(number, tuple(chosen), into))

    @rule(data=st.data())
    @precondition(lambda self: self._promised())
    def promise_broken(self, data):
        number = data.draw(st.sampled_from(self._promised()))
        coming = self.world.follows.all[number].coming
        chosen = data.draw(st.lists(st.sampled_from(coming), min_size=1, unique=True))
        self.world.send(IncomingFailed(number, tuple((index, "the hand-off failed") for index in chosen)))

    def _fetches(self):
        return list(self.world.fetches.all.values())

    @rule(data=st.data(), leased=st.booleans())
    @precondition(lambda self: self.world.fetches.all)
    def fetch_leased(self, data, leased):
        self.world.send(IncomingLeased(data.draw(st.sampled_from(sorted(self.world.fetches.all))), leased))

    @rule(data=st.data(), fails=st.sampled_from([False, False, True]), times=st.integers(1, 4))
    @precondition(lambda self: self._host_calls())
    def call_done(self, data, fails, times):
        for _ in range(times):
            if calls := self._host_calls():
                call = data.draw(st.sampled_from(calls))
                known = self.world.writes if call.hop is Hop.WRITE else self.world.fetches
                everything = len(known.all[call.transfer].event.objects)
                failed = data.draw(st.sets(st.integers(0, everything - 1))) if fails else ()
                self.world.end_call(call, *sorted(failed))

    def _host_calls(self):
        return [*self.world.fetches.calls.values(), *self.world.writes.calls.values()]

    @rule(sure=st.sampled_from([False, False, True]))
    @precondition(lambda self: any(one.left for one in self.world.writes.all.values()))
    def writes_revoked(self, sure):
        if sure:
            self.world.send(WritesRevoked("purged"))
            assert not any(one.left for one in self.world.writes.all.values())

    @rule(sure=st.sampled_from([False, False, True]), unwanted=st.booleans())
    @precondition(lambda self: any(one.coming for one in self._fetches()))
    def fetches_revoked(self, sure, unwanted):
        if sure:
            wanted = self.world.wanted() if unwanted else set()
            before = {number: one.coming for number, one in self.world.fetches.all.items()}
            self.world.send(FetchesRevoked("new weights", unwanted))
            after = {number: one.coming for number, one in self.world.fetches.all.items()}
            assert after == {number: coming if number in wanted else [] for number, coming in before.items()}

    @rule(sure=st.sampled_from([False, False, True]), hops=st.sampled_from([(Hop.FETCH, Hop.WRITE), (Hop.PEER,)]))
    @precondition(lambda self: self._host_calls() or any(one.coming for one in self._fetches()))
    def host_lost(self, sure, hops):
        if sure:
            said = self.world.send(HostLost("signal 9", hops))
            if Hop.WRITE in hops:
                assert all(one.done for one in self.world.writes.all.values()), "writes to a dead host"
            assert not any(one.coming for one in self._fetches() if one.event.hop in hops), "waits for a dead host"
            assert all(one.hop in hops for one in of(said, ObjectsLost) if one.reason == "signal 9")
