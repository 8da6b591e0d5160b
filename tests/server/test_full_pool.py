"""A pool without room: what does not fit is not stored, counted, and never found; the engine goes on."""

from __future__ import annotations

from e2e.known import eventually, small_spec

from server.support import Embed, observe, worker_on


def test_old_objects_make_room(embed: Embed) -> None:
    server = embed(pool__size="128KiB")
    control = observe(server)
    with worker_on(server, spec=small_spec(4)) as worker:
        for _ in range(12):
            chain = worker.prompt(100)  # 25 KiB
            assert worker.serve(chain).hit.tokens == 0
            assert worker.serve(chain).hit.tokens == 99
        pool = control.status()["pool"]
        assert pool["evictions"] > 0
        assert pool["used_bytes"] <= pool["capacity_bytes"]
        assert pool["half_written"] == 0
    control.close()


def test_everything_is_pinned(embed: Embed) -> None:
    """Room that readers hold is not taken away: new objects are given up, and the next step is as good as ever."""
    server = embed(pool__size="64KiB", pool__lease_ms=60_000, pool__lease_share=1.0)
    control = observe(server)
    with worker_on(server, spec=small_spec(4)) as worker:
        held = [worker.prompt(96), worker.prompt(96)]
        for chain in held:
            worker.serve(chain)
            assert worker.agent.lookup(f"holder-{id(chain)}", chain).tokens == 95
        full = worker.prompt(96)
        assert worker.serve(full).hit.tokens == 0
        assert control.status()["pool"]["full"] > 0
        assert worker.agent.lookup("partly", full).tokens < 95
        worker.agent.drop_lease("partly")
        for chain in held:
            assert worker.serve(chain).hit.tokens == 95
            worker.agent.drop_lease(f"holder-{id(chain)}")
        assert eventually(lambda: control.status()["pool"]["pinned"] == 0)
        assert worker.serve(full).hit.tokens < 95
        assert worker.serve(full).hit.tokens == 95
    control.close()


def test_an_object_larger_than_the_pool(embed: Embed) -> None:
    server = embed(pool__size="64KiB")
    control = observe(server)
    # One chunk: 64 tokens, 8 layers of 64 bytes twice: 64 KiB and a header.
    with worker_on(server, spec=small_spec(8, chunk_tokens=64, row=64)) as worker:
        chain = worker.prompt(64)
        assert worker.serve(chain).hit.tokens == 0
        assert worker.serve(chain).hit.tokens == 0
        small = worker.prompt(20)  # a partial chunk has room
        worker.serve(small)
        assert worker.serve(small).hit.tokens == 19
        status = control.status()
        assert status["pool"]["half_written"] == 0
        assert status["flow"]["steps"] == 0
    control.close()
