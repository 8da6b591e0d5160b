"""What runs in the engine processes that tests start and kill. Forked from a server that has torch loaded."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
import time
from typing import Any

import numpy as np
import torch

from e2e.fork_server import fork_server
from e2e.known import KnownWorker, Run, small_spec
from layerflow.agent import Follow

PIPE = multiprocessing.connection.Connection


class Child:
    """An engine process of its own, and the pipe to it.

    :param target: a function of this module that takes the pipe first.
    """

    def __init__(self, target: Any, *args: Any) -> None:
        context = fork_server([__name__], {})
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self, timeout_s: float = 60.0) -> Any:
        """What the child says next.

        :raises AssertionError: it says nothing in time.
        """
        assert self.pipe.poll(timeout_s), "the engine process says nothing"
        return self.pipe.recv()

    def kill(self) -> list[Any]:
        """SIGKILL; what the child has said before and nobody has heard."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        said = []
        with contextlib.suppress(EOFError):
            while self.pipe.poll():
                said.append(self.pipe.recv())
        self.pipe.close()
        return said

    def close(self) -> None:
        """Let it end, or make it."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


def tokens_of(seed: int, count: int) -> np.ndarray:
    """The same prompt in every process."""
    return np.random.default_rng(seed).integers(0, 1 << 40, count)


def save_for_ever(pipe: PIPE, endpoint: str, layers: int, tokens: int, first_seed: int, loaded: int) -> None:
    """Save one prompt after the other, each step also loading the prompt `loaded`, until killed."""
    torch.set_num_threads(1)
    worker = KnownWorker(endpoint, small_spec(layers), blocks=1024, engine="child")
    seed = first_seed
    while True:
        new = worker.admit(worker.agent.chain(tokens_of(seed, tokens)))
        old = worker.admit(worker.agent.chain(tokens_of(loaded, tokens)))
        with worker.agent.open_step([new.request(), old.request()]) as step:
            pipe.send(seed)
            worker.forward(step, [new, old])
        worker.agent.wait_idle(new.name, 20)
        worker.retire(new)
        worker.retire(old)
        seed += 1


def save_once(pipe: PIPE, endpoint: str, layers: int, tokens: int, seed: int) -> None:
    """Save one prompt, say so, and end when told."""
    torch.set_num_threads(1)
    with KnownWorker(endpoint, small_spec(layers), engine="first") as worker:
        run = worker.serve(worker.agent.chain(tokens_of(seed, tokens)))
        pipe.send((run.hit.tokens, worker.agent.poll().saved))
        pipe.recv()


def follow_all(pipe: PIPE, endpoint: str, layers: int, tokens: int, seeds: list[int]) -> None:
    """Open a step for each of these hand-offs, say so, and when told to go on, tell wrong bytes and failed requests."""
    torch.set_num_threads(1)
    worker = KnownWorker(endpoint, small_spec(layers), blocks=4096, engine="D", lookup_timeout_s=20.0)
    runs, steps = [], []
    for seed in seeds:
        chain = worker.agent.chain(tokens_of(seed, tokens))
        hit = worker.agent.lookup(f"D-{seed}", chain, Follow(time.monotonic() + 100, f"h{seed}"))
        made = worker.admit(chain, look=False)
        runs.append(Run(f"D-{seed}", chain, hit, made.tables))
        steps.append(worker.agent.open_step([runs[-1].request(save=False)], 100.0))
    pipe.send([run.hit.tokens for run in runs])
    pipe.recv()
    wrong = sum(worker.forward(step, [run]) for step, run in zip(steps, runs, strict=True))
    pipe.send((wrong, sum(bool(run.failed) for run in runs)))
    pipe.recv()
