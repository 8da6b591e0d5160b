"""vLLM-Ascend's order of hooks, replayed: earlier word of a layer's writes, and passes that wait for no layer.

Its order is that of vllm_ascend/attention/{attention_v1,mla_v1,sfa_v1,dsa_v1}.py; its tensors are played by the CPU's.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_vllm_reset import HIT, TOKENS, World, step, world  # noqa: F401  the fixture

from layerflow.agent import Step, StepRequest
from layerflow.agent.descriptors import describe_loads
from layerflow.connectors.vllm.layout import _planes
from layerflow.connectors.vllm.plan import StepPlan
from layerflow.connectors.vllm.worker.outcome import all_failed


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each layer was told to be done."""
    told: Counter[int] = Counter()
    layer_done = Step.layer_done

    def counted(self: Step, layer: int, event: object = None) -> None:
        told[layer] += 1
        layer_done(self, layer, event)

    monkeypatch.setattr(Step, "layer_done", counted)
    return told


@pytest.mark.parametrize("named", [True, False], ids=["latent attention", "plain attention"])
def test_a_layer_is_saved_from_its_write_on(world: World, done: Counter[int], named: bool) -> None:  # noqa: F811
    run = world.worker.admit(world.worker.prompt(TOKENS))
    world.side.wait_layer(next(reversed(world.names)))  # of the pass before
    step(world.side, world.saving(run))
    world.side.layer_written("")  # before any layer: none is meant
    assert not done
    for name, layer in world.names.items():
        world.side.wait_layer(name)
        world.worker.compute(run, layer, 0, TOKENS)
        world.side.layer_written(name if named else "")
        assert done[layer] == 1, "its attention comes only now"
        world.side.layer_done(name)  # save_kv_layer
        assert done[layer] == 1, "the event of the write is not replaced by a later one"
    world.side.end()
    assert world.found(run) == TOKENS - 1


def test_a_cache_that_another_layer_writes_is_done_at_the_end(world: World, done: Counter[int]) -> None:  # noqa: F811
    """KV sharing: such a layer reports no write."""
    run = world.worker.admit(world.worker.prompt(TOKENS))
    step(world.side, world.saving(run))
    for name, layer in world.names.items():
        world.side.wait_layer(name)
        world.worker.compute(run, layer, 0, TOKENS)
        if layer % 2:
            world.side.layer_written("")
    world.side.end()
    assert sorted(done) == list(world.names.values())
    assert world.found(run) == TOKENS - 1


def loading(world: World) -> Any:  # noqa: F811
    """A pass that loads most of a prompt and computes a token or two."""
    run = world.stored()
    asked = StepRequest(run.name, run.chain, run.tables, (0, HIT), run.hit)
    step(world.side, StepPlan(loads=describe_loads(world.worker.spec, [asked])))
    world.side.wait_tails()
    return run


@pytest.mark.parametrize("by_layer", [True, False])
def test_where_no_layer_asks_all_are_there_before_the_first(world: World, by_layer: bool) -> None:  # noqa: F811
    run = loading(world)
    decodes = SimpleNamespace(num_prefills=0)
    world.side.wait_unasked(dict.fromkeys(world.names, decodes) if by_layer else decodes)
    for name, layer in world.names.items():
        assert world.worker.wrong_bytes(run, layer, 0, HIT) == 0
        world.side.layer_done(name)
    world.side.end()
    assert not world.side.failed_blocks()


@pytest.mark.parametrize("metadata", [SimpleNamespace(num_prefills=1), SimpleNamespace(), None])
def test_where_layers_ask_the_first_waits_for_itself_only(
    world: World,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    metadata: Any,
) -> None:
    run = loading(world)
    with monkeypatch.context() as patch:
        patch.setattr(Step, "wait_all", lambda _: pytest.fail("layers are waited for one by one"))
        world.side.wait_unasked({"layer.0": metadata})
        for name, layer in world.names.items():
            world.side.wait_layer(name)
            assert world.worker.wrong_bytes(run, layer, 0, HIT) == 0
            world.side.layer_written("")
        world.side.end()


def test_a_failed_load_of_such_a_pass_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    run = loading(world)
    monkeypatch.setattr(Step, "wait_all", lambda step: all_failed(step.loads, "it is gone"))
    world.side.wait_unasked(SimpleNamespace(num_prefills=0))
    assert world.side.failed_blocks() == set(run.tables[0][: HIT // world.worker.block_size].tolist())


def test_keys_and_values_in_tensors_of_their_own() -> None:
    """Registered as a tuple: a plane each; a latent cache as a tuple of one or three, a lone tensor as itself."""
    spec = type("FullAttentionSpec", (), {"block_size": 8})()
    keys, values = torch.zeros((6, 8, 2, 16), dtype=torch.bfloat16), torch.zeros((6, 8, 2, 24), dtype=torch.bfloat16)
    key_blocks, value_blocks = _planes("l", spec, (keys, values), 6)
    assert (key_blocks.shape, value_blocks.shape) == ((6, 8, 64), (6, 8, 96))
    key_blocks[4] = 1
    assert keys[4].view(torch.uint8).eq(1).all()
    assert not keys[:4].any() and not keys[5].any() and not values.any()
    latent = tuple(torch.zeros((6, 8, 1, width), dtype=torch.int8) for width in (512, 64, 128))
    assert [plane.shape[2] for plane in _planes("l", spec, latent, 6)] == [512, 64, 128]
    assert [plane.shape[2] for plane in _planes("l", spec, latent[:1], 6)] == [512]
    assert len(_planes("l", spec, keys, 6)) == 1
