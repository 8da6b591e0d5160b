"""Pipeline stages of vLLM: groups that all stages number alike, and the boxes that follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layerflow.boxes import Box, HeadAxis
from layerflow.connectors.vllm import layout
from layerflow.connectors.vllm.context import ContextParallel, sizes_of
from layerflow.errors import Unsupported
from layerflow.spec import Shard

FULL, WINDOW = (0, "full"), (1, "window")


def parallel(rank: int, tp: int, pp: int, **sizes: int) -> Any:
    return SimpleNamespace(rank=rank, tensor_parallel_size=tp, pipeline_parallel_size=pp, **sizes)


def test_ranks_are_of_a_stage_first() -> None:
    shards = [layout._shard(parallel(rank, 2, 3), ContextParallel(2)) for rank in range(6)]
    assert [(shard.pp_rank, shard.tp_rank) for shard in shards] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(shard.workers == 6 for shard in shards)


def test_ranks_that_share_a_blocks_tokens_are_of_a_stage_first() -> None:
    """4 ranks a stage hold one head in two parts: vLLM's ranks 0 and 2 the first."""
    sizes = {"decode_context_parallel_size": 2}
    shards = [layout._shard(parallel(rank, 4, 2, **sizes), ContextParallel(4, 2)) for rank in range(8)]
    assert [(shard.pp_rank, shard.tp_rank) for shard in shards[4:]] == [(1, 0), (1, 2), (1, 1), (1, 3)]


def test_the_model_spec_of_an_engine_without_context_parallelism_has_no_trace_of_it() -> None:
    context = sizes_of(parallel(1, 2, 1))
    assert context == ContextParallel(2) and not context.active and context.packing == ""
    spread = ContextParallel(2, 2, interleave=4)
    assert spread.packing == ":dcp2x4" and ContextParallel(2, 1, 2).packing == ""


def test_groups_have_the_first_stages_order() -> None:
    stages = [{FULL: 3, WINDOW: 1}, {WINDOW: 2, FULL: 2}]
    assert layout._common_groups(stages, [WINDOW, FULL]) == [FULL, WINDOW]


def test_a_stage_without_a_group_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match=r"stages 0 and 1 .* cache groups \[1\].*VLLM_PP_LAYER_PARTITION"):
        layout._common_groups([{FULL: 3, WINDOW: 1}, {FULL: 4}], [FULL])


def test_stages_that_see_other_shapes_are_refused() -> None:
    with pytest.raises(Unsupported, match="several shapes"):
        layout._common_groups([{FULL: 3}, {FULL: 1}], [FULL, FULL])


def test_a_stages_box_is_its_layers_also_where_heads_are_not_cut() -> None:
    last = Shard(0, 1, 1, 2)
    assert layout._boxed(last, [HeadAxis(2)], ((3, 5),), ()).box(0) == Box(3, 8, 0, 2)
    bound = layout._boxed(last, [HeadAxis(1, "opaque")], ((3, 5),), ())
    assert bound.span_of(0) == (3, 8, 8) and not bound.shareable
    assert layout._boxed(Shard(), [HeadAxis(1, "opaque")], ((8,),), ()) == Shard()
