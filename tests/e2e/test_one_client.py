"""One client that makes the server keep all that it can: it is refused, others are served, and its memory returns."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from server.raw import RawClient

from e2e.known import KnownWorker, eventually, small_spec
from layerflow.wire import messages as wire
from layerflow_cli.bench.harness import ServerProcess

SPEC = small_spec(2, content="one client")
MIB = 1 << 20
PAGE = os.sysconf("SC_PAGESIZE")


def resident(server: ServerProcess) -> int:
    """Bytes of the server's own memory, without the arena."""
    size, rss, shared = map(int, Path(f"/proc/{server.process.pid}/statm").read_text().split()[:3])
    assert size
    return (rss - shared) * PAGE


def watches(client: RawClient, count: int) -> None:
    for number in range(count):
        client.say(wire.WatchHandoff(number, f"h{number}", 3_600_000))


def waiting_lookups(client: RawClient, count: int) -> None:
    digests = [os.urandom(16) for _ in range(MIB // 16)]
    for number in range(count):
        client.say(client.lookup(f"r{number}", digests, handoff="never", follow_ms=3_600_000))


def plans(client: RawClient, count: int, digests: list[bytes]) -> None:
    for number in range(count):
        client.say(client.lookup("same", digests, tail=number.to_bytes(16)))


@pytest.mark.parametrize(
    "many", [1, pytest.param(10, marks=pytest.mark.campaign)], ids=["some", "1e5 watches, 1,000 lookups, 1e4 plans"]
)
def test_one_client_costs_others_nothing(
    serve: Callable[..., ServerProcess], many: int, record_property: Callable[[str, object], None]
) -> None:
    server = serve(pool__warm=False)
    with contextlib.ExitStack() as left_over:
        contexts = zmq.Context(), zmq.Context()  # each with a thread of its own that sends
        for each in contexts:
            left_over.callback(each.destroy, 0)
        context, beside = contexts
        worker = KnownWorker(server.endpoint, SPEC, engine="raw")
        left_over.callback(worker.agent.close)
        chain = worker.prompt(160)
        worker.serve(chain)
        other = RawClient(context, server.endpoint, SPEC, "other")
        digests = list(chain.digests)
        other.say(other.lookup("before", digests))
        assert isinstance(other.hear(wire.Found), wire.Found)
        time_taken: dict[str, list[float]] = {"alone": [], "beside": []}

        def served(when: str) -> None:
            began = time.monotonic()
            other.say(other.lookup("more", digests))
            found = other.hear(wire.Found, 60.0)
            assert isinstance(found, wire.Found) and found.tokens == len(digests) * SPEC.chunk_tokens, found
            time_taken[when].append(time.monotonic() - began)

        for _ in range(20):
            served("alone")
        before = resident(server)
        doings: list[Callable[[RawClient], None]] = [
            lambda client: watches(client, 10_000 * many),
            lambda client: waiting_lookups(client, 100 * many),
            lambda client: plans(client, 1000 * many, digests),
        ]
        most = 0
        for do in doings:
            hostile = RawClient(beside, server.endpoint, SPEC, "raw")
            do(hostile)
            for _ in range(20):
                served("beside")
            most = max(most, resident(server) - before)
            hostile.conversation.dealer.close()  # without a word
            served("beside")
        assert most <= 128 * MIB, f"{most / MIB:.0f} MiB"
        assert eventually(lambda: other_is_alone(other), 30), "what it made the server keep has ended with it"
        returned = eventually(lambda: resident(server) - before <= 64 * MIB, 30)
        left = resident(server) - before
        p95 = {when: sorted(each)[int(0.95 * len(each))] * 1e3 for when, each in time_taken.items()}
        record_property("growth_mib", round(most / MIB))
        record_property("left_mib", round(left / MIB))
        record_property("p95_ms", p95)
        assert returned, f"{left / MIB:.0f} MiB"


def other_is_alone(other: RawClient) -> bool:
    """Does the server know of no other client without memory, and keep nothing for any?"""
    other.say(wire.StatusRequest(1))
    status = other.hear(wire.Status)
    assert isinstance(status, wire.Status)
    told = json.loads(status.json)
    return (
        sum(not session["memory"] for session in told["sessions"] if session["client"] == "raw") == 1
        and told["handoffs"]["announced"] == 0
    )
