"""Attempts at a request: counted by decode, told to prefill with what it is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layerflow.connectors.sglang.pd.attempts import KEY, asked_attempt, next_attempt, tell_attempt


def test_prefill_is_told_the_attempt_that_decode_has_counted() -> None:
    request, other = SimpleNamespace(), SimpleNamespace()
    for number in (1, 2):
        assert next_attempt(request) == number
        payload: dict[str, Any] = {"sampling_params": {"temperature": 0}}
        tell_attempt(payload, request)
        assert asked_attempt(payload["sampling_params"]["custom_params"]) == number
    assert next_attempt(other) == 1


def test_what_sglang_says_itself_stays() -> None:
    payload: dict[str, Any] = {"sampling_params": {"custom_params": {"theirs": 1}}}
    tell_attempt(payload, SimpleNamespace())
    assert payload["sampling_params"]["custom_params"] == {"theirs": 1, KEY: 0}


@pytest.mark.parametrize("said", [None, {}, {"theirs": 1}, {KEY: "x"}, {KEY: -1}, {KEY: None}, "x"])
def test_what_names_no_attempt_is_the_first(said: Any) -> None:
    assert asked_attempt(said) == 0
