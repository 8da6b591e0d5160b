"""A tier far slower than its time-outs were made for: it is used, its host lives, and nobody else is held up."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from e2e.known import eventually, small_spec
from hosts.fake_backend import NAME

from layerflow.server import EmbeddedServer, terms
from server.support import Embed, observe, worker_on

CHUNKS, CHUNK = 8, 16
LAYER_BYTES = 16 * 2 * 4096
HIT_BYTES = CHUNKS * 4 * LAYER_BYTES
SPEC = small_spec(row=4096)


@pytest.fixture
def slow(embed: Embed, monkeypatch: pytest.MonkeyPatch):
    """A server over a tier that moves so many bytes a second."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))

    def start(bytes_per_s: dict[str, float], **pool: Any) -> EmbeddedServer:
        options = {"bytes_per_s": bytes_per_s, "timeout_ms": pool.get("host_timeout_ms", 5000)}
        monkeypatch.setattr(terms, "tier_of", lambda settings: (NAME, options))
        return embed(
            pool={"size": "32MiB", "lookup_timeout_ms": 4000, **pool},
            transfer={"max_transfer_bytes": 2 * LAYER_BYTES, "step_timeout_ms": 60_000},
        )

    return start


def tier(control: Any) -> dict[str, Any]:
    return control.status(10)["tier"]


def saved(worker: Any, control: Any, tokens: int) -> Any:
    """A prompt that only the tier has."""
    assert eventually(lambda: tier(control)["up"])
    chain = worker.prompt(tokens)
    worker.serve(chain)
    assert eventually(lambda: tier(control)["written_objects"] == CHUNKS)
    control.purge(10)
    return chain


def test_a_hit_of_twice_the_bytes_that_the_time_out_allowed_loads(slow) -> None:
    # It takes 6 s, and may stand still for nearly half of that between two of its 16 parts.
    rate = HIT_BYTES / 6
    over = slow({"fetch": rate}, fetch_timeout_ms=3000, host_timeout_ms=1500)
    with worker_on(over, spec=SPEC) as worker, closing(observe(over)) as control:
        chain = saved(worker, control, CHUNKS * CHUNK)
        assert worker.serve(chain).hit.tokens == len(chain) - 1
        seen = tier(control)
        assert seen["fetched_objects"] == CHUNKS and not seen["failures"] and seen["restarts"] == 0
        assert eventually(lambda: 0 < tier(control)["backend_figures"]["largest_fetch_bytes"] <= 2 * LAYER_BYTES)


def test_a_long_queue_of_writes_costs_no_host_its_life(slow) -> None:
    over = slow({"write": 2e6}, host_timeout_ms=300)  # a queue of 2 s: nearly seven times what one call may take
    with worker_on(over, spec=SPEC) as worker, closing(observe(over)) as control:
        chain = saved(worker, control, CHUNKS * CHUNK)
        assert tier(control)["restarts"] == 0 and not tier(control)["failures"]
        assert eventually(lambda: 0 < tier(control)["backend_figures"]["largest_write_bytes"] <= 2 * LAYER_BYTES)
        assert worker.serve(chain).hit.tokens == len(chain) - 1


def test_others_are_served_from_the_arena_while_a_fetch_crawls(slow) -> None:
    over = slow({"fetch": HIT_BYTES / 20})  # seconds; nobody waits for the end of it
    with (
        worker_on(over, spec=SPEC) as worker,
        worker_on(over, engine="other") as other,
        closing(observe(over)) as control,
    ):
        chain, quick = saved(worker, control, CHUNKS * CHUNK), other.prompt(100)
        other.serve(quick)
        assert worker.agent.lookup("waits", chain).tokens == len(chain) - 1
        assert tier(control)["fetching_jobs"] == 1
        assert other.serve(quick).hit.tokens == 99
        seen = tier(control)
        assert seen["fetching_jobs"] == 1 and seen["fetched_objects"] < CHUNKS, "it is still coming"
        worker.agent.drop_lease("waits")
        assert eventually(lambda: tier(control)["fetching_jobs"] == 0), "and let go once nobody wants it"
        assert tier(control)["restarts"] == 0 and tier(control)["fetched_objects"] < CHUNKS
