"""What a server tells and asks of workers that move bytes past its arena."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.known import eventually, small_spec
from hosts.fake_backend import NAME

from layerflow.agent.handshake import Handshake, dial, fetch_arena
from layerflow.config.settings import Settings
from layerflow.errors import RemoteError
from layerflow.flow.events import Direction
from layerflow.places import NOWHERE
from layerflow.server import EmbeddedServer, terms
from layerflow.wire import messages as wire
from layerflow.wire.packing import pack_u32, unpack_u32, unpack_u64

PATIENCE_S = 20.0
SPEC = small_spec()
OPTIONS = '{"protocol": "host_tcp"}'


class Worker:
    """A session by hand."""

    def __init__(self, context: EmbeddedServer, *, direct: bool = True) -> None:
        self.grants: list[wire.Batch] = []
        self.until = time.monotonic() + PATIENCE_S
        self.conversation = Handshake(dial(context.context, context.endpoint), self._other)
        self.welcome = self.conversation.introduce("engine", "agent", self.until)
        self.connection, self.fd, _ = fetch_arena(Path(self.welcome.fd_server), self.welcome.token, self.until)
        self.conversation.attach(wire.Attach(SPEC, memory=True, direct=direct), self.until)

    def ask(self, message: wire.Message, kind: type[wire.Message]) -> Any:
        self.conversation.send(message)
        return self.conversation.expect(kind, self.until)

    def next_batches(self) -> list[wire.Batch]:
        if not self.grants:
            self._other(self.conversation.expect(wire.Grant, self.until))
        batches, self.grants = self.grants, []
        return batches

    def close(self) -> None:
        os.close(self.fd)
        self.connection.close()
        self.conversation.dealer.close()

    def _other(self, message: wire.Message) -> None:
        if isinstance(message, wire.Grant):
            self.grants += message.batches


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedServer]:
    tests = Path(__file__).resolve().parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tests), os.environ.get("PYTHONPATH")))))
    monkeypatch.setattr(terms, "tier_of", lambda settings: (NAME, {}))
    monkeypatch.setattr(terms, "direct_options", lambda settings: OPTIONS)
    server = {"drain_timeout_s": 0.2, "liveness_ms": 60_000}  # these workers send no heartbeats
    with EmbeddedServer(Settings(pool={"size": "1MiB"}, server=server)) as context:
        # Its host is a process that has to be started: on a machine whose cores are taken that may take half a minute.
        assert eventually(lambda: context.server.tier is not None and context.server.tier.up, 90)
        yield context


@pytest.fixture
def worker(context: EmbeddedServer) -> Iterator[Worker]:
    worker = Worker(context)
    yield worker
    worker.close()


def opening(number: int, loads: list[wire.LoadPart], saves: list[wire.SavePart]) -> wire.OpenStep:
    return wire.OpenStep(number, time.monotonic() + 10, time.monotonic() + 20, loads, saves)


def load(chunks: int, counts: int = 4) -> wire.LoadPart:
    return wire.LoadPart("one", 0, bytes(range(16)) * chunks, pack_u32([counts] * chunks), 0, b"")


def save(chunks: int) -> wire.SavePart:
    digests = b"".join(bytes([n]) * 16 for n in range(chunks))
    return wire.SavePart("two", 0, digests, pack_u32([4] * chunks), pack_u32([16] * chunks), b"")


def test_the_welcome_says_what_a_client_is_made_from(worker: Worker) -> None:
    assert worker.welcome.direct == OPTIONS


def test_a_step_is_scheduled_and_the_arena_left_alone(context: EmbeddedServer, worker: Worker) -> None:
    plan = worker.ask(opening(1, [load(2)], [save(3)]), wire.Plan)
    assert unpack_u64(plan.loads[0].offsets, 2, "").tolist() == [0, 0]
    assert unpack_u32(plan.loads[0].stored, 2, "").tolist() == [4, 4]
    assert unpack_u64(plan.saves[0].offsets, 3, "").tolist() == [0, 0, 0]
    moved = {Direction.LOAD: 0, Direction.SAVE: 0}
    computed = wire.Report(progress=[wire.Progress(1, 3, 4)])
    worker.conversation.send(computed)
    while sum(moved.values()) < 5 * 4 * 4:
        batches = worker.next_batches()
        for batch in batches:
            moved[Direction(batch.direction)] += batch.hi - batch.lo
        worker.conversation.send(wire.Report(done=[batch.batch for batch in batches]))
    assert moved == {Direction.LOAD: 2 * 4 * 4, Direction.SAVE: 3 * 4 * 4}
    notice = worker.ask(wire.Report(closed=[wire.Closed(1, True)]), wire.Notice)
    assert [(stored.parts, stored.committed) for stored in notice.stored] == [([0], True)]
    pool = context.call(context.server.pool.statistics)
    assert (pool.objects, pool.half_written) == (0, 0)  # type: ignore[attr-defined]
    assert context.server.tier is not None
    assert context.call(context.server.tier.statistics).writing_jobs == 0  # type: ignore[attr-defined]


def test_a_load_of_more_than_its_object_holds_is_refused(worker: Worker) -> None:
    part = wire.LoadPart("one", 0, bytes(16), pack_u32([2]), 4, bytes(16))
    with pytest.raises(RemoteError, match="2 blocks are loaded of the 1"):
        worker.ask(opening(1, [part], []), wire.Plan)


def test_an_object_that_could_not_be_read_is_not_offered_for_a_while(context: EmbeddedServer, worker: Worker) -> None:
    worker.ask(opening(1, [load(1)], []), wire.Plan)
    [batch] = [batch for batch in worker.next_batches() if batch.layer == 0]
    worker.conversation.send(wire.Report(failed=[wire.Failure(batch.batch, f"{wire.BROKEN}: gone")]))
    assert context.server.tier is not None
    assert eventually(lambda: context.call(context.server.tier.statistics).shunned_objects == 1)  # type: ignore[union-attr,attr-defined]


def test_a_server_without_it_refuses(embed: Callable[..., EmbeddedServer]) -> None:
    with pytest.raises(RemoteError, match="not_direct") as refused:
        Worker(embed())
    assert refused.value.code == "not_direct"


def test_a_worker_may_go_through_the_arena_all_the_same(context: EmbeddedServer) -> None:
    worker = Worker(context, direct=False)
    plan = worker.ask(opening(1, [], [save(1)]), wire.Plan)
    assert unpack_u64(plan.saves[0].offsets, 1, "").tolist() != [NOWHERE]
    assert context.call(context.server.pool.statistics).half_written == 1  # type: ignore[attr-defined]
    worker.close()
