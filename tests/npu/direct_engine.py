"""An engine worker in a process of its own: paged memory on an (emulated) npu, known bytes, bytes past the arena.

Run as a script: it does what it is told on the pipe whose descriptor is its first argument, and answers.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from e2e.known import POISON, eventually, kv_bytes, small_spec

from layerflow.agent import MISS, Agent, Hit, StepRequest
from layerflow.keys import Chain

TESTS = Path(__file__).resolve().parents[1]

LAYERS, ROW, BLOCKS = 6, 64, 48
PATIENCE_S = 20.0


def tokens_of(seed: int, count: int) -> np.ndarray:
    """The same prompt in every process."""
    return np.random.default_rng(seed).integers(0, 1 << 40, count)


class Engine:
    """A worker whose memory is expected, byte by byte, to be what `mirror` says."""

    def __init__(self, endpoint: str, device: str = "npu:0") -> None:
        self.spec = small_spec(LAYERS, row=ROW)
        self.size = self.spec.groups[0].block_size
        shape = (BLOCKS, self.size, ROW)
        self.mirror = {(layer, plane): np.full(shape, POISON, np.uint8) for layer in range(LAYERS) for plane in "kv"}
        self.tensors = {
            layer: {plane: torch.empty(shape, dtype=torch.uint8, device=device) for plane in "kv"}
            for layer in range(LAYERS)
        }
        for layer in range(LAYERS):
            self._upload(layer)
        self.agent = Agent(endpoint, self.spec, self.tensors, f"engine on {device}", wait_s=PATIENCE_S)
        self._step: Any = None
        self._number = 0

    def direct(self) -> bool:
        """Does the agent bypass the arena?"""
        return self.agent.wait_attached(PATIENCE_S) and self.agent.direct

    def hit(self, seed: int, count: int) -> int:
        """Tokens that can be loaded."""
        return self.agent.lookup("look", self._chain(seed, count)).tokens

    def begin(self, seed: int, count: int, first: int = 0, layers: int = LAYERS) -> None:
        """Compute a prompt into blocks from `first` on and save it; so many layers, the step stays open.

        Returns when the step has got its room in the pool, or has been refused it.
        """
        chain, name = self._chain(seed, count), self._name()
        table = first + np.arange(-(-count // self.size))
        self._step = self.agent.open_step([StepRequest(name, chain, (table,), save=(0, count), tail=True)])
        self._name_of_step = name
        for layer in range(layers):
            assert self._step.wait_layer(layer)
            self._expect(chain, layer, table, 0, count)
            self._upload(layer)
            self._step.layer_done(layer)
        assert eventually(lambda: self._step.announced, PATIENCE_S, 0.001)

    def end(self) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        """End the step that was begun: what was saved and what was not."""
        self._step.close()
        assert self.agent.wait_idle(self._name_of_step, PATIENCE_S)
        ended = self.agent.poll()
        return ended.saved, ended.failed_saves

    def save(self, seed: int, count: int, first: int = 0) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        """All of a step that saves a prompt."""
        self.begin(seed, count, first)
        return self.end()

    def load(self, seed: int, count: int, first: int, step: int = 1, trust: int = 0) -> dict[str, Any]:
        """Load what can be had of a prompt into every `step`-th block from `first` on.

        :param trust: tokens of a hit that was found earlier; 0 = look now.
        """
        chain, name = self._chain(seed, count), self._name()
        hit = self.agent.lookup(name, chain)
        if trust:
            hit = Hit(trust)
        if hit == MISS:
            return {"hit": 0}
        table = first + step * np.arange(-(-count // self.size))
        request = StepRequest(name, chain, (table,), load=(0, hit.tokens), hit=hit)
        with self.agent.open_step([request]) as opened:
            outcomes = [opened.wait_layer(layer) for layer in range(LAYERS)]
        bad = {number for failed in outcomes[-1].failed for number in failed.blocks}
        for layer in range(LAYERS):
            # Whole blocks come: the last one may hold tokens beyond the hit.
            self._expect(chain, layer, table, 0, min(count, -(-hit.tokens // self.size) * self.size), but=bad)
        assert self.agent.wait_idle(name, PATIENCE_S)
        return {"hit": hit.tokens, "failed": sorted(bad), "ready": [bool(outcome) for outcome in outcomes]}

    def wrong(self, but: list[int] | None = None) -> list[tuple[int, str, int]]:
        """Layer, plane and block where device memory is not as expected, `but` blocks left out."""
        if self.tensors[0]["k"].device.type == "npu":
            torch.npu.synchronize()
        kept = np.ones(BLOCKS, bool)
        kept[but or []] = False
        return [
            (layer, plane, int(block))
            for (layer, plane), expected in self.mirror.items()
            for block in np.flatnonzero((self.tensors[layer][plane].cpu().numpy() != expected).any((1, 2)) & kept)
        ]

    def begin_load(self, seed: int, count: int, timeout_s: float) -> bool:
        """Open a step that loads a prompt; returns when its objects are leased. Was there a hit?"""
        chain = self._chain(seed, count)
        hit = self.agent.lookup("load", chain)
        table = np.arange(-(-count // self.size))
        request = StepRequest("load", chain, (table,), load=(0, hit.tokens), hit=hit)
        self._step = self.agent.open_step([request], timeout_s)
        return hit.tokens > 0 and eventually(lambda: self._step.announced, timeout_s, 0.01)

    def abort(self) -> bool:
        """Give the request of the step that was begun up; has it been released in time?"""
        self.agent.abort(self._name_of_step)
        self._step.close(False)
        return self.agent.wait_idle(self._name_of_step, PATIENCE_S)

    def blocks_of(self, tokens: int) -> int:
        """How many hold so many tokens."""
        return -(-tokens // self.size)

    def statistics(self) -> dict[str, int]:
        """Of the agent."""
        told = self.agent.statistics()
        return {"loaded": told.loaded_bytes, "saved": told.saved_bytes, "failed": told.failed_batches}

    def interrupted(self) -> str:
        """What this process's own handler makes of a SIGTERM."""
        heard: list[int] = []
        previous = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
        os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, previous)
        return signal.Signals(heard[0]).name

    def close(self) -> None:
        """Close the agent."""
        self.agent.close()

    def _chain(self, seed: int, count: int) -> Chain:
        return self.agent.chain(tokens_of(seed, count))

    def _name(self) -> str:
        self._number += 1
        return f"request-{self._number}"

    def _expect(
        self, chain: Chain, layer: int, table: np.ndarray, start: int, stop: int, but: set[int] = frozenset()
    ) -> None:
        for plane, name in enumerate("kv"):
            rows = kv_bytes(chain.tokens, layer, plane, ROW)[start:stop]
            for at, row in enumerate(rows, start):
                if at // self.size not in but:
                    self.mirror[layer, name][table[at // self.size], at % self.size] = row

    def _upload(self, layer: int) -> None:
        for plane in "kv":
            self.tensors[layer][plane].copy_(torch.from_numpy(self.mirror[layer, plane]))


class Remote:
    """An :class:`Engine` in a child, called by name: ``engine.save(1, 64)``."""

    def __init__(self, endpoint: str, environment: dict[str, str], device: str = "npu:0") -> None:
        ours, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in leave()
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), endpoint, device],
            pass_fds=[theirs.fileno()],
            env=os.environ | environment | {"PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])},
            stdout=self.log,
            stderr=self.log,
        )
        theirs.close()
        self._pipe = Connection(ours.detach())

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            self._pipe.send((name, arguments, more))
            return self.answer()

        return call

    def answer(self) -> Any:
        try:
            assert self._pipe.poll(60), f"the engine says nothing; {self.said()}"
            failed, answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise AssertionError(f"the engine has ended: {self.process.wait()}; {self.said()}") from None
        assert not failed, answer
        return answer

    def said(self) -> str:
        """The end of what it printed."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-4000:]

    def wait(self, timeout_s: float) -> int:
        """Until it ends by itself; its exit code."""
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def leave(self) -> int:
        """In peace; its exit code."""
        if self.process.poll() is None:
            self._pipe.close()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        code = self.process.wait()
        self.log.close()
        return code


def main() -> None:
    importlib.import_module("torch_npu")
    torch.set_num_threads(1)
    pipe = Connection(int(sys.argv[1]))
    engine = Engine(sys.argv[2], sys.argv[3])
    while True:
        try:
            name, arguments, more = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((False, getattr(engine, name)(*arguments, **more)))
        except Exception as error:  # noqa: BLE001 - it is the test's
            pipe.send((True, repr(error)))
    engine.agent.close()


if __name__ == "__main__":
    main()
