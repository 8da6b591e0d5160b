"""Engine workers of whatever layerflow the ``PYTHONPATH`` of their process names, told what to do line by line.

They verify each byte that they load. Lines of JSON in, ``[method, engine, arguments]``, and out.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from e2e.known import KnownWorker, Run, small_spec

from layerflow.agent import Control, Follow, Hit
from layerflow.agent.lookups import Lookups

LAYERS, TOKENS = 4, 100
STEP_S = 20.0


class Worker:
    """One engine's: what it may be told, by name."""

    def __init__(self, endpoint: str, engine: str) -> None:
        spec = small_spec(LAYERS)
        self.known = KnownWorker(endpoint, spec, blocks=2048, engine=engine)
        self.control = Control(endpoint, engine, spec, lookup_timeout_s=5.0)
        self.lookups = Lookups(endpoint, engine, spec, timeout_s=20.0)
        self.lookups.wait_connected(20.0)

    def serve(self, seed: int, look: bool = True) -> dict[str, Any]:
        """Load what there is of a prompt, compute and save the rest."""
        chain = self.known.agent.chain(prompt(seed))
        return self._pass(self.known.admit(chain, look=look))

    def prefill(self, seed: int) -> dict[str, Any]:
        """Compute a prompt for a decoder."""
        chain, name = self.known.agent.chain(prompt(seed)), f"h{seed}"
        opened = self.control.open_handoff(name, chain, len(chain))
        told = self._pass(self.known.admit(chain, look=False))
        self.control.end_handoff(name, tokens=len(chain))
        return told | {"state": opened.state, "reason": opened.reason}

    def decode(self, seed: int, servers: Sequence[str] = ()) -> dict[str, Any]:
        """Load a prompt that another engine computes. :param servers: that keep its hand-off; none = its own."""
        chain, name = self.known.agent.chain(prompt(seed)), f"h{seed}"
        inquiry = self.lookups.ask(f"D-{seed}", chain, Follow(time.monotonic() + 15, name, tuple(servers)))
        hit = self.lookups.wait(inquiry, 20.0)
        hit = Hit(0, reason="no answer") if hit is None else self.lookups.take(inquiry, hit)
        made = self.known.admit(chain, look=False)
        told = self._pass(Run(f"D-{seed}", chain, hit, made.tables), save=False)
        self.lookups.release_handoff(name, servers)
        return told | {"reason": hit.reason}

    def attached(self) -> dict[str, Any]:
        """Is the server there?"""
        return {"attached": self.known.agent.attached}

    def status(self) -> dict[str, Any]:
        """What the server tells."""
        return dict(self.control.status(10.0))

    def close(self) -> None:
        """It leaves."""
        self.known.agent.close()
        self.control.close()
        self.lookups.close()

    def _pass(self, run: Run, save: bool = True) -> dict[str, Any]:
        with self.known.agent.open_step([run.request(save=save)], STEP_S) as step:
            wrong = self.known.forward(step, [run])
        ended = self.known.agent.wait_idle(run.name, STEP_S)
        if ended:
            self.known.retire(run)
        return {"hit": run.hit.tokens, "wrong": wrong, "failed": sorted(run.reasons), "ended": ended}


def prompt(seed: int) -> np.ndarray:
    """The same in every process."""
    return np.random.default_rng(seed).integers(0, 1 << 40, TOKENS)


def main() -> None:
    """Until the parent hangs up."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed, by the log for instance, is no answer
    workers: dict[str, Worker] = {}
    for line in sys.stdin:
        what, engine, arguments = json.loads(line)
        try:
            if what == "open":
                workers[engine] = Worker(engine=engine, **arguments)
                told: Any = {}
            elif what == "close":
                told = workers.pop(engine).close()
            else:
                told = getattr(workers[engine], what)(**arguments)
        except Exception as error:  # noqa: BLE001 - the parent says what may fail
            told = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    main()
