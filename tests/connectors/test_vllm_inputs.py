"""Multimodal inputs are keyed by what the encoder reads, never by the name that a client gave them."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_vllm_scheduler import House, fakes  # noqa: F401  the stand-ins are an autouse fixture
from vllm_fakes import CHUNK, pieces

from layerflow.agent.values import Hit
from layerflow.connectors.vllm.identity import identity
from layerflow.connectors.vllm.identity.identity import MediaInputs
from layerflow.keys import Media


class Item(UserDict[str, Any]):
    """vLLM's MultiModalKwargsItem: fields with data."""


def item(**data: Any) -> Item:
    return Item({key: SimpleNamespace(data=value) for key, value in data.items()})


def image(shade: float, name: str = "hash", at: int = 70, modality: str = "image", **changed: Any) -> SimpleNamespace:
    """vLLM's MultiModalFeatureSpec of an image of one colour."""
    data = item(pixel_values=torch.full((3, 4), shade), image_grid_thw=torch.tensor([1, 3, 4]))
    feature = SimpleNamespace(
        data=data, modality=modality, identifier=name, mm_position=SimpleNamespace(offset=at, length=4)
    )
    for key, value in changed.items():
        setattr(feature, key, value)
    return feature


def content(feature: SimpleNamespace) -> bytes:
    [media], end = MediaInputs().read([feature])
    assert end is None
    return media.content


class TestContent:
    def test_the_name_does_not_matter(self) -> None:
        assert content(image(0.5, "hash")) == content(image(0.5, "a client's uuid"))

    @pytest.mark.parametrize(
        "other",
        [
            image(0.6),
            image(0.5, modality="video"),
            image(0.5, data=item(pixel_values=torch.full((3, 4), 0.5))),
            image(0.5, data=item(pixel_values=torch.full((4, 3), 0.5), image_grid_thw=torch.tensor([1, 3, 4]))),
            image(0.5, data=item(pixel_values=torch.full((3, 4), 0.5), image_grid_thw=torch.tensor([1, 4, 3]))),
            image(0.5, data=item(pixels=torch.full((3, 4), 0.5), image_grid_thw=torch.tensor([1, 3, 4]))),
            image(0.5, data=item(pixel_values=torch.full((3, 4), 0.5).half(), image_grid_thw=torch.tensor([1, 3, 4]))),
            image(
                0.5, data=item(pixel_values=torch.full((3, 4), 0.5), image_grid_thw=torch.tensor([1, 3, 4]), fps=2.0)
            ),
        ],
    )
    def test_whatever_the_encoder_reads_matters(self, other: SimpleNamespace) -> None:
        assert content(image(0.5)) != content(other)

    def test_how_tensors_are_listed_matters(self) -> None:
        one, two = torch.ones(2), torch.zeros(2)
        several = [item(frames=[one, two]), item(frames=[[one], [two]]), item(frames=[one, two, two])]
        several += [item(frames={"a": one, "b": two}), item(frames=[two, one])]
        assert len({content(image(0, data=each)) for each in several}) == 5

    def test_where_it_lies_in_memory_does_not(self) -> None:
        whole = torch.arange(24.0).reshape(4, 6)
        assert content(image(0, data=item(x=whole.T))) == content(image(0, data=item(x=whole.T.contiguous())))

    @pytest.mark.parametrize(
        "data",
        [
            None,
            item(address=4096, monotonic_id=7, signature=[1, 2]),  # where it lies in shared memory
            item(pixel_values=None),
            item(pixel_values=torch.ones(2), path="/tmp/image"),
            item(pixel_values=torch.empty(2, device="meta")),
            item(),
        ],
    )
    def test_what_the_scheduler_does_not_have_is_unknown(self, data: Any) -> None:
        assert MediaInputs().read([image(0.5, at=9), image(0.5, "b", at=70, data=data)])[1] == 70

    def test_an_input_of_gigabytes_would_hold_the_scheduler_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(identity, "MOST_BYTES", 64)
        assert MediaInputs().read([image(0.5)])[1] == 70

    def test_data_that_vllms_cache_hands_out_again_is_hashed_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        known, feature = MediaInputs(), image(0.5)
        first = known.read([feature])
        monkeypatch.setattr(identity, "tensor_bytes", lambda _: pytest.fail("hashed again"))
        again = image(0, at=30, data=feature.data)
        assert known.read([again])[0] == [Media(30, 4, first[0][0].content)]


class TestNames:
    def test_a_name_of_two_contents_is_trusted_no_more(self) -> None:
        """vLLM finds its encoder's outputs by the name: it may compute with either."""
        known = MediaInputs()
        assert known.read([image(0.1, "y")])[1] is None
        assert known.read([image(0.2, "y")])[1] == 70
        assert known.read([image(0.1, "y")])[1] == 70
        assert known.read([image(0.2, "z")])[1] is None

    def test_only_so_many_names_are_remembered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(identity, "MOST_KNOWN", 2)
        known = MediaInputs()
        for name in "abc":
            known.read([image(0.1, name)])
        assert known.read([image(0.2, "c")])[1] == 70
        assert known.read([image(0.2, "a")])[1] is None


class TestRequests:
    def test_prompts_part_at_the_chunk_of_their_first_input_that_differs(self) -> None:
        house = House()
        for name, features in {"a": [image(0.5, "x")], "b": [image(0.5, "y")], "c": [image(0.6, "z")]}.items():
            house.arrive(name, mm_features=features)
        one, same, other = (asked.chain.digests for asked in house.lookups.asked)
        assert one == same
        assert one[0] == other[0] and one[1] != other[1]

    def test_a_poisoned_name_is_never_found_under_the_content_that_it_stands_for(self) -> None:
        """A client sends another image under the hash of this one; both engines share a pool."""
        poisoned, honest = House(), House()
        poisoned.arrive(mm_features=[image(0.1, "hash of 0.9")])
        honest.arrive(mm_features=[image(0.9, "hash of 0.9")])
        assert poisoned.lookups.asked[0].chain.digests[1] != honest.lookups.asked[0].chain.digests[1]
        # vLLM may still have the first one's encoder outputs under this name.
        poisoned.arrive("later", mm_features=[image(0.9, "hash of 0.9")])
        assert len(poisoned.lookups.asked[1].chain) == 70

    def test_nothing_is_looked_up_or_saved_from_the_first_unknown_input_on(self) -> None:
        house = House(save_decode=True)
        made = house.arrive(hit=Hit(0), mm_features=[image(0.5, data=None)])
        assert len(house.lookups.asked[0].chain) == 70
        house.side.matched(made, 0)
        house.admit(made, 0)
        saves = pieces(house.plan(scheduled=150, computed=0).saves.parts)
        assert [tokens for _, _, parts in saves for _, tokens in parts] == [CHUNK]
        made.num_computed_tokens, made.num_tokens = 150, 400
        assert not house.plan(scheduled=250, computed=150).saves
        house.side.matched(made, 0)  # preempted
        assert len(house.lookups.asked[-1].chain) == 70

    def test_a_prompt_that_begins_with_an_unknown_input_is_not_followed(self) -> None:
        house = House()
        made = house.arrive(mm_features=[image(0.5, at=0, data=None)])
        assert house.lookups.asked == []
        assert house.side.matched(made, 0) == (0, False)
