"""The arithmetic in place of the kernels': vLLM-Ascend's tokens are those of the model in plain torch."""

from __future__ import annotations

import pytest
import torch
from comparison import prompt
from conftest import Rig
from engines import MODELS
from scenario import Answer, Prompt

MAX_TOKENS = 4


def greedy(model: torch.nn.Module, asked: Prompt) -> Answer:
    """Every token from the whole text before it."""
    text = list(asked)
    for _ in range(MAX_TOKENS):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return Answer(tuple(text[len(asked) :]), 0, "length")


@pytest.mark.timeout(1200)
def test_tokens_are_those_of_the_model_itself(rig: Rig) -> None:
    """Of prompts that are computed together, more than fit into a pass: with a past and without, and one token each."""
    transformers = pytest.importorskip("transformers")
    asked = [prompt(500 + number, tokens) for number, tokens in enumerate((1, 129, 300, 400, 500))]
    right = rig.right(*asked, max_tokens=MAX_TOKENS)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODELS / rig.model, dtype=torch.float32)
    with torch.inference_mode():
        assert not right.wrong([greedy(model, each) for each in asked])
