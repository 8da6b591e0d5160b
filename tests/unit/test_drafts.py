"""Groups of a draft model: they change no key of the model's own, and have keys that tell their model."""

import pytest
from e2e.drafted import LAYERS, drafted

from layerflow.errors import SpecError
from layerflow.keys import KEY_BYTES, covered_by, describe_key, object_key
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard

DIGEST = b"d" * 16


def test_the_models_own_keys_are_those_without_a_draft_model() -> None:
    plain, one, other = drafted(), drafted("one"), drafted("other", row=64)
    assert plain.fingerprint == one.fingerprint == other.fingerprint
    keys = {object_key(DIGEST, 0, spec.shard) for spec in (plain, one, other)}
    assert len(keys) == 1
    assert one.own == plain and plain.own is plain


def test_a_draft_models_keys_tell_which_it_is() -> None:
    one, other = drafted("one"), drafted("other")
    keys = {object_key(DIGEST, group, spec.shard) for spec in (one, other) for group in (0, 1)}
    assert len(keys) == 3 and {len(key) for key in keys} == {KEY_BYTES}
    plain = Shard(heads=(1, 0), stages=((LAYERS,), (1,)))
    assert object_key(DIGEST, 1, plain) not in keys
    assert "draft" in describe_key(object_key(DIGEST, 1, one.shard))
    assert "g0" in describe_key(object_key(DIGEST, 0, one.shard))


def test_a_draft_models_objects_are_each_ranks_own() -> None:
    shards = [Shard(rank, 2, drafts=("", "one")) for rank in range(2)]
    assert len({covered_by(1, shard) for shard in shards}) == 2
    assert [peer.drafts for peer in shards[0].peers()] == [("", "one")] * 2


def test_lengths_of_hits_are_the_models_own() -> None:
    planes = (Plane("k", "uint8", (8,)),)
    groups = (GroupSpec("full", 4, (0,), planes), GroupSpec("full", 16, (1,), planes))
    spec = ModelSpec("m", "c", groups, Shard(drafts=("", "d")), chunk_tokens=16)
    assert (spec.block_tokens, spec.alignment, spec.num_layers) == (4, 1, 2)


@pytest.mark.parametrize("drafts", [("d", ""), ("d", "d"), ("",), ("", "d", "d")])
def test_draft_groups_come_last_and_not_alone(drafts: tuple[str, ...]) -> None:
    planes = (Plane("k", "uint8", (8,)),)
    groups = (GroupSpec("full", 4, (0,), planes), GroupSpec("full", 4, (1,), planes))
    with pytest.raises(SpecError, match="draft model"):
        ModelSpec("m", "c", groups, Shard(drafts=drafts), chunk_tokens=16)
