"""Which of vLLM's layers are a draft model's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layerflow.connectors.vllm.layout import draft_layers, draft_name, guesses_unseen
from layerflow.spec import GroupSpec, Plane

OWN = ["model.layers.0.self_attn.attn", "language_model.model.layers.7.self_attn.attn"]


def config(method: str | None = "eagle", layers: int = 8) -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(method=method) if method else None,
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: layers),
    )


@pytest.mark.parametrize(
    "name",
    [
        "draft_model.model.layers.0.self_attn.attn",  # a small model
        "model.layers.8.self_attn.attn",  # EAGLE, EAGLE-3
        "model.layers.8.mtp_block.self_attn.attn",  # DeepSeek's MTP
        "mtp.layers.0.self_attn.attn",  # Qwen3-Next's MTP
    ],
)
def test_its_layers_are_told_by_their_names(name: str) -> None:
    assert draft_layers(config(), [*OWN, name]) == {name}


def test_a_model_that_runs_alone_has_none() -> None:
    assert draft_layers(config(None, layers=1), OWN) == set()


@pytest.mark.parametrize(("method", "unseen"), [("ngram", False), ("suffix", False), ("eagle", True), (None, False)])
def test_a_draft_model_whose_layers_are_not_found_is_known(method: str | None, unseen: bool) -> None:
    assert guesses_unseen(config(method), frozenset()) is unseen
    assert guesses_unseen(config(method), frozenset({"draft"})) is False


def test_every_fact_of_it_is_in_its_name() -> None:
    group = GroupSpec("full", 16, (4,), (Plane("kv", "uint8", (8,)),))
    wider = GroupSpec("full", 16, (4,), (Plane("kv", "uint8", (16,)),))
    longer = GroupSpec("full", 16, (4, 5), (Plane("kv", "uint8", (8,)),))
    elsewhere = GroupSpec("full", 16, (9,), (Plane("kv", "uint8", (8,)),))
    named = [draft_name("c", "p", each) for each in (group, wider, longer)]
    named += [draft_name("other", "p", group), draft_name("c", "other", group)]
    assert len(set(named)) == 5
    assert draft_name("c", "p", elsewhere) == named[0], "where a layer stands among the model's changes no byte"
