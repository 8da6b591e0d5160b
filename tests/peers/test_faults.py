"""Servers, hosts and the link itself die, stop or are cut while bytes move: no wrong byte, nothing leaks."""

from __future__ import annotations

import functools
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from e2e.known import KnownWorker, Run, eventually, small_spec
from e2e.stopping import go_on, stop, stopped

from layerflow.agent.lookups import Lookups
from layerflow.keys import Chain
from layerflow.links import links
from layerflow.spec import ModelSpec
from layerflow.wire.peer_link import HEAD
from layerflow_testing.ports import held_ports
from peers.conftest import LINKS, Pair
from peers.relay import Relay

pytestmark = pytest.mark.parametrize("link", LINKS)
TOKENS, CHUNK_LAYER = 160, 16 * 2 * 4096
SPEC: ModelSpec = small_spec(8, row=4096)
WHOLE = TOKENS // 16 * 8 * CHUNK_LAYER
"""Bytes of the prompt's full chunks."""
STEP_S = 20.0
PAUSE_S = 0.4
"""Before each answer of an exporter whose bytes do not go through the relay."""


@dataclass
class Line:
    """A pair with a relay between exporter and importer."""

    two: Pair
    relay: Relay
    through: bool  #: the bytes go through the relay, not only what is said of them
    p: KnownWorker
    d: KnownWorker

    def stored(self) -> Chain:
        """A prompt whose KV the owner has."""
        chain = self.p.prompt(TOKENS)
        self.p.serve(chain)
        return self.d.agent.chain(chain.tokens)

    def load(self, chain: Chain, fault: Callable[[], None], at: int) -> Run:
        """Load the prompt at the reader; `fault` strikes once so many bytes have passed. No wrong byte is ready.

        With a number of bytes, no more of them pass until the fault has struck, however late that is.
        """
        before, wrong = self.relay.passed, []
        at = at if self.through else min(at, 1)
        if at:
            self.relay.hold_at = before + at
        run = self.d.admit(chain)
        assert run.hit.tokens == TOKENS - 1

        def engine() -> None:
            with self.d.agent.open_step([run.request()], STEP_S) as step:
                wrong.append(self.d.forward(step, [run]))

        thread = threading.Thread(target=engine)
        thread.start()
        try:
            assert eventually(lambda: self.relay.passed - before > at), self.relay.passed
            fault()
        finally:
            self.relay.hold_at = math.inf
        thread.join(STEP_S)
        assert not thread.is_alive(), "the engine waits past its deadline"
        assert wrong == [0]
        assert self.d.agent.wait_idle(run.name, 20)
        self.d.retire(run)
        return run


@pytest.fixture
def line(pair: Callable[..., Pair], link: str) -> Iterator[Callable[..., Line]]:
    """``line(rate, **more)``: extra settings of the reader."""
    lines: list[Line] = []

    def start(rate: float, owner: dict[str, object] | None = None, **reader: object) -> Line:
        [port] = held_ports(1)
        through = links()[link].maps_arena
        relay = Relay(f"127.0.0.1:{port}", rate if through else 0, pause_s=0 if through or not rate else PAUSE_S)
        sizes = {"pool.size": "64MiB"}
        places = {"peers.link_address": f"127.0.0.1:{port}", "peers.link_advertise": f"127.0.0.1:{relay.port}"}
        two = pair(sizes | places | {"peers.lease_share": 1} | (owner or {}), sizes | reader)
        workers = [KnownWorker(end.endpoint, SPEC, engine=name) for end, name in ((two.owner, "p"), (two.reader, "d"))]
        lines.append(Line(two, relay, through, *workers))
        return lines[-1]

    yield start
    for each in lines:
        for worker in (each.p, each.d):
            worker.agent.close()
        each.relay.close()


