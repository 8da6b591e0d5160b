"""Engine processes that save at the test's pace, to be killed."""

from __future__ import annotations

import torch
from e2e.children import PIPE, tokens_of
from e2e.known import KnownWorker, small_spec


def save_at_pace(pipe: PIPE, endpoint: str, layers: int, content: str, tokens: int, seed: int) -> None:
    """Save one prompt: a word to the test before each layer and after the last, and one back before going on."""
    torch.set_num_threads(1)
    with KnownWorker(endpoint, small_spec(layers, content=content), engine="writer") as worker:
        run = worker.admit(worker.agent.chain(tokens_of(seed, tokens)), look=False)
        with worker.agent.open_step([run.request()]) as step:
            for layer in range(layers):
                pipe.send(layer)
                pipe.recv()
                step.wait_layer(layer)
                worker.compute(run, layer, 0, tokens)
                step.layer_done(layer)
            pipe.send(layers)
            pipe.recv()
        worker.agent.wait_idle(run.name, 20)
        pipe.send("saved")
        pipe.recv()
