"""Engines under load while something behind the server breaks: they save and load prompts and verify every byte."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from e2e.known import AFTER, KnownWorker, Run, eventually, small_spec
from layerflow.agent import Control
from layerflow.spec import ModelSpec

LAYERS, ROW, BLOCK, CHUNK, TOKENS = 8, 256, 4, 32, 250
PROMPT_BYTES = LAYERS * 2 * ROW * TOKENS
"""Of one prompt, 1 MB: 7 objects of 128 KiB and a partial one."""
BLOCKS = 2048
FETCH_S, SAVE_S, ANY_S = 0.002, 0.03, 0.2
"""How long bringing a prompt into the arena takes, how long computing and saving one, and longer than both."""
PATIENCE_S = 60.0
"""Of the engine that nothing may disturb: a load or lookup of it that fails has failed, and is not merely late."""
PAST_S = 1.5
"""A wait ends so long after its deadline at most, but for what this process stands still meanwhile. One that only ended
with its host would end later: a stopped host is killed after 3 s."""
STEADY_S = 2.5
"""So long a wait for what lies in the arena takes at most, likewise."""
WATCHED = 8
"""So many passes later the blocks of a failed load are looked at again, and given back."""


@dataclass
class Counts:
    """What an engine has seen. Times in seconds.

    :param late: of the passes that failed, those whose loads were not there by their deadline.
    :param worst_past: how long after its step's deadline a wait has ended, at worst; below 0 = before it. As in
        `worst_wait`, what this process stood still meanwhile is not counted.
    :param worst_wait_ended: how the longest wait has ended.
    :param wrong: bytes that a wait called ready and that are not the prompt's.
    :param changed: bytes of blocks reported failed that changed afterwards.
    :param stuck: passes whose transfers did not end.
    """

    passes: int = 0
    hits: int = 0
    misses: int = 0
    failed: int = 0
    late: int = 0
    watched: int = 0
    wrong: int = 0
    changed: int = 0
    stuck: int = 0
    worst_past: float = -1e9
    worst_wait: float = 0.0
    worst_wait_ended: str = ""
    worst_lookup: float = 0.0


class Stalls:
    """How long this process stands still, on a thread of its own: how late waits end that nothing keeps."""

    PERIOD_S = 0.02

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._found: list[tuple[float, float]] = []
        self._due = time.monotonic() + self.PERIOD_S
        self._thread = threading.Thread(target=self._watch, name="test-stalls", daemon=True)
        self._thread.start()

    def within(self, begin: float, end: float) -> float:
        """Seconds of that time in which it stood still. It may have woken this thread first."""
        stalls = (*self._found, (self._due, time.monotonic()))
        return sum(max(0.0, min(end, last) - max(begin, first)) for first, last in stalls)

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self.PERIOD_S):
            now = time.monotonic()
            if now - self._due > self.PERIOD_S:
                self._found.append((self._due, now))
            self._due = now + self.PERIOD_S


class Engine:
    """An engine worker on a thread of its own: one prompt after the other, until stopped.

    :param window: see :func:`known_spec`.
    :param kept: prompts that it keeps pinned in the arena, once they are there, by lookups that it never loads.
    :param seeds: the next prompt's number, given how many passes there were; equal numbers are equal prompts.
    :param step_timeout_s: the deadline of each step's loads.
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        seeds: Callable[[int], int],
        step_timeout_s: float,
        lookup_timeout_s: float,
        window: int,
        stalls: Stalls,
        kept: Sequence[int] = (),
    ) -> None:
        self.counts = Counts()
        self.worker = KnownWorker(endpoint, known_spec(window), BLOCKS, name, lookup_timeout_s=lookup_timeout_s)
        self.stored: deque[int] = deque(maxlen=4096)  #: the prompts whose passes ended well
        self.hit = threading.Event()  #: set at every hit, whose objects may have to be fetched from now on
        self.miss = threading.Event()  #: set at every miss, after which everything is computed and saved
        self._seeds, self._step_timeout_s, self._stalls = seeds, step_timeout_s, stalls
        self._failed: deque[Run] = deque()
        self._kept = {f"kept-{seed}": self.worker.agent.chain(prompt(seed)) for seed in kept}
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"test-{name}", daemon=True)
        self._thread.start()

    def stop(self) -> Counts:
        """End it after the pass that is under way.

        :raises AssertionError: something in it has failed.
        """
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the engine's thread hangs"
        while self._failed:
            self._look_again()
        for name in self._kept:
            self.worker.agent.drop_lease(name)
        self.worker.agent.close()
        if self._error is not None:
            raise AssertionError("the engine's thread failed") from self._error
        return self.counts

    def more(self, passes: int = 1, timeout_s: float = 30.0) -> bool:
        """Wait for so many more passes."""
        goal = self.counts.passes + passes
        return eventually(lambda: self.counts.passes >= goal or self._error is not None, timeout_s)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if self.worker.agent.wait_attached(0.1):
                    self._pass(self._seeds(self.counts.passes))
        except BaseException as error:  # noqa: BLE001 - told by stop()
            self._error = error

    def _pass(self, seed: int) -> None:
        worker, counts = self.worker, self.counts
        for name, kept in self._kept.items():
            worker.agent.lookup(name, kept)
        chain = worker.agent.chain(prompt(seed))
        began = time.monotonic()
        run = worker.admit(chain)
        counts.worst_lookup = max(counts.worst_lookup, time.monotonic() - began)
        counts.hits += run.hit.tokens > 0
        counts.misses += run.hit.tokens == 0
        (self.hit if run.hit.tokens else self.miss).set()
        step = worker.agent.open_step([run.request()], self._step_timeout_s)
        for layer in range(LAYERS):
            began = time.monotonic()
            outcome = step.wait_layer(layer)
            ended = time.monotonic()
            stalled = self._stalls.within(began, ended)
            if ended - began - stalled > counts.worst_wait:
                counts.worst_wait = ended - began - stalled
                counts.worst_wait_ended = outcome.failed[0].reason if outcome.failed else "ready"
            counts.worst_past = max(counts.worst_past, ended - stalled - getattr(step, "deadline", ended))
            worker.note([run], outcome)
            if run.failed:
                break
            counts.wrong += worker.wrong_bytes(run, layer, worker.readable(run, layer), run.hit.tokens)
            worker.compute(run, layer, run.hit.tokens, len(chain))
            step.layer_done(layer)
        for group, blocks in run.failed.items():
            for layer in worker.spec.groups[group].layers:
                worker.fill(run, layer, sorted(blocks), AFTER)
        step.close(False if run.failed else None)
        ended_well = worker.agent.wait_idle(run.name, 30)
        counts.stuck += not ended_well
        if run.failed:
            counts.failed += 1
            counts.late += all("deadline" in reason for reason in run.reasons)
            self._failed.append(run)
            if len(self._failed) > WATCHED:
                self._look_again()
        elif ended_well:
            self.stored.append(seed)
            worker.retire(run)
        counts.passes += 1

    def _look_again(self) -> None:
        run = self._failed.popleft()
        self.counts.watched += 1
        for group, blocks in run.failed.items():
            for layer in self.worker.spec.groups[group].layers:
                self.counts.changed += self.worker.changed_bytes(run, layer, blocks, AFTER)
        self.worker.retire(run)