def recovered(it: Line) -> None:
    """Both sides are whole again, nothing is held, and a new prompt comes over the link."""
    assert eventually(it.two.ready), (it.two.lends, it.two.reads)
    assert eventually(lambda: it.p.agent.attached and it.d.agent.attached)
    it.relay.rate = it.relay.pause_s = 0
    chain = it.stored()
    before = it.two.reads["fetched_objects"]
    # A link that has failed rests for a second: until then nothing of it hits.
    assert eventually(lambda: it.d.agent.lookup("probe", chain).tokens == TOKENS - 1)
    run = it.d.serve(chain)
    assert run.hit.tokens == TOKENS - 1 and it.two.reads["fetched_objects"] > before
    assert eventually(it.two.settled), (it.two.lends, it.two.reads)


@pytest.mark.parametrize("role", ["exporter", "importer"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_that_dies_or_stops_costs_the_load_and_no_more(
    line: Callable[..., Line], role: str, how: signal.Signals
) -> None:
    it = line(4e6)
    victim = it.two.pid(role)
    strike = functools.partial(stop, victim) if how is signal.SIGSTOP else functools.partial(os.kill, victim, how)
    run = it.load(it.stored(), strike, 1 << 20)
    assert run.failed, "the load cannot have ended"
    assert eventually(lambda: it.two.pid(role) not in (0, victim))
    recovered(it)


def test_a_byte_that_is_altered_on_the_link_is_never_ready(line: Callable[..., Line]) -> None:
    it = line(0)
    if not it.through:
        pytest.skip("its bytes do not go through the relay")
    chain, spoilt = it.stored(), []

    def alter(data: bytes) -> bytes:
        if len(data) < 4096 or spoilt:
            return data
        spoilt.append(len(data) // 2)
        return data[: spoilt[0]] + bytes([data[spoilt[0]] ^ 1]) + data[spoilt[0] + 1 :]

    it.relay.alter = alter
    run = it.load(chain, lambda: None, 0)
    assert spoilt and run.failed, "no byte was altered, or the load did not notice"
    assert it.two.reads["failures"] == {"fetch_broken": 1}
    it.relay.alter = bytes
    recovered(it)


def test_links_to_exporters_that_are_gone_are_hung_up(pair: Callable[..., Pair]) -> None:
    """Each of them listens at a port of its own."""
    two = pair({"pool.size": "64MiB", "peers.link_address": "127.0.0.1:0"}, {"pool.size": "64MiB"})
    with two.workers(SPEC) as (p, d):
        for number in range(3):
            chain = p.prompt(TOKENS)
            p.serve(chain)
            assert eventually(lambda chain=chain: d.agent.lookup("probe", chain).tokens == TOKENS - 1)
            assert d.serve(chain).hit.tokens == TOKENS - 1
            assert eventually(lambda: two.reads["importer_figures"].get("links") == 1), two.reads
            if number < 2:
                victim = two.pid("exporter")
                os.kill(victim, signal.SIGKILL)
                assert eventually(lambda victim=victim: two.pid("exporter") not in (0, victim))
                assert eventually(two.ready)


def test_an_owner_that_is_killed_is_another_when_it_comes_back(line: Callable[..., Line]) -> None:
    it = line(4e6)
    chain = it.stored()
    incarnation = it.two.status(it.two.owner)["incarnation"]
    run = it.load(chain, it.two.owner.kill, 1 << 20)
    assert run.failed
    assert eventually(lambda: it.two.reads["peers"][0]["state"] != "up")
    assert it.d.agent.lookup("gone", it.p.prompt(TOKENS)).tokens == 0
    it.two.owner.restart()
    assert eventually(lambda: it.p.agent.attached)
    assert eventually(it.two.ready), it.two.reads
    assert it.two.status(it.two.owner)["incarnation"] != incarnation
    recovered(it)


def test_an_owner_that_is_stopped_is_given_up(line: Callable[..., Line]) -> None:
    it = line(2e6, owner={"server.liveness_ms": 2000})
    pid = it.two.pid("owner")

    def halt() -> None:
        stop(pid)
        if it.through:
            it.relay.rate = 1e6  # what its exporter goes on to give would take 9 s

    try:
        run = it.load(it.stored(), halt, 1 << 20)
        assert run.failed
        assert it.two.reads["peers"][0]["state"] != "up"
    finally:
        go_on(pid)
    recovered(it)


def test_a_reader_that_is_killed_leaves_nothing_lent(line: Callable[..., Line]) -> None:
    it = line(2e6)
    chain = it.stored()
    run = it.load(chain, it.two.reader.kill, 1 << 20)
    assert run.failed
    lends = lambda: it.two.lends  # noqa: E731
    assert eventually(lambda: not lends()["who"] and not lends()["leases"] and not lends()["lent_bytes"])
    assert eventually(lambda: not lends()["exporter_figures"]["links"])
    it.two.reader.restart()
    assert eventually(lambda: it.d.agent.attached)
    recovered(it)


def test_a_link_that_is_cut_in_mid_layer_fails_what_has_not_come(line: Callable[..., Line]) -> None:
    it = line(0)
    recovered(it)  # connected, greeted
    it.relay.cut_after = it.relay.passed + (WHOLE // 2 + CHUNK_LAYER // 3 if it.through else HEAD.size * 3 // 2)
    run = it.load(it.stored(), lambda: None, 0)
    assert run.failed and it.relay.cuts == 1
    assert it.two.pid("importer") and it.two.reads["importer"]["restarts"] == 0
    recovered(it)


def test_a_slow_link_kills_no_host(line: Callable[..., Line]) -> None:
    it = line(10e6)
    run = it.load(it.stored(), lambda: None, 0)
    assert not run.failed
    assert it.two.reads["importer"]["restarts"] == it.two.lends["exporter"]["restarts"] == 0
    assert eventually(it.two.settled)


def test_a_lease_that_runs_out_is_renewed_while_it_is_read(line: Callable[..., Line], link: str) -> None:
    # Ended by half before it is renewed, it leaves a busy machine two seconds for that; the load takes seven.
    it = line(1.5e6, **{"peers.lease_ms": 4000 if links()[link].maps_arena else 1500})
    run = it.load(it.stored(), lambda: None, 0)
    assert not run.failed
    assert eventually(it.two.settled)


def test_a_lease_that_ends_during_a_read_fails_it(line: Callable[..., Line]) -> None:
    # The owner hears nothing of its reader for two seconds, and gives its leases up; the read would take ten.
    it = line(1e6, owner={"server.liveness_ms": 2000})
    pid = it.two.pid("reader")

    def hold() -> None:
        it.relay.hold_at = math.inf  # the importer, which is not stopped, reads on meanwhile
        with stopped(pid):
            assert eventually(lambda: not it.two.lends["who"])
            assert eventually(lambda: not it.two.lends["leases"] and not it.two.lends["lent_bytes"])

    run = it.load(it.stored(), hold, 1 << 20)
    assert run.failed
    recovered(it)


def test_what_is_slower_to_read_than_to_compute_is_no_hit(line: Callable[..., Line]) -> None:
    it = line(20e6)
    for _ in range(5):  # the fewer calls a load is, as on a busy machine, the less it tells of the link
        assert not it.load(it.stored(), lambda: None, 0).failed
        if it.two.reads["peers"][0]["gbps"]:
            break
    assert eventually(lambda: it.two.reads["peers"][0]["gbps"])
    chain = it.stored()
    lookups = Lookups(it.two.reader.endpoint, "d", SPEC, timeout_s=10.0)
    assert lookups.wait_connected(10)
    # Some 10 MiB over a link of 20 MB/s: half a second.
    for compute_s, tokens in ((0.02, 0), (20.0, TOKENS - 1), (0.0, TOKENS - 1)):
        hit = lookups.wait(lookups.ask(f"{compute_s}", chain, compute_s=compute_s), 10.0)
        assert hit is not None and hit.tokens == tokens, (compute_s, hit)
    lookups.close()
    assert it.two.reads["dear_objects"] > 0
