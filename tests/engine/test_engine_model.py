import dataclasses

import naive
import pytest
import torch

from layerflow_engine import Engine
from layerflow_engine.config import TINY_COMPRESSED, TINY_GQA, TINY_HYBRID, TINY_MLA, EngineConfig
from layerflow_engine.texts import QUESTIONS, passage

TINY = pytest.mark.parametrize(
    "config", [TINY_GQA, TINY_MLA, TINY_HYBRID, TINY_COMPRESSED], ids=lambda config: config.name
)


@TINY
def test_the_answer_is_the_one_of_the_plain_transformer(config):
    # Depth amplifies rounding, so the plain one (float64) follows the same tokens and is compared within a margin.
    config = dataclasses.replace(config, kinds=config.kinds[:3], ratios=config.ratios[:3])
    engine, prompt = Engine(config), passage(203, 400)
    tokens = engine.generate([prompt], 6)[0].tokens
    with torch.inference_mode():
        reference = naive.logits(config, engine.model.weights, [*prompt.encode(), *tokens])
    for index, token in enumerate(tokens):
        row = reference[len(prompt) - 1 + index]
        assert row[token] > row.max() - 1e-2


@TINY
def test_how_a_prompt_is_cut_into_steps_changes_no_bit_of_its_kv(config):
    prompt = passage(333)
    whole = prefilled(dataclasses.replace(config, step_tokens=512), prompt)
    chunked = prefilled(dataclasses.replace(config, step_tokens=config.tile), prompt)
    assert whole[0] == chunked[0]
    for layer, planes in whole[1].items():
        for name, rows in planes.items():
            assert same_bytes(rows, chunked[1][layer][name]), (layer, name)


def prefilled(config: EngineConfig, prompt: str):
    """The answer, and every row of every plane that the next token could read."""
    engine = Engine(config)
    engine.submit(prompt, 4, "a")
    request = engine._requests["a"]
    while request.computed < len(prompt):
        engine.step()
    planes = {}
    for number, place in engine.cache.group_of.items():
        group = config.groups[place]
        first, rows = max(0, len(prompt) - (group.window or len(prompt))), len(prompt) // group.ratio
        planes[number] = engine.cache.gather(number, request.tables[place], first, rows, rows)
    engine.run()
    return engine.results["a"].tokens, planes


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@TINY
def test_company_in_the_batch_changes_no_answer(config):
    prompts = [passage(120, 50), passage(57, 3000), passage(200, 9000), "x"]
    alone = [Engine(config).generate([prompt], 8)[0].tokens for prompt in prompts]
    together = [result.tokens for result in Engine(config).generate(prompts, 8)]
    assert together == alone


@TINY
def test_answers_depend_on_the_prompt_and_are_not_one_byte_repeated(config):
    prompts = [*(passage(150) + question for question in QUESTIONS[:3]), passage(150, 7000)]
    answers = [result.tokens for result in Engine(config).generate(prompts, 12)]
    assert len(set(answers)) == len(prompts)
    assert all(len(set(answer)) > 3 for answer in answers)


def test_decoding_a_prompt_token_by_token_gives_what_one_prefill_gives():
    """Each token alone against all at once: windows slide, states fill up, rows become whole, whatever the step."""
    config, text = TINY_COMPRESSED, passage(90).encode()
    engine = Engine(config)
    answer = engine.generate([text[:1]], 90)[0].tokens
    for known in (15, 16, 17, 31, 32, 33, 63, 80):
        longer = Engine(config).generate([text[:1] + bytes(answer[:known])], 90 - known)[0].tokens
        assert longer == answer[known:], known


def test_weights_come_from_the_seed_alone():
    one, same, other = (Engine(dataclasses.replace(TINY_GQA, seed=seed)).model.weights for seed in (3, 3, 4))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["head"], other["head"])


def test_half_precision_caches_work():
    result = Engine(dataclasses.replace(TINY_HYBRID, dtype="bfloat16")).generate([passage(100)], 8)[0]
    assert len(set(result.tokens)) > 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kinds": ("full", "mamba")}, "kinds"),
        ({"step_tokens": 100}, "step_tokens"),
        ({"window": 10}, "window"),
        ({"heads": 3}, "heads"),
        ({"kinds": ("mla",), "latent_rank": 0, "rope_dim": 0}, "latent_rank"),
        ({"kinds": ("compressed",), "window": 8}, "ratios"),
        ({"kinds": ("compressed",), "ratios": (4,)}, "window"),
        ({"kinds": ("compressed",), "ratios": (12,), "window": 8}, "row_block"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY_GQA, **change)
