"""Which hits can be loaded from the places that a lookup tells, by the rules of the groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerflow.hits import HitLength, Tail, needed_keys
from layerflow.keys import object_keys
from layerflow.places import NO_PLACE, PLACE, is_placed, unpack_places
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard

CHUNK, BLOCK = 8, 4
_KINDS = {"full": ("full", 0), "narrow": ("sliding", 3), "wide": ("sliding", 2 * CHUNK + 3), "state": ("state", 0)}


def spec_of(kinds: list[str], ranks: int) -> ModelSpec:
    planes = (Plane("kv", "uint8", (1,)),)
    groups = tuple(
        GroupSpec(kind, BLOCK, (layer,), planes, window)
        for layer, (kind, window) in enumerate(_KINDS[name] for name in kinds)
    )
    return ModelSpec("m", "c", groups, Shard(0, ranks), chunk_tokens=CHUNK)


@given(
    st.lists(st.sampled_from(sorted(_KINDS)), min_size=1, max_size=3),
    st.integers(1, 2),
    st.integers(0, 5),
    st.integers(0, CHUNK - 1),
    st.data(),
)
def test_as_the_keys_that_a_load_reads(
    kinds: list[str], ranks: int, chunks: int, tail: int, data: st.DataObject
) -> None:
    """One of each row's objects may be away; a hit is placed where none of those that it needs is."""
    spec = spec_of(kinds, ranks)
    digests = [bytes([at]) * 16 for at in range(chunks)]
    tails = (Tail(chunks, tail, b"t" * 16),) if tail else ()
    rows = [*digests, *(each.digest for each in tails)]
    keys = object_keys(rows, range(len(spec.groups)), spec.shard.peers())
    away = data.draw(st.sets(st.sampled_from(keys), max_size=2)) if keys else set()
    packed = b"".join(NO_PLACE if key in away else PLACE.pack(64, 1) for key in keys)
    places = unpack_places(packed, spec)
    if places is None:
        assert not rows
        return
    for only in (HitLength(chunks * CHUNK, ()), HitLength(0, tails)):
        needed = needed_keys(spec, digests, only, 1000, range(len(spec.groups)))
        for tokens, position in only.ends(spec, 1000):
            row = len(digests) + position if position >= 0 else -1
            assert is_placed(spec, places, tokens, row) is needed.isdisjoint(away)


@pytest.mark.parametrize("nbytes", [0, 16, 17, 96])
def test_places_of_another_model_are_none(nbytes: int) -> None:
    spec = spec_of(["full", "narrow"], 2)
    assert unpack_places(bytes(nbytes), spec) is None
    places = unpack_places(bytes(128), spec)
    assert places is not None and places.shape == (2, 2, 2, 2) and places.dtype == np.uint64
