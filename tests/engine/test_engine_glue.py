import dataclasses
from pathlib import Path

import pytest
import torch
from fake_agent import FakeAgent, FakePool, hit_of

import layerflow_engine.glue
from layerflow_engine import Engine
from layerflow_engine.config import GQA, HYBRID, MLA, TINY_COMPRESSED, TINY_GQA, TINY_HYBRID, TINY_MLA, model_spec
from layerflow_engine.glue import LayerflowConnection
from layerflow_engine.texts import passage

TINY = pytest.mark.parametrize(
    "config", [TINY_GQA, TINY_MLA, TINY_HYBRID, TINY_COMPRESSED], ids=lambda config: config.name
)
CHUNK = 64
ANSWER = 6


def connected(config, pool=None, mode="layerwise", **hostile):
    engine = Engine(config)
    agent = FakeAgent(
        model_spec(config, engine.model.weights, CHUNK), engine.cache.tensors, pool or FakePool(), **hostile
    )
    engine.connect(LayerflowConnection(agent, mode))
    return engine, agent


def answer(engine, *prompts, tokens=ANSWER):
    results = engine.generate(prompts, tokens)
    engine.drain(5)
    return results


@TINY
@pytest.mark.parametrize("mode", ["layerwise", "bulk"])
def test_a_hit_gives_the_cold_answer_and_the_cold_bytes(config, mode):
    prompt, longer = passage(229), passage(229) + passage(150, 4000)
    pool = FakePool()
    first, _ = connected(config, pool)
    cold = answer(first, prompt)[0]
    second, _ = connected(config, pool, mode)
    hit = answer(second, prompt)[0]
    assert (cold.cached_tokens, hit.cached_tokens) == (0, hit_of(config, 229, 229))
    assert hit.tokens == cold.tokens == Engine(config).generate([prompt], ANSWER)[0].tokens

    # Whatever the hit run stores of a longer prompt, loaded and computed bytes mixed, a cold run stores too.
    warm = answer(second, longer)[0]
    fresh, other = connected(config)
    assert warm.tokens == answer(fresh, longer)[0].tokens
    assert warm.cached_tokens == hit_of(config, 229, 379)
    assert other.pool.objects
    for key, (_, stored) in other.pool.objects.items():
        for place, rows in stored.items():
            mine = pool.objects[key][1][place]
            assert torch.equal(mine.view(torch.uint8), rows.view(torch.uint8)), place


@TINY
@pytest.mark.parametrize("tokens", [1, 7, 8, 63, 64, 65, 128, 129, 160, 191])
def test_every_length_of_a_shared_prefix_gives_the_cold_answer(config, tokens):
    prompt = passage(192, 700)
    engine, _ = connected(config)
    answer(engine, prompt[:tokens])
    result = answer(engine, prompt)[0]
    assert result.cached_tokens == hit_of(config, tokens, 192)
    assert result.tokens == Engine(config).generate([prompt], ANSWER)[0].tokens


@TINY
def test_every_plane_of_every_layer_matters(config):
    # The answer must see the window of a hit that ends with a chunk, and the rows that its states become part of.
    prompt = passage(208 if config.packed else 230)
    engine, agent = connected(config)
    cold = said(engine, prompt)
    assert torch.equal(said(connected(config, agent.pool)[0], prompt), cold)
    planes = [(layer, name) for layer in agent.tensors for name in agent.tensors[layer]]
    for place in planes:
        spoiled = FakePool(
            {
                key: (numbers, stored | {place: torch.zeros_like(stored[place])} if place in stored else stored)
                for key, (numbers, stored) in agent.pool.objects.items()
            },
            agent.pool.tails,
        )
        assert (said(connected(config, spoiled)[0], prompt) - cold).abs().max() > 1e-3, place


def said(engine, prompt):
    """Logits of the first 8 tokens of an answer."""
    logits, forward = [], engine.model.forward

    def heard(*args):
        out = forward(*args)
        logits.extend(out.logits.values())
        return out

    engine.model.forward = heard
    answer(engine, prompt, tokens=8)
    return torch.stack(logits)


