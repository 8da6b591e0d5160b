"""A prefill engine's end is told as soon as its connection breaks."""

from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Iterator

import pytest

from layerflow.connectors.sglang.pd.prefill_watch import PrefillWatch

WAIT_S = 30.0
RANK = """
import sys, zmq
socket = zmq.Context().socket(zmq.PULL)
print(socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
sys.stdin.read()
"""


class Rank:
    """A process that listens as a prefill engine's rank does."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.endpoint = f"tcp://127.0.0.1:{int(self.process.stdout.readline())}"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    ranks = [Rank(), Rank()]
    yield ranks
    for rank in ranks:
        rank.kill()


@pytest.fixture
def told() -> queue.SimpleQueue[str]:
    return queue.SimpleQueue()


@pytest.fixture
def watch(told: queue.SimpleQueue[str]) -> Iterator[PrefillWatch]:
    watch = PrefillWatch(told.put)
    yield watch
    watch.close()


def test_the_end_of_one_engine_is_told_and_not_that_of_others(
    watch: PrefillWatch, told: queue.SimpleQueue[str], ranks: list[Rank]
) -> None:
    first, second = ranks
    for _ in range(3):  # each request asks
        watch.watch("first:1", [first.endpoint])
        watch.watch("second:2", [second.endpoint])
    first.kill()
    assert told.get(timeout=WAIT_S) == "first:1"
    second.kill()
    assert told.get(timeout=WAIT_S) == "second:2"
    assert told.empty()
    assert not len(watch)


def test_an_engine_that_ended_before_it_was_watched(watch: PrefillWatch, told: queue.SimpleQueue[str]) -> None:
    gone = Rank()
    gone.kill()
    for _ in range(2):
        watch.watch("gone:1", [gone.endpoint])
        assert told.get(timeout=WAIT_S) == "gone:1"


def test_who_is_told_may_raise(ranks: list[Rank]) -> None:
    heard = queue.SimpleQueue[str]()

    def lost(engine: str) -> None:
        heard.put(engine)
        raise ValueError(engine)

    watch = PrefillWatch(lost)
    try:
        for number, rank in enumerate(ranks):
            watch.watch(str(number), [rank.endpoint])
        for number, rank in enumerate(ranks):
            rank.kill()
            assert heard.get(timeout=WAIT_S) == str(number)
    finally:
        watch.close()
