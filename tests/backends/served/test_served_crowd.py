"""Eight sessions at once, on one server or on two of one pool: every byte of every load compared."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from backends.served.house import engine, reload
from e2e.known import KnownWorker, small_spec

from layerflow.keys import Chain

SESSIONS, LAYERS, CHUNK = 8, 5, 16


def test_eight_sessions(kind, start):
    servers = [start(kind, pool__size="32MiB") for _ in range(1 + kind.shared)]
    spec = small_spec(LAYERS, window=40)
    workers = [
        engine(servers[number % len(servers)], spec, name=f"engine-{number}", blocks=1024) for number in range(SESSIONS)
    ]
    system = workers[0].prompt(7 * CHUNK)
    common = [workers[0].prompt(150 + 10 * number, system, len(system)) for number in range(3)]
    own = [[worker.prompt(90 + 7 * number, system, 40) for _ in range(3)] for number, worker in enumerate(workers)]
    longer: list[Chain] = [worker.prompt(300, mine[0], len(mine[0])) for worker, mine in zip(workers, own, strict=True)]

    def compute(number: int) -> None:
        for chain in [*common, *own[number]]:
            workers[number].serve(chain)

    def go_on(number: int) -> None:
        run = workers[number].serve(longer[number])
        assert run.hit.tokens >= len(own[number][0]) // CHUNK * CHUNK

    def load(number: int) -> list[int]:
        worker: KnownWorker = workers[number]
        everything = [*common, *(chain for mine in own for chain in mine), *longer]
        everything = everything[5 * number :] + everything[: 5 * number]
        runs = [run for at in range(0, len(everything), 5) for run in reload(worker, everything[at : at + 5])]
        return [len(run.chain) - 1 - run.hit.tokens for run in runs]

    def empty() -> None:
        for served in servers:
            served.empty_arena()

    try:
        with ThreadPoolExecutor(SESSIONS) as threads:
            list(threads.map(compute, range(SESSIONS)))
            empty()
            list(threads.map(go_on, range(SESSIONS)))
            empty()
            missed = list(threads.map(load, range(SESSIONS)))
            assert not any(map(any, missed)), missed
    finally:
        for worker in workers:
            worker.agent.close()
    for served in servers:
        served.settle()
        served.wait_quiet()
        if kind.tiered:
            failures = set(served.tier["failures"])
            assert failures <= {"write_exists"}, served.tier