class Load:
    """Two engines at one server: a `busy` one that saves and loads more than the arena holds, and a `steady` one with
    prompts that stay in it, pinned, which waits as long as it takes.

    :param recent: the busy one asks for so many prompts again.
    :param step_timeout_s: the deadline of each of the busy one's steps.
    :param window: of their sliding layers, in tokens; 0 = they have none.
    """

    def __init__(self, endpoint: str, *, recent: int = 40, step_timeout_s: float = 5.0, window: int = 0) -> None:
        dice = random.Random(1)
        fresh = 0

        def busy(_: int) -> int:
            nonlocal fresh
            if fresh < 4 or dice.random() < 0.3:
                fresh += 1
                return fresh
            return dice.randrange(max(1, fresh - recent), fresh + 1)

        self._dice, self._never = random.Random(7), threading.Event()
        self.control = Control(endpoint, "observer")
        self._stalls = Stalls()
        self.busy = Engine(endpoint, "busy", busy, step_timeout_s, 0.5, window, self._stalls)
        self.steady = Engine(
            endpoint, "steady", lambda passes: -1 - passes % 2, PATIENCE_S, PATIENCE_S, window, self._stalls, (-1, -2)
        )
        assert self.steady.more(4), "nothing is served"
        self._settled = (self.steady.counts.misses, self.steady.counts.failed)

    def tier(self) -> dict[str, Any]:
        """The server's word on what lies behind the arena."""
        found: dict[str, Any] = self.control.status(10)["tier"]
        return found

    def up(self) -> bool:
        """Can it be used?"""
        return bool(self.tier()["up"])

    def flows(self, timeout_s: float = 30.0) -> None:
        """Wait until objects both come and go.

        :raises AssertionError: they do not.
        """
        before = self.tier()

        def both() -> bool:
            now = self.tier()
            return all(now[name] > before[name] for name in ("written_objects", "fetched_objects"))

        assert eventually(both, timeout_s, 0.02), self.tier()

    def random_moment(self) -> None:
        """Wait until some time: often while objects are being fetched, often while they are being saved."""
        engine = self.busy
        event, within_s = self._dice.choice(((engine.hit, FETCH_S), (engine.miss, SAVE_S), (engine.miss, ANY_S)))
        self.soon_after(event, within_s)

    def soon_after(self, event: threading.Event, within_s: float) -> None:
        """Wait until a random time after the busy engine's next hit or miss."""
        event.clear()
        assert event.wait(30), "nothing happens"
        self._never.wait(within_s * self._dice.random())

    def stop(self) -> tuple[Counts, Counts]:
        """What the busy and the steady engine have seen; asserts what must hold in every campaign.

        :raises AssertionError: a byte was wrong, a transfer never ended, a wait long after its deadline, or the steady
            engine has waited for what lies in the arena.
        """
        busy, steady = self.busy.stop(), self.steady.stop()
        self.control.close()
        self._stalls.stop()
        for counts in (busy, steady):
            assert counts.wrong == 0, f"{counts.wrong} wrong bytes"
            assert counts.changed == 0, f"{counts.changed} bytes changed after their load had failed"
            assert counts.stuck == 0, f"{counts.stuck} passes never ended"
            assert counts.worst_past < PAST_S, counts
        assert steady.worst_wait < STEADY_S, steady
        return busy, steady

    def undisturbed(self) -> None:
        """Since the start the steady engine has hit every time, and every wait of it was ready.

        :raises AssertionError: not so.
        """
        counts = self.steady.counts
        assert (counts.misses, counts.failed) == self._settled, counts


@contextmanager
def load(endpoint: str, **more: Any) -> Iterator[Load]:
    """A load that is stopped at the end, whatever happens."""
    it = Load(endpoint, **more)
    try:
        yield it
    finally:
        for engine in (it.busy, it.steady):
            engine._stop.set()
        it.stop()


def known_spec(window: int = 0) -> ModelSpec:
    """What the engines cache; with a window, every other layer slides."""
    return small_spec(LAYERS, BLOCK, CHUNK, ROW, window)


def prompt(seed: int) -> np.ndarray:
    """The same tokens for the same number."""
    return np.random.default_rng(abs(seed) * 2 + (seed < 0)).integers(0, 1 << 40, TOKENS)
