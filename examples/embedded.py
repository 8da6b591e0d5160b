"""Save a prompt's KV and load it back, with the server embedded in this process.

    python examples/embedded.py

The "engine" below computes nothing: it fills blocks of its paged tensors with known bytes, lets the
agent save them while the layers go by, and loads them into other blocks.
"""

from __future__ import annotations

import numpy as np
import torch

from layerflow import Agent, EmbeddedServer, GroupSpec, ModelSpec, Plane, Settings, StepRequest

LAYERS, BLOCKS, BLOCK_SIZE = 4, 64, 16
PROMPT = list(range(300))  # one full chunk of 256 tokens and a partial tail of 44


def main() -> None:
    # 1. What this worker caches. `content` changes whenever the weights do.
    planes = (Plane("k", "float16", (2, 64)), Plane("v", "float16", (2, 64)))
    group = GroupSpec("full", BLOCK_SIZE, tuple(range(LAYERS)), planes)
    spec = ModelSpec("example", content="example-weights-1", groups=(group,), attention="example/NHD")
    # 2. The engine's paged cache: (num_blocks, block_size, *plane.shape) per layer and plane.
    shape = (BLOCKS, BLOCK_SIZE, 2, 64)
    tensors = {
        layer: {plane.name: torch.zeros(shape, dtype=torch.float16) for plane in planes} for layer in range(LAYERS)
    }
    settings = Settings(pool={"size": "64MiB"})
    with (
        EmbeddedServer(settings) as server,
        # An engine does not wait long for a lookup: it computes instead. Here nothing else can be done.
        Agent(server.endpoint, spec, tensors, context=server.context, lookup_timeout_s=10.0) as agent,
    ):
        chain = agent.chain(PROMPT)
        needed = -(-len(PROMPT) // BLOCK_SIZE)

        # 3. A first request: nothing is known yet, so everything is computed and saved.
        assert agent.lookup("first", chain).tokens == 0
        first = np.random.default_rng(0).permutation(BLOCKS // 2)[:needed].astype(np.int64)
        request = StepRequest("first", chain, (first,), save=(0, len(PROMPT)), tail=True)
        with agent.open_step([request]) as step:
            for layer in range(LAYERS):
                step.wait_layer(layer)
                for number, plane in enumerate(planes):
                    tensors[layer][plane.name][first] = torch.randn(needed, *shape[1:]).half() + number
                step.layer_done(layer)
        assert agent.wait_idle("first", 10), "the save did not end"
        assert agent.poll().saved, "the save was given up"

        # 4. A second request with the same prompt: all but its last token is loaded, into other blocks.
        hit = agent.lookup("second", chain)
        assert hit.tokens == len(PROMPT) - 1
        second = np.arange(BLOCKS // 2, BLOCKS // 2 + needed, dtype=np.int64)
        with agent.open_step([StepRequest("second", chain, (second,), load=(0, hit.tokens), hit=hit)]) as step:
            for layer in range(LAYERS):
                outcome = step.wait_layer(layer)
                assert outcome.ready, f"recompute these blocks: {outcome.failed}"
                for planes_of_layer in tensors[layer].values():
                    rows = [planes_of_layer[blocks].flatten(0, 1)[: hit.tokens] for blocks in (first, second)]
                    assert torch.equal(*rows), f"layer {layer} came back changed"
                step.layer_done(layer)
        assert agent.wait_idle("second", 10)
        print(f"loaded {hit.tokens} tokens, {agent.statistics().loaded_bytes} bytes, all as they were saved")


if __name__ == "__main__":
    main()
