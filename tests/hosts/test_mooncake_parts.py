"""What of the Mooncake backend needs neither its package nor a master."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from layerflow.hosts.backend import OK, ObjectLocation, ObjectStatus, Unreachable, Unusable
from layerflow.hosts.mooncake import client
from layerflow.hosts.mooncake.backend import Mooncake, MooncakeReader, MooncakeWriter
from layerflow.hosts.mooncake.client import (
    Master,
    MooncakeClient,
    MooncakeOptions,
    _limit_waits,
    added,
    load,
    moved,
    opening,
    reading,
    writing,
)
from layerflow.hosts.shared import service
from layerflow.system.memfd import SharedMemory

FOREVER = float("inf")
NOWHERE = Master("127.0.0.1:1", "")


def place(name: int, layers: int = 4) -> ObjectLocation:
    return ObjectLocation(name.to_bytes(24, "big"), 0, 1 << 20, 4096, layers, 1)


class TestCodes:
    @pytest.mark.parametrize(
        ("judge", "code", "outcome"),
        [
            (reading, -702, ObjectStatus.MISSING),
            (reading, -703, ObjectStatus.MISSING),
            (reading, -704, ObjectStatus.MISSING),
            (reading, -707, ObjectStatus.EXPIRED),
            (reading, -600, ObjectStatus.EXPIRED),
            (reading, -800, ObjectStatus.FAILED),
            (reading, -801, ObjectStatus.BROKEN),
            (reading, -900, ObjectStatus.FAILED),
            (reading, -901, ObjectStatus.FAILED),
            (opening, -200, ObjectStatus.FULL),
            (opening, -705, ObjectStatus.EXISTS),
            (opening, -900, ObjectStatus.FAILED),
            (writing, -601, ObjectStatus.FAILED),
            (writing, -800, ObjectStatus.FAILED),
            (writing, -12345, ObjectStatus.FAILED),
        ],
    )
    def test_each_has_its_outcome_and_says_itself(self, judge, code, outcome):
        verdict = judge(code)
        assert verdict.outcome is outcome
        assert str(code) in verdict.reason

    def test_a_range_returns_bytes(self):
        assert moved(4096, 4096) == 0
        assert moved(0, 4096) == moved(4095, 4096) == -800
        assert moved(-707, 4096) == -707
        assert reading(0) is opening(0) is writing(0) is OK


class TestSegment:
    MIB = 1 << 20

    def test_found_beside_what_was_there(self):
        before = [(0, 10 * self.MIB), (500 * self.MIB, 501 * self.MIB)]
        after = [(0, 10 * self.MIB), (100 * self.MIB, 200 * self.MIB), (300 * self.MIB, 308 * self.MIB)]
        assert added(before, after, 100 * self.MIB) == [(100 * self.MIB, 200 * self.MIB)]

    def test_found_where_the_kernel_joined_it_to_its_neighbours(self):
        before = [(100 * self.MIB, 110 * self.MIB), (210 * self.MIB, 220 * self.MIB)]
        assert added(before, [(100 * self.MIB, 230 * self.MIB)], 100 * self.MIB) == [(110 * self.MIB, 210 * self.MIB)]

    def test_found_in_pieces(self):
        after = [(0, 64 * self.MIB), (100 * self.MIB, 164 * self.MIB), (200 * self.MIB, 208 * self.MIB)]
        assert sorted(added([], after, 128 * self.MIB)) == after[:2]

    def test_not_found(self):
        stacks = [(at * 100 * self.MIB, at * 100 * self.MIB + 8 * self.MIB) for at in range(40)]
        assert added([], stacks, 64 * self.MIB) == []
        assert added(stacks, stacks, 64 * self.MIB) == []


class TestMaster:
    @staticmethod
    def address(listener: socket.socket) -> str:
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def test_its_term_ends_with_the_connection(self, listener):
        master = Master(self.address(listener), "")
        assert master.generation == 0
        first = master.reach()
        line, _ = listener.accept()
        assert master.reach() == master.generation == first > 0
        line.close()
        assert master.generation == 0
        assert master.reach() == first + 1  # the same address, but who knows who that is
        assert master.lost == 1
        listener.accept()[0].close()
        listener.close()
        with pytest.raises(Unreachable, match="start mooncake_master there"):
            master.reach()
        master.close()

    def test_health(self, listener, answers, monkeypatch):
        answers.bodies["/health"] = b"ok"
        master = Master(self.address(listener), answers.url)
        master.check()
        answers.bodies.clear()
        with pytest.raises(Unreachable, match="answered 404"):
            master.check()
        master.close()
        monkeypatch.setattr(service, "HTTP_S", 0.2)
        deaf = Master(self.address(listener), f"http://{self.address(listener)}")
        with pytest.raises(Unreachable, match="timed out"):
            deaf.check()
        deaf.close()

    def test_nothing_is_asked_of_a_master_that_is_ill(self, listener, answers):
        """One that hangs would block each call, and each job behind it, for seconds."""
        master = Master(self.address(listener), answers.url)
        calls, store = (
            MooncakeClient(master),
            Store(batch_is_exist=[[1], [1]], batch_put_from_multi_buffer_ranges=[[4096]]),
        )
        calls.open(store)
        answers.bodies["/health"] = b"ok"
        master.check()
        assert calls.codes("batch_is_exist", ["one"]) == [1]
        answers.bodies.clear()
        with pytest.raises(Unreachable):
            master.check()
        with pytest.raises(Unreachable, match="answered 404"):
            calls.codes("batch_is_exist", ["one"])
        assert calls.codes("batch_put_from_multi_buffer_ranges", ["one"]) == [4096], "it takes no part in this"
        answers.bodies["/health"] = b"ok"
        master.check()
        assert calls.codes("batch_is_exist", ["one"]) == [1]
        master.close()

    def test_another_master_is_not_ill(self, listener, answers):
        master = Master(self.address(listener), answers.url)
        with pytest.raises(Unreachable):
            master.check()
        assert master.ill
        listener.accept()[0].close()
        assert not master.ill, "the one that was ill has ended"
        master.close()

    def test_largest_segment(self, listener, answers):
        answers.bodies["/metrics"] = (
            b'segment_total_capacity_bytes{segment="a:1"} 1024\nsegment_total_capacity_bytes{segment="b:1"} 4096\n'
            b'segment_allocated_bytes{segment="b:1"} 9999\n'
        )
        assert Master(self.address(listener), answers.url).largest_segment() == 4096
        assert Master(self.address(listener), "").largest_segment() == 0


class Store:
    """Answers with what a test says; remembers what it was asked."""

    def __init__(self, **answers: list[list[int]]) -> None:
        self.answers, self.asked = answers, []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.asked.append(name)
            return self.answers[name].pop(0)

        return call

    def close(self) -> None:
        self.asked.append("close")


@pytest.fixture
def parts(listener) -> tuple[MooncakeClient, MooncakeReader, MooncakeWriter]:
    master = Master(TestMaster.address(listener), "")
    calls = MooncakeClient(master)
    return calls, MooncakeReader(calls, master), MooncakeWriter(calls, master)


def described(nbytes: int, memory: bool = True) -> list[Any]:
    copy = SimpleNamespace(
        is_memory_replica=lambda: memory,
        is_local_disk_replica=lambda: not memory,
        get_memory_descriptor=lambda: SimpleNamespace(buffer_descriptor=SimpleNamespace(size=nbytes)),
    )
    return [copy]


class TestSessions:
    def test_those_of_objects_whose_size_is_not_learnt_are_ended(self, parts):
        """The library would keep them until their keys are opened again; those that others read go on."""
        calls, reader, _ = parts
        open_before, new = place(1), place(2)
        ended: list[list[str]] = []
        store = Store(
            batch_get_session_start=[[0], [0, 0, -704]],
            batch_get_replica_desc=[{f"layerflow1-{open_before.key.hex()}": described(open_before.nbytes)}],
        )
        store.batch_get_session_end = ended.append
        calls.open(store)
        assert reader.open([open_before], FOREVER) == [OK]
        with pytest.raises(IndexError):  # from the library, say: there is no answer
            reader.open([open_before, new, place(3)], FOREVER)
        assert ended == [[f"layerflow1-{new.key.hex()}"]]

    def test_one_bad_object_spoils_no_other(self, parts):
        calls, reader, _ = parts
        places = [place(i) for i in range(4)]
        store = Store(
            batch_get_session_start=[[0, 0, -703, 0]],
            batch_get_replica_desc=[{f"layerflow1-{p.key.hex()}": described(p.nbytes) for p in places}],
            batch_get_into_multi_buffer_ranges=[[4096 + 64, -707, 4096]],
        )
        calls.open(store)
        opened = [v.outcome for v in reader.open(places, FOREVER)]
        assert opened == [ObjectStatus.OK, ObjectStatus.OK, ObjectStatus.MISSING, ObjectStatus.OK]
        read = [v.outcome for v in reader.fetch([places[0], places[1], places[3]], 0, 1, FOREVER)]
        assert read == [
            ObjectStatus.OK,
            ObjectStatus.EXPIRED,
            ObjectStatus.FAILED,
        ]  # the last one came without its header's bytes

    def test_what_the_library_kept_is_revoked_and_started_again(self, parts):
        calls, _, writer = parts
        store = Store(batch_put_session_start=[[-600, 0, -600], [0]], batch_put_session_revoke=[[0, -601]])
        calls.open(store)
        outcomes = [v.outcome for v in writer.open([place(i) for i in range(3)], FOREVER)]
        assert outcomes == [ObjectStatus.OK, ObjectStatus.OK, ObjectStatus.EXISTS]

    def test_room_of_a_write_that_failed_under_way_is_not_given_back(self, parts):
        calls, _, writer = parts
        store = Store(
            batch_put_session_start=[[0, 0]],
            batch_put_from_multi_buffer_ranges=[[-800, 4096]],
            batch_put_session_revoke=[[0]],
        )
        calls.open(store)
        places = [place(1), place(2)]
        assert writer.open(places, FOREVER) == [OK, OK]
        assert [v.outcome for v in writer.write(places, 0, 1, FOREVER)] == [ObjectStatus.FAILED, ObjectStatus.OK]
        writer.revoke(places[:1])
        assert store.asked.count("batch_put_session_revoke") == 0
        writer.revoke(places[1:])
        assert store.asked.count("batch_put_session_revoke") == 1
        assert writer.open(places[:1], FOREVER)[0].outcome is ObjectStatus.FAILED

    def test_connections_to_a_master_that_ended_are_used_up(self, parts, monkeypatch):
        monkeypatch.setattr(client, "_QUICK_S", 60.0)
        calls, _, writer = parts
        store = Store(batch_put_session_start=[[-900, -900], [-900, -900], [-900, 0]])
        calls.open(store)
        outcomes = [v.outcome for v in writer.open([place(1), place(2)], FOREVER)]
        assert outcomes == [ObjectStatus.FAILED, ObjectStatus.OK]
        assert len(store.asked) == 3

    def test_a_master_that_does_not_answer_is_out_of_reach(self, parts):
        calls, _, writer = parts
        calls.open(Store(batch_put_session_start=[[-901, -901]]))
        with pytest.raises(Unreachable, match="-901"):
            writer.open([place(1), place(2)], FOREVER)

    def test_a_master_lost_halfway_leaves_nothing_open(self, parts):
        calls, _, writer = parts
        store = Store(batch_put_session_start=[[0, -200], [-901], [0, 0]], batch_put_session_revoke=[[0]])
        calls.open(store)
        places = [place(1), place(2)]
        with pytest.raises(Unreachable):
            writer.open(places, FOREVER)
        assert store.asked[-1] == "batch_put_session_revoke"
        assert writer.open(places, FOREVER) == [OK, OK]

    def test_no_time_no_call(self, parts):
        calls, reader, writer = parts
        store = Store()
        calls.open(store)
        assert {v.outcome for v in writer.open([place(1)], 0) + reader.open([place(1)], 0)} == {ObjectStatus.FAILED}
        assert store.asked == []

    def test_closed_once_and_for_all(self):
        calls, store = MooncakeClient(NOWHERE), Store()
        with pytest.raises(Unreachable):
            calls("batch_is_exist", [])
        calls.open(store)
        calls.close()
        calls.close()
        assert store.asked == ["close"]
        with pytest.raises(Unreachable):
            calls("batch_is_exist", [])

    def test_never_closed_under_a_call(self):
        calls, begun, done = MooncakeClient(NOWHERE), threading.Event(), threading.Event()
        closed: list[bool] = []
        store = SimpleNamespace(hang=lambda: (begun.set(), done.wait()), close=lambda: closed.append(True))
        calls.open(store)
        caller = threading.Thread(target=calls, args=("hang",))
        caller.start()
        begun.wait()
        assert not calls.close(0.0)
        assert closed == []
        done.set()
        caller.join()
        assert calls.close() and closed == [True]

    def test_nothing_is_joined_over_a_call_that_does_not_come_back(self):
        begun, done = threading.Event(), threading.Event()
        store = SimpleNamespace(batch_remove=lambda *_: (begun.set(), done.wait()), close=lambda: None)
        backend = Mooncake({"master": "127.0.0.1:1"})
        backend._calls.open(store)
        caller = threading.Thread(target=backend._calls, args=("batch_remove",))
        caller.start()
        begun.wait()
        with pytest.raises(Unreachable, match="has not come back"):
            backend.attach(SimpleNamespace(), lambda _: None)
        done.set()
        caller.join()
        backend.close()


class TestCondemned:
    KEYS = tuple(bytes([name]) * 24 for name in range(3))

    @pytest.fixture
    def backend(self, listener) -> Iterator[Mooncake]:
        backend = Mooncake({"master": TestMaster.address(listener), "metrics": ""})
        yield backend
        backend._calls.open(Store())
        backend.close()

    def test_a_lease_is_never_bypassed(self, backend):
        removed = []
        codes = iter([[0, -706, -704], [-706], [0]])
        store = SimpleNamespace(
            batch_remove=lambda names, force: (removed.append((len(names), force)), next(codes))[1],
            batch_is_exist=lambda names: [1] * len(names),
            close=lambda: None,
        )
        backend._calls.open(store)
        backend.hide(self.KEYS)
        assert backend.lookup(self.KEYS, FOREVER) == [True, False, True], "asking for the leased one would lease it"
        backend.check()
        assert backend.lookup(self.KEYS, FOREVER) == [True, False, True]
        backend.check()
        assert backend.lookup(self.KEYS, FOREVER) == [True] * 3
        backend.check()
        assert removed == [(3, False), (1, False), (1, False)]

    def test_a_master_that_does_not_answer_is_asked_again(self, backend):
        store = Store(batch_remove=[[-901], [0]])
        backend._calls.open(store)
        backend.hide(self.KEYS[:1])
        assert backend.lookup(self.KEYS[:1], FOREVER) == [False]
        backend.check()
        assert store.asked == ["batch_remove"] * 2

    def test_what_was_written_anew_is_not_removed(self, backend):
        one = place(1)
        store = Store(
            batch_remove=[[-706]],
            batch_put_session_start=[[0]],
            batch_put_from_multi_buffer_ranges=[[4 * 4096], [64]],
            batch_put_session_end=[[0]],
        )
        backend._calls.open(store)
        backend.hide([one.key])
        with SharedMemory.create(1 << 20) as backend._writer.arena:
            assert backend.open_write([one], FOREVER) == backend.write([one], 0, 4, FOREVER) == [OK]
            assert backend.commit([one], FOREVER) == [OK]
        backend.check()
        assert store.asked.count("batch_remove") == 1


class TestOffloaded:
    """A client of the store moves objects to its disk: they exist, and no session can read them."""

    @pytest.mark.parametrize("noticed", ["refused", "described"])
    def test_what_is_on_disk_only_is_no_hit_once_that_is_known(self, listener, noticed):
        backend = Mooncake({"master": TestMaster.address(listener), "metrics": ""})
        one, other = place(1), place(2)
        names = {at: f"layerflow1-{at.key.hex()}" for at in (one, other)}
        copies = {names[one]: described(one.nbytes), names[other]: described(other.nbytes, memory=False)}
        refused = noticed == "refused"
        store = Store(
            batch_is_exist=[[1, 1], [1, 1], [0, 1]],
            batch_get_session_start=[[0, -702 if refused else 0]],
            batch_get_replica_desc=[{names[one]: copies[names[one]]} if refused else copies, copies, copies],
            batch_get_session_end=[0, 0],
        )
        backend._calls.open(store)
        keys = [one.key, other.key]
        assert backend.lookup(keys, FOREVER) == [True, True]
        assert [v.outcome for v in backend.open_fetch([one, other], FOREVER)] == [ObjectStatus.OK, ObjectStatus.MISSING]
        assert backend.lookup(keys, FOREVER) == [True, False]
        assert backend.lookup(keys, FOREVER) == [False, False]
        backend.close()


class TestLoading:
    @pytest.fixture(autouse=True)
    def forget(self, monkeypatch):
        for name in ("mooncake", "mooncake.store"):
            monkeypatch.delitem(sys.modules, name, raising=False)

    def test_not_installed(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "mooncake", None)
        with pytest.raises(Unusable, match=r"pip install mooncake-transfer-engine-non-cuda>=0\.3\.13"):
            load()

    def test_without_libibverbs(self, monkeypatch):
        def fail(name: str) -> None:
            raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")

        monkeypatch.setattr("importlib.import_module", fail)
        with pytest.raises(Unusable, match="apt-get install libibverbs1"):
            load()

    def test_too_old(self, monkeypatch):
        store = ModuleType("mooncake.store")
        store.MooncakeDistributedStore = type("MooncakeDistributedStore", (), {})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
        monkeypatch.setitem(sys.modules, "mooncake.store", store)
        with pytest.raises(Unusable, match=r"is too old: layers need its sessions; pip install .*0\.3\.13"):
            load()

    def test_nobody_there(self, listener):
        address = TestMaster.address(listener)
        listener.close()
        with (
            SharedMemory.create(4096) as arena,
            pytest.raises(Unreachable, match=r"start mooncake_master there, or set pool\.mooncake\.master"),
        ):
            Mooncake({"master": address, "metrics": ""}).attach(arena, lambda keys: None)
        assert "mooncake.store" not in sys.modules

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"masters": "a:1"}, "masters: Extra inputs"),
            ({"master": "localhost"}, "host:port"),
            ({"segment_size": 4096}, "0 or at least 16MiB"),
        ],
    )
    def test_options(self, options, words):
        with pytest.raises(Unusable, match=words):
            MooncakeOptions.read(options)

    def test_waits_end_before_the_server_kills(self, monkeypatch):
        for name in ("MC_RPC_TIMEOUT_MS", "MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC"):
            monkeypatch.setenv(name, "")
        monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "")
        for timeout_ms in (1800, 5000, 20_000):
            _limit_waits(timeout_ms)
            assert int(os.environ["MC_RPC_TIMEOUT_MS"]) < timeout_ms
            hanging = int(os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"])
            assert hanging == int(os.environ["MC_TCP_STATUS_TIMEOUT_SEC"]) < timeout_ms / 1000
            assert int(os.environ["MC_TRANSFER_TIMEOUT"]) > hanging
