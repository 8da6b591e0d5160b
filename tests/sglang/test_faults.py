"""layerflow's server is away, dies, stands still or is full: no wrong token, no endless wait, and all goes on later."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from engines import EXPECTED, LOAD_TIMEOUT_S, Answer, Engine, EngineFailed
from models import PROMPT
from servers import SLOW, A, B, Servers, assert_never_wrong, is_loading, is_written, pages, prompt, writes

PATIENCE_S = LOAD_TIMEOUT_S + 20.0
"""An answer may take its load's deadline, and what a busy machine needs for a prompt and its lookups."""


@pytest.fixture
def slow_pair(servers: Servers) -> list[Engine]:
    """Two servers whose loads take half a second."""
    servers.stop_serving()
    servers.serve(**SLOW)
    return servers.start(A, B)


@pytest.mark.parametrize("moment", ["before a load", "in a load", "after a load"])
@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_the_server_fails(fault: str, moment: str, slow_pair: list[Engine], servers: Servers) -> None:
    """What lies in the arena is mapped by the engines: a load that has begun needs no server."""
    a, b = slow_pair
    asked = prompt(1000)
    wanted = servers.store(a, asked).tokens
    if moment == "after a load":
        loaded = b.generate(asked)
        assert (loaded.tokens, loaded.host) == (wanted, pages(b, len(asked)))
    answer = ask_over(fault, b, asked, servers, in_a_load=moment == "in a load")
    print(f"\n{fault} {moment}: {told(answer)}")
    assert_never_wrong(answer, wanted)
    goes_on(fault, a, b, servers, SLOW)
    assert b.generate(asked).tokens == wanted


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_the_server_fails_while_it_fetches(fault: str, servers: Servers, tmp_path: Path) -> None:
    """What lies on its disk comes through the server: without it, a load cannot end."""
    on_disk = SLOW | {"pool__disk__path": tmp_path / "pool", "pool__disk__capacity": "1GiB"}
    servers.stop_serving()
    servers.serve(**on_disk)
    servers.until(writes)
    a, b = servers.start(A, B)
    asked = prompt(1000)
    wanted = servers.store(a, asked).tokens
    servers.until(is_written)
    servers.stop_serving()
    servers.serve(**on_disk)
    servers.attached(a, b)
    servers.until(lambda status: status["tier"]["indexed_objects"] >= len(asked) // b.shape.page)
    answer = ask_over(fault, b, asked, servers, in_a_load=True)
    print(f"\n{fault} while it fetched from its disk: {told(answer)}")
    assert_never_wrong(answer, wanted)
    goes_on(fault, a, b, servers, on_disk)
    b.flush()
    again = b.generate(asked)
    assert_never_wrong(again, wanted)


def test_one_of_two_loads_fails(servers: Servers, tmp_path: Path) -> None:
    """One page on the disk is broken. Its client is told so, once; the request beside it is served."""
    disk = {"pool__disk__path": tmp_path / "pool", "pool__disk__capacity": "1GiB"}
    servers.stop_serving()
    servers.serve(**disk)
    servers.until(writes)
    a, b = servers.start(A, B)
    asked, beside = prompt(1000), prompt(800)
    wanted = servers.store(a, asked).tokens
    servers.until(is_written)
    objects = (file for file in (tmp_path / "pool").rglob("*") if file.is_file() and file.stat().st_size > 1 << 14)
    damaged = next(objects)
    of_beside = servers.store(a, beside).tokens
    servers.until(is_written)
    servers.stop_serving()
    with damaged.open("r+b") as opened:
        opened.seek(damaged.stat().st_size // 2)
        opened.write(random.Random(1).randbytes(64))
    servers.serve(**disk)
    servers.attached(a, b)
    servers.until(lambda status: status["tier"]["indexed_objects"] >= (len(asked) + len(beside)) // b.shape.page)
    first, second = b.generate_all([asked, beside])
    print(f"\nwrong bytes: {told(first)}; beside it: {told(second)}")
    assert_never_wrong(first, wanted)
    assert (second.status, second.tokens, second.host) == (200, of_beside, pages(b, len(beside)))
    again = b.generate(asked)
    assert (again.status, again.tokens) == (200, wanted)


def test_a_pool_for_half_a_prompt(servers: Servers) -> None:
    servers.stop_serving()
    servers.serve(pool__size="1MiB", transfer__save_timeout_ms=3000)
    a, b = servers.start(A, B)
    assert a.generate(PROMPT).tokens == EXPECTED["llama"]
    asked = [prompt(1000) for _ in range(4)]
    computed = a.generate_all(asked)
    servers.settled()
    again = b.generate_all(asked)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in computed]
    assert b.generate(PROMPT).tokens == EXPECTED["llama"]
    status = servers.until(lambda status: not status["pool"]["pinned"] and not status["flow"]["steps"])
    assert status["pool"]["evictions"] + status["pool"]["full"] > 0
    print(f"\n{sum(answer.host for answer in again)} tokens loaded of a pool that is too small")


def test_a_request_is_aborted_in_its_load(slow_pair: list[Engine], servers: Servers) -> None:
    a, b = slow_pair
    asked = prompt(1000)
    wanted = servers.store(a, asked).tokens
    request = b.begin_generate(asked, n=400, rid="to-be-aborted")
    servers.until(is_loading)
    b.abort("to-be-aborted")
    answer = request.result()
    assert not answer.served
    assert len(answer.tokens) < 400
    again = b.generate(asked)
    assert again.tokens == wanted
    servers.until(lambda status: not status["pool"]["pinned"] and not status["flow"]["steps"])


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_fifty_faults_at_random_moments(servers: Servers, tmp_path: Path) -> None:
    """The server is killed or stands still, every second time with hits on its disk. Prints what became of requests."""
    on_disk = SLOW | {"pool__disk__path": tmp_path / "pool", "pool__disk__capacity": "2GiB"}
    servers.stop_serving()
    servers.serve(**on_disk)
    servers.until(writes)
    a, b = servers.start(A, B)
    source, kinds, took = random.Random(5), Counter[str](), list[float]()
    for number in range(50):
        asked = [prompt(600 + 60 * each) for each in range(4)]
        wanted = [answer.tokens for answer in a.generate_all(asked)]
        servers.until(is_written)
        servers.settled()
        if number % 2:
            servers.stop_serving()
            servers.serve(**on_disk)
            servers.attached(a, b)
        a.flush()
        b.flush()
        requests = [b.begin_generate(each) for each in asked]
        time.sleep(source.uniform(0, 2))  # a random moment of their loads, which take 1.4 s together
        stands_still = number % 5 == 4
        fail: Callable[[], None] = servers.stop if stands_still else servers.server.kill
        fail()
        answers = [request.result() for request in requests]
        for answer, tokens in zip(answers, wanted, strict=True):
            assert_never_wrong(answer, tokens)
            kinds[f"{answer.status} {'loaded' if answer.host else 'not loaded'}"] += 1
            took.append(answer.took_s)
        computed = b.generate(asked[0])
        assert (computed.status, computed.tokens) == (200, wanted[0]), "the next request is served"
        if stands_still:
            servers.go_on()
        else:
            servers.serve(**on_disk)
        servers.attached(a, b)
        servers.until(writes)
    servers.loads_again(a, b)
    print(f"\n50 faults, {len(took)} requests: {dict(kinds)}")
    print(f"answers took {statistics.median(took):.2f} s (median), {max(took):.2f} s at most")
    assert max(took) < PATIENCE_S
    assert kinds["200 loaded"], "every fault came before the hits: the campaign proves nothing"


@pytest.mark.campaign
def test_an_engine_is_killed_while_it_saves(slow_pair: list[Engine], servers: Servers) -> None:
    a, b = slow_pair
    asked = prompt(1000)
    wanted = b.generate(asked).tokens
    b.flush()
    servers.stop_serving()
    servers.serve(**SLOW)
    servers.attached(a, b)
    answer = a.begin_generate(asked, n=200)
    servers.until(lambda status: status["pool"]["half_written"] > 0)
    a.kill()
    with pytest.raises(EngineFailed):
        answer.result()
    servers.until(lambda status: not status["flow"]["steps"] and not status["pool"]["pinned"])
    assert b.generate(asked).tokens == wanted
    a, b = servers.start(A, B)
    servers.loads_again(a, b)


def ask_over(fault: str, engine: Engine, asked: list[int], servers: Servers, *, in_a_load: bool) -> Answer:
    """Ask for a prompt of which the server fails, in its load or just before."""
    fail = servers.server.kill if fault == "killed" else servers.stop
    if in_a_load:
        request = engine.begin_generate(asked)
        servers.until(is_loading)
        fail()
        answer = request.result()
    else:
        fail()
        answer = engine.generate(asked)
    assert answer.took_s < PATIENCE_S
    return answer


def goes_on(fault: str, a: Engine, b: Engine, servers: Servers, settings: dict[str, object]) -> None:
    """While the server is away prompts are computed; when it is there again they are stored and loaded."""
    for engine in (b, a):
        engine.flush()
        computed = engine.generate(PROMPT)
        assert (computed.status, computed.tokens, computed.host) == (200, EXPECTED["llama"], 0)
        assert computed.took_s < PATIENCE_S
    if fault == "killed":
        servers.serve(**settings)
    else:
        servers.go_on()
    servers.attached(a, b)
    servers.loads_again(a, b)
    # What was under way has left nothing behind.
    servers.until(lambda status: not status["pool"]["pinned"] and not status["flow"]["steps"])


def told(answer: Answer) -> str:
    """For a line of figures."""
    return f"HTTP {answer.status}, {answer.host} loaded, {answer.took_s:.2f} s {answer.error[:200]}"
