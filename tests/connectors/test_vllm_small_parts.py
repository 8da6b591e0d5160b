"""What a request wishes and is told, how long a chunk is, and which vLLM is let in."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_fakes import FakeInquiry, decode, request, spec_of, tracked

from layerflow.agent.values import Hit
from layerflow.connectors.vllm.scheduler.requests import load_save_flags
from layerflow.spec import GroupSpec, Plane, default_chunk_tokens


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, (True, True)),
        ({}, (True, True)),
        ({"layerflow": None}, (True, True)),
        ({"layerflow": {}}, (True, True)),
        ({"layerflow": {"load": False}}, (False, True)),
        ({"layerflow": {"save": False}}, (True, False)),
        ({"layerflow": {"load": False, "save": False}}, (False, False)),
        ({"layerflow": {"load": 0}}, (True, True)),
        ({"another": {"load": False}}, (True, True)),
    ],
)
def test_wishes(params: dict[str, Any] | None, expected: tuple[bool, bool]) -> None:
    assert load_save_flags(params) == expected


def test_a_request_knows_its_output_only_when_asked() -> None:
    following = tracked(request("r", 70), spec_of())
    decode(following.request, 60)
    assert len(following.chain) == 70
    following.know_tokens()
    assert len(following.chain) == 130
    assert len(following.chain.digests) == 2
    following.know_tokens()
    assert len(following.chain) == 130


@pytest.mark.parametrize(("hit", "may"), [(None, True), (Hit(64), True), (Hit(0), False)])
def test_who_may_hold_a_lease(hit: Hit | None, may: bool) -> None:
    following = tracked(request("r", 70), spec_of())
    assert not following.may_hold_lease
    following.inquiry = FakeInquiry("r", following.chain, 0.0, hit)  # type: ignore[assignment]
    assert following.may_hold_lease is may


def test_what_a_response_says() -> None:
    following = tracked(request("r", 70), spec_of())
    assert following.summary() == {"layerflow": {"hit_tokens": 0}}
    following.loaded_tokens, following.overlap = 64, (1.0, 3.0)
    assert following.summary() == {"layerflow": {"hit_tokens": 64, "overlap": 0.3333}}


@pytest.mark.parametrize(
    ("sizes", "window", "wanted", "expected"),
    [
        ([16], 0, 0, 256),
        ([32, 16], 0, 0, 256),
        ([48], 0, 0, 288),
        ([16, 272], 0, 0, 272),
        ([1024], 0, 0, 1024),
        ([32], 0, 64, 64),
        ([16], 128, 0, 128),
        ([32, 16], 100, 0, 96),
        ([16], 1024, 0, 256),
        ([32], 8, 0, 32),
        ([16], 128, 512, 512),
    ],
)
def test_a_chunk_is_about_256_tokens_and_no_more_than_a_window(
    sizes: list[int], window: int, wanted: int, expected: int
) -> None:
    plane = (Plane("kv", "uint8", (1,)),)
    groups = [GroupSpec("full", size, (layer,), plane) for layer, size in enumerate(sizes)]
    groups += [GroupSpec("sliding", sizes[0], (len(sizes),), plane, window)] if window else []
    assert default_chunk_tokens(groups, wanted) == expected
