"""The arithmetic in place of the kernels': vLLM-Ascend's tokens are those of the model in plain torch."""

from __future__ import annotations

import pytest
import torch
from comparison import prompt
from conftest import Rig
from engines import MODELS
from kernels import attention_update, fused_infer_attention, gather_from_cache
from scenario import Answer, Prompt

MAX_TOKENS = 4


def greedy(model: torch.nn.Module, asked: Prompt) -> Answer:
    """Every token from the whole text before it."""
    text = list(asked)
    for _ in range(MAX_TOKENS):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return Answer(tuple(text[len(asked) :]), 0, "length")


@pytest.mark.timeout(1200)
def test_tokens_are_those_of_the_model_itself(any_rig: Rig) -> None:
    """Of prompts that are computed together, more than fit into a pass: with a past and without, and one token each."""
    transformers = pytest.importorskip("transformers")
    asked = [prompt(500 + number, tokens) for number, tokens in enumerate((1, 129, 300, 400, 500))]
    right = any_rig.right(*asked, max_tokens=MAX_TOKENS)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODELS / any_rig.model, dtype=torch.float32)
    with torch.inference_mode():
        assert not right.wrong([greedy(model, each) for each in asked])


def test_attention_over_parts_of_the_keys_is_that_over_all() -> None:
    """As latent attention computes a piece of a prompt: over its own keys, then over those before it by blocks."""
    source, block, heads, size = torch.Generator().manual_seed(1), 128, 2, 32
    table, past, own = torch.tensor([[2, 0], [1, 3]]), torch.tensor([200, 0]), torch.tensor([5, 3])
    ends = own.cumsum(0).tolist()
    key_cache, value_cache = torch.randn(2, 4, block, heads, size, generator=source)
    query, key, value = 2 * torch.randn(3, ends[-1], heads, size, generator=source)

    def attend(keys: torch.Tensor, values: torch.Tensor, upto: list[int], mode: int) -> tuple[torch.Tensor, ...]:
        given = {"actual_seq_lengths": ends, "actual_seq_lengths_kv": upto, "num_heads": heads, "input_layout": "TND"}
        return fused_infer_attention(query, keys, values, **given, sparse_mode=mode, softmax_lse_flag=True)

    parts = [attend(key, value, ends, 3)]
    for start in (0, block):
        lengths = (past - start).clamp(0, block)
        keys, values = torch.empty(2, int(lengths.sum()), heads, size)
        starts = torch.full((2,), start)
        gather_from_cache(key_cache, value_cache, table, lengths, keys, values, seq_offset=starts)
        parts.append(attend(keys, values, lengths.cumsum(0).tolist(), 0))
    outputs, logarithms = zip(*parts, strict=True)
    made, _ = attention_update([each.flatten() for each in logarithms], [each.flatten(0, 1) for each in outputs], 0)

    before = [cache[table[0]].flatten(0, 1)[: past[0]] for cache in (key_cache, value_cache)]
    keys, values = (torch.cat(each) for each in zip(before, (key, value), strict=True))
    whole, _ = attend(keys, values, (past + own).cumsum(0).tolist(), 3)
    torch.testing.assert_close(made.view_as(whole), whole)
