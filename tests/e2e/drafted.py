"""Specs of one model with and without a draft model's layer."""

from __future__ import annotations

from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard

LAYERS, BLOCK, CHUNK = 3, 4, 16
DRAFT_LAYER = LAYERS


def drafted(draft: str = "", row: int = 32, window: int = 0) -> ModelSpec:
    """Three layers of the model, and one of the draft model if there is one, with rows of `row` bytes.

    :param window: of the draft model's layer; 0 = it attends to all.
    """
    groups = [GroupSpec("full", BLOCK, tuple(range(LAYERS)), (Plane("k", "uint8", (32,)), Plane("v", "uint8", (32,))))]
    shard = Shard(heads=(1,), stages=((LAYERS,),))
    if draft:
        planes, kind = (Plane("k", "uint8", (row,)),), "sliding" if window else "full"
        groups.append(GroupSpec(kind, BLOCK, (DRAFT_LAYER,), planes, window))
        shard = Shard(heads=(1, 0), stages=((LAYERS,), (1,)), drafts=("", draft))
    return ModelSpec("known", "drafted", tuple(groups), shard, chunk_tokens=CHUNK)