@TINY
@pytest.mark.parametrize("mode", ["layerwise", "bulk"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_failed_load_is_computed_instead(config, layer, mode):
    prompts = [passage(150), passage(150, 5000)]
    engine, agent = connected(config)
    cold = [result.tokens for result in answer(engine, *prompts)]
    agent.fail = lambda request, at: request == "request-2" and at == layer
    failing, healthy = answer(engine, *prompts)
    assert [failing.tokens, healthy.tokens] == cold
    assert (failing.restarts, failing.cached_tokens) == (1, 0)
    whole = hit_of(config, 150, 150)
    assert (healthy.restarts, healthy.cached_tokens) == (0, whole)
    assert "request-2" in agent.aborted  # so that nothing computed from missing bytes is published
    assert [result.cached_tokens for result in answer(engine, *prompts)] == [whole, whole]


def test_a_request_whose_loads_always_fail_is_computed_in_the_end():
    config, prompt = TINY_HYBRID, passage(300)
    engine, agent = connected(config)
    cold = answer(engine, prompt)[0].tokens
    stored = dict(agent.pool.objects)

    def fail(request, layer):
        agent.pool.objects.update(stored)  # a pool that forgets to hide what it could not read
        return True

    agent.fail = fail
    agent.pool.objects.update(stored)
    original = agent.lookup

    def lookup(request, chain):
        agent.pool.objects.update(stored)
        return original(request, chain)

    agent.lookup = lookup
    result = answer(engine, prompt)[0]
    assert result.tokens == cold
    assert result.restarts == 3


@TINY
def test_blocks_are_not_reused_while_saves_still_read_them(config):
    # Saves read engine memory only after several more steps; a block given away early would be stored wrong.
    tight = dataclasses.replace(config, num_blocks=140 if config.packed else 75)
    prompts = [passage(260, 900 * index) for index in range(5)]
    engine, agent = connected(tight, delay=12)
    answer(engine, *prompts)
    warm, _ = connected(config, agent.pool)
    results = answer(warm, *prompts)
    assert [result.cached_tokens for result in results] == [hit_of(config, 260, 260)] * 5
    assert [r.tokens for r in results] == [r.tokens for r in Engine(config).generate(prompts, ANSWER)]


def test_an_aborted_request_returns_its_blocks_only_when_quiet():
    engine, agent = connected(TINY_HYBRID, delay=2)
    free = [allocator.free for allocator in engine.cache.allocators]
    engine.submit(passage(300), 4, "gone")
    engine.step()
    engine.abort("gone")
    assert engine.results["gone"].aborted
    assert [allocator.free for allocator in engine.cache.allocators] != free
    with pytest.raises(ValueError, match="still on its way"):
        engine.submit("x", 1, "gone")
    engine.drain(5)
    assert [allocator.free for allocator in engine.cache.allocators] == free
    assert [allocator.unpromised for allocator in engine.cache.allocators] == free
    assert not agent.pool.objects


def test_answers_are_neither_loaded_nor_saved():
    engine, agent = connected(TINY_GQA)
    answer(engine, passage(100))
    assert [asked.save for asked in agent.opened] == [(0, 100)]
    assert agent.opened[0].tail


def test_bulk_waits_for_every_layer_before_the_first_and_layerwise_for_each_in_turn():
    prompt, layers = passage(100), range(TINY_GQA.num_layers)
    pool = FakePool()
    answer(connected(TINY_GQA, pool)[0], prompt)
    for mode in ("layerwise", "bulk"):
        engine, agent = connected(TINY_GQA, pool, mode)
        answer(engine, prompt)
        before = agent.calls[: agent.calls.index(("done", 0))]
        assert [layer for _, layer in before] == (list(layers) if mode == "bulk" else [0])
        assert [layer for call, layer in agent.calls if call == "done"] == list(layers)


def test_prompts_are_saved_step_by_step():
    engine, agent = connected(TINY_GQA)
    answer(engine, passage(300))
    assert [(asked.save, asked.tail) for asked in agent.opened] == [
        ((0, 128), False),
        ((128, 256), False),
        ((256, 300), True),
    ]


def test_the_content_names_the_weights_and_not_the_cache_size():
    spec = model_spec(TINY_MLA, Engine(TINY_MLA).model.weights)
    larger = dataclasses.replace(TINY_MLA, num_blocks=200, name="other")
    assert model_spec(larger, Engine(larger).model.weights).fingerprint == spec.fingerprint
    reseeded = dataclasses.replace(TINY_MLA, seed=9)
    assert model_spec(reseeded, Engine(reseeded).model.weights).fingerprint != spec.fingerprint


@pytest.mark.parametrize("config", [GQA, MLA, HYBRID], ids=lambda config: config.name)
def test_the_presets_move_kilobytes_per_token_and_layer(config):
    spec = model_spec(config, {})
    for group in spec.groups:
        assert 2048 <= group.bytes_per_block // group.block_size <= 8192


def test_the_example_stays_short():
    assert len(Path(layerflow_engine.glue.__file__).read_text().splitlines()) < 200
