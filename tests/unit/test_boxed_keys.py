"""Keys in the model's own coordinates: workers of all sizes agree on them, and equal parts have equal keys."""

from __future__ import annotations

import itertools

import pytest

from layerflow.boxes import Box
from layerflow.errors import SpecError
from layerflow.keys import describe_key, object_key
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard

DIGEST = bytes(range(16))


def worker(
    tp_rank: int = 0,
    tp_size: int = 1,
    pp_rank: int = 0,
    stages: tuple[int, ...] = (4,),
    heads: int = 4,
    known: bool = True,
) -> ModelSpec:
    """A worker of a model: a group of `heads` KV heads and 4 layers, and one without a head axis, of twice as many."""
    both = (stages, tuple(2 * layers for layers in stages))
    held = max(1, heads // tp_size)
    own, shared = (tuple(range(layers[pp_rank])) for layers in both)
    groups = (
        GroupSpec("full", 16, own, (Plane("k", "bfloat16", (held, 64)), Plane("v", "bfloat16", (held, 64)))),
        GroupSpec("mla", 16, tuple(len(own) + n for n in shared), (Plane("latent", "bfloat16", (96,)),)),
    )
    shard = Shard(tp_rank, tp_size, pp_rank, len(stages), (heads, 1) if known else (), both if known else ())
    return ModelSpec("m", "c", groups, shard)


def everyone(tp_size: int, stages: tuple[int, ...], heads: int = 4) -> list[ModelSpec]:
    ranks = itertools.product(range(tp_size), range(len(stages)))
    return [worker(tp, tp_size, pp, stages, heads) for tp, pp in ranks]


def test_workers_of_all_sizes_have_one_fingerprint() -> None:
    workers = [w for tp in (1, 2, 4, 8) for stages in ((4,), (1, 3), (1, 1, 1, 1)) for w in everyone(tp, stages)]
    assert len({w.fingerprint for w in workers}) == 1
    assert worker(heads=8).fingerprint != workers[0].fingerprint


def test_keys_are_equal_exactly_where_boxes_are() -> None:
    boxes: dict[bytes, set[tuple[int, Box]]] = {}
    for tp, stages in itertools.product((1, 2, 4, 8), ((4,), (1, 3), (3, 1), (2, 2), (1, 1, 1, 1))):
        for spec, group in itertools.product(everyone(tp, stages), (0, 1)):
            boxes.setdefault(object_key(DIGEST, group, spec.shard), set()).add((group, spec.box(group)))
    assert all(len(found) == 1 for found in boxes.values())
    assert len(boxes) == len(set().union(*boxes.values()))


def test_peers_are_named_once() -> None:
    assert [shard.tp_rank for shard in worker(0, 8).shard.peers()] == [0, 2, 4, 6]
    latent = Shard(3, 8, heads=(1,), stages=((4,),))
    assert latent.peers() == (Shard(0, 8, heads=(1,), stages=((4,),)),)
    assert len(Shard(3, 8).peers()) == 8
    assert object_key(DIGEST, 0, latent) == object_key(DIGEST, 0, latent.peers()[0])
    assert [Shard(rank, 4, heads=(2, 1, 0)).copy_of(group)[1] for rank in (0,) for group in range(3)] == [2, 4, 1]


def test_what_is_bound_to_ranks_keeps_its_keys() -> None:
    """Of one stage, whether or not its layers are known; and with them a group that cannot be cut."""
    spec, unknown = worker(1, 2), worker(1, 2, known=False)
    assert object_key(DIGEST, 3, unknown.shard) == DIGEST + bytes([3, 0, 1, 0, 0, 0, 0, 0])
    uncut = Shard(1, 2, heads=(0, 1), stages=((4,), (8,)))
    assert object_key(DIGEST, 0, uncut) == object_key(DIGEST, 0, unknown.shard)
    assert object_key(DIGEST, 1, uncut) == object_key(DIGEST, 1, Shard())
    assert spec.fingerprint != unknown.fingerprint


def test_a_group_that_cannot_be_cut_ties_the_model_to_its_tensor_size() -> None:
    def fingerprint(size: int) -> bytes:
        group = GroupSpec("state", 16, (0,), (Plane("ssm", "float32", (8,)),))
        return ModelSpec("m", "c", (group,), Shard(0, size, heads=(0,))).fingerprint

    assert fingerprint(1) != fingerprint(2)


def test_a_workers_box() -> None:
    spec = worker(3, 4, 1, (1, 3))
    assert [spec.box(0), spec.box(1)] == [Box(1, 4, 3, 4), Box(2, 8, 0, 1)]
    assert worker(1, 2, known=False).box(0) == Box(0, 4, 1, 2)
    assert describe_key(object_key(DIGEST, 0, spec.shard)).endswith("/g0/layer1/head3")
    assert describe_key(object_key(DIGEST, 0, worker(0, 2, 0, (1, 3)).shard)).endswith("/g0/layer0+1/head0+2")


@pytest.mark.parametrize(
    ("shard", "says"),
    [
        (Shard(heads=(2,)), "heads of 1 and stages of 0"),
        (Shard(stages=((4,),)), "stages of 1"),
        (Shard(stages=((3,), (8,))), "4 layers, but its stages"),
        (Shard(heads=(3, 1)), "cannot be 3 heads of equal size"),
    ],
)
def test_a_shard_that_contradicts_its_model_is_refused(shard: Shard, says: str) -> None:
    spec = worker()
    with pytest.raises(SpecError, match=says):
        ModelSpec("m", "c", spec.groups, shard)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"heads": (257,)}, "0 to 256"),
        ({"stages": ((4, 4),)}, "1 positive numbers"),
        ({"stages": ((0,),)}, "without a layer of some group"),
    ],
)
def test_impossible_shards_are_refused(facts: dict[str, tuple[int, ...]], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Shard(**facts)  # type: ignore[arg-type]
