"""Which caches can be cut between heads; what cannot is refused by name."""

from __future__ import annotations

import re

import pytest

from layerflow.boxes import HeadAxis, PlaneInterior, head_axis

K, V = PlaneInterior("k", 4, "HND"), PlaneInterior("v", 4, "HND")


def test_head_major_planes_are_cut_at_the_models_heads() -> None:
    assert head_axis("full", [K, V], 8, 2) == HeadAxis(8)
    assert head_axis("sliding", [K, V._replace(packing="HDN")], 8, 2) == HeadAxis(8)


def test_one_head_on_a_rank_needs_no_head_axis_in_its_packing() -> None:
    assert head_axis("full", [PlaneInterior("k", 1, "ND")], 8, 8) == HeadAxis(8)
    assert head_axis("full", [PlaneInterior("k", 1, "ND")], 2, 8) == HeadAxis(2)  # replicas


def test_uneven_shares_are_the_models_heads_too() -> None:
    assert head_axis("full", [PlaneInterior("k", 3, "HND")], 8, 3) == HeadAxis(8)
    assert head_axis("full", [PlaneInterior("k", 2, "HND")], 8, 3) == HeadAxis(8)


def test_planes_without_heads_are_one_head_for_all_ranks() -> None:
    planes = [PlaneInterior("latent", 0, "ND"), PlaneInterior("scale", 0, "")]
    assert head_axis("mla", planes, 128, 8) == HeadAxis(1)


@pytest.mark.parametrize(
    ("kind", "planes", "says"),
    [
        ("full", [K, V._replace(packing="NHD")], "plane 'v' is packed NHD: tokens outside of heads"),
        ("full", [K, V._replace(packing="")], "plane 'v' is packed in a way that only"),
        ("full", [K, V._replace(heads=2)], "plane 'v' holds 2 heads where 8 heads"),
        ("full", [K, PlaneInterior("scale", 0, "N")], r"planes \['scale'\] have no head axis"),
        ("state", [PlaneInterior("conv", 0, "ND")], "recurrent state"),
    ],
)
def test_what_cannot_be_cut_is_divided_by_ranks(kind: str, planes: list[PlaneInterior], says: str) -> None:
    axis = head_axis(kind, planes, 8, 2)
    assert axis.heads == 2 and axis.refusal
    assert re.search(says, axis.refusal)
