"""Context parallelism: vLLM's own scheduler and block tables spread the tokens; every row is read where it lies.

A CPU's attention has no context parallelism, so no model runs here; see :mod:`spread`.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from connectors.event_channel import Channel
from engines import VERSION

from layerflow.agent import Control
from layerflow.boxes import worker_box
from layerflow.boxes.box import replica_of
from layerflow.connectors.vllm.context import ContextParallel
from layerflow.errors import Unsupported
from layerflow_cli.bench.harness import ServerProcess

if VERSION < (0, 32):
    pytest.skip("context parallelism of this vLLM is refused", allow_module_level=True)
import torch
from spread import BLOCK, LAYERS, Rank, Running, SpreadEngine, parallel_groups, second_slots
from vllm.config import KVEventsConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.request import Request

Serve = Callable[..., ServerProcess]

SPREADS: list[dict[str, Any]] = [
    {"model": "mla", "tensor": 4, "decode": 2, "interleave": BLOCK},
    {"model": "llama", "tensor": 4, "decode": 2, "heads": 1, "interleave": 4},
    {"model": "llama", "tensor": 4, "decode": 2, "heads": 2},
    {"model": "mla", "tensor": 2, "prefill": 2},
    {"model": "mla", "tensor": 1, "prefill": 2, "decode": 2},
]


def tokens(count: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(2000) for _ in range(count)]


@pytest.mark.parametrize("sizes", SPREADS, ids=str)
def test_equal_sizes_find_each_row_again(sizes: dict[str, Any], serve: Serve) -> None:
    """In the same engine and in another one; from the pool, and behind what vLLM's own prefix cache has."""
    server, decode = serve(), sizes.get("decode", 1)
    asked = tokens(600, 1)
    with SpreadEngine(server.endpoint, **sizes, extra={"mode": "layerwise"}) as engine:
        assert engine.spec.groups[0].block_size == decode * BLOCK
        assert engine.serve(asked) == [0] and engine.read
        assert engine.serve(asked) == [599 // decode * decode]
        for shared in (256, 300, 512):  # a chunk, within the next one, two
            (hit,) = engine.serve(asked[:shared] + tokens(100, shared))
            assert hit == shared // (decode * BLOCK) * decode * BLOCK
        assert engine.wrong == 0
    with SpreadEngine(server.endpoint, **sizes, enable_prefix_caching=True, extra={"mode": "bulk"}) as engine:
        engine.serve(asked[:128] + tokens(30, 3))
        found = engine.serve(asked, [*asked, *tokens(40, 2)])
        assert min(found) >= 512 and engine.wrong == 0 and engine.read
        engine.serve(*(tokens(500, seed) for seed in range(10, 14)))  # what is there is overwritten
        assert engine.wrong == 0


def test_a_hand_off_between_other_tensor_sizes(serve: Serve) -> None:
    """P in several steps, D with half as many ranks."""
    server, asked = serve(), tokens(601, 1)
    common: dict[str, Any] = {"model": "mla", "decode": 2, "interleave": 4, "extra": {"mode": "layerwise"}}
    with (
        SpreadEngine(server.endpoint, tensor=4, **common, max_num_batched_tokens=200) as prefill,
        SpreadEngine(server.endpoint, tensor=2, **common) as decode,
    ):
        prefill.serve(asked, answer=1, transfer={"do_remote_decode": True})
        assert prefill.handed_on["dcp_size"] == 2
        assert decode.serve(asked, answer=3, transfer=prefill.handed_on) == [600]
        assert decode.read and decode.wrong == prefill.wrong == 0


def test_other_sizes_find_nothing_and_other_tensor_sizes_all(serve: Serve) -> None:
    server, asked = serve(), tokens(600, 1)
    with SpreadEngine(server.endpoint, tensor=2, decode=2, extra={"mode": "layerwise"}) as engine:
        engine.serve(asked)
    others: list[tuple[dict[str, Any], int]] = [
        ({"tensor": 4, "decode": 2}, 598),
        ({"tensor": 2, "decode": 2, "interleave": 2}, 0),
        ({"tensor": 2}, 0),
    ]
    for sizes, hit in others:
        with SpreadEngine(server.endpoint, **sizes, extra={"mode": "layerwise"}) as engine:
            assert engine.serve(asked) == [hit], sizes
            engine.serve(asked)
            assert engine.wrong == 0, sizes


@pytest.mark.parametrize("sizes", [{"tensor": 2, "decode": 2}, {"tensor": 1, "prefill": 2, "decode": 2}], ids=str)
def test_routers_are_told_blocks_of_all_parts(sizes: dict[str, Any], serve: Serve, tmp_path: Path) -> None:
    """Once for all ranks, in vLLM's own blocks and hashes; an engine of another tensor size tells the same."""
    server, asked, block = serve(), tokens(600, 1), 2 * BLOCK
    channels = [Channel(tmp_path, name, ("CPU", "STORAGE")) for name in ("one", "two")]
    told = [KVEventsConfig(enable_kv_cache_events=True, **channel.config) for channel in channels]
    wanted = {(0, "CPU"): {tuple(asked[:end]) for end in range(block, 601, block)}}
    common: dict[str, Any] = {"extra": {"mode": "layerwise"}}
    with SpreadEngine(server.endpoint, **sizes, **common, kv_events_config=told[0]) as engine:
        engine.serve(asked, answer=1)
        channels[0].wait(wanted)
        own = Request("own", asked, SamplingParams(), None, block_hasher=engine.core.request_block_hasher)
        hashes = {kv_cache_utils.maybe_convert_block_hash(each) for each in own.block_hashes}
        assert set(channels[0].believed()[0, "CPU"]) == hashes and len(hashes) == 600 // block
        with SpreadEngine(server.endpoint, tensor=4, decode=2, **common, kv_events_config=told[1]) as other:
            channels[1].wait(wanted)
            assert other.serve(asked, answer=1) == [599 // 2 * 2] and other.wrong == 0
            with contextlib.closing(Control(server.endpoint)) as control:
                control.purge()
            for channel in channels:
                channel.wait({})


@pytest.mark.parametrize("interleave", [1, 4, BLOCK])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_both_model_runners_map_tokens_alike(parts: int, interleave: int) -> None:
    """Each token has one row of one rank, in the block of its number; the parts are those of :mod:`.context`."""
    count = 5 * parts * BLOCK + 7
    blocks = random.Random(parts).sample(range(1, 100), 6)
    owners = np.zeros(count, int)
    for part in range(parts):
        rank = object.__new__(Rank)
        rank.parts, rank.part, rank.interleave = parts, part, interleave
        rank.make_table()
        first = rank.slots(Running([0] * count, blocks), count)
        second = second_slots({0: blocks}, {0: range(count)}, part, parts, interleave)[0]
        assert (first == second).all()
        positions = np.flatnonzero(first >= 0)
        assert (positions % (parts * BLOCK) // interleave % parts == part).all()
        assert (first[positions] // BLOCK == np.array(blocks)[positions // (parts * BLOCK)]).all()
        owners[positions] += 1
    assert (owners == 1).all()


LAID_OUT = [
    (tensor, prefill, decode, heads)
    for tensor, prefill, decode, heads in itertools.product((1, 2, 4, 8, 16), (1, 2, 4), (1, 2, 4, 8), (1, 2))
    if tensor * prefill % heads == 0
    and tensor * prefill // heads % decode == 0
    and (tensor % decode == 0 if prefill == 1 else decode in (1, prefill, tensor * prefill) and heads == 1)
]


@pytest.mark.parametrize(("tensor", "prefill", "decode", "heads"), LAID_OUT)
def test_boxes_are_equal_where_heads_and_parts_are(tensor: int, prefill: int, decode: int, heads: int) -> None:
    """Over the groups that vLLM itself makes of its ranks, on each of two pipeline stages."""
    groups = parallel_groups(tensor, 2, prefill, decode)["dcp"]
    ranks = tensor * prefill
    context = ContextParallel(tensor, decode, prefill, heads=heads)
    held: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(2 * ranks):
        part = next(group.index(rank) for group in groups if rank in group)
        head = rank % tensor * heads // tensor
        place = context.place(rank)
        box = worker_box((0, 1), heads * decode, place, ranks)
        assert (box.first_head, box.heads) == (head * decode + part, 1)
        held.setdefault((rank // ranks, head, part), []).append(replica_of(heads * decode, place, ranks).number)
    assert len(held) == 2 * heads * decode
    assert all(sorted(numbers) == list(range(ranks // (heads * decode))) for numbers in held.values())


COMMON: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


@pytest.mark.parametrize(
    ("spec", "sizes", "version", "says"),
    [
        (
            MLAAttentionSpec(**COMMON),
            {"decode_context_parallel_size": 2},
            "0.31.0",
            "vLLM 0.31.0 .* vLLM 0.32 or later",
        ),
        (
            SlidingWindowSpec(**COMMON, sliding_window=64),
            {"decode_context_parallel_size": 2},
            "0.32.0",
            "SlidingWindow",
        ),
        (
            MambaSpec(block_size=BLOCK, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align"),
            {"prefill_context_parallel_size": 2},
            "0.32.0",
            "MambaSpec",
        ),
        (MLAAttentionSpec(**COMMON, tokens_per_state=4), {"decode_context_parallel_size": 2}, "0.32.0", "compressed"),
        (FullAttentionSpec(**COMMON), {"prefill_context_parallel_size": 2}, "0.32.0", r"latent attention \(MLA\) only"),
        (FullAttentionSpec(**COMMON), {"decode_context_parallel_size": 4}, "0.32.0", "a size that divides 6"),
    ],
)
def test_what_is_not_known_is_refused_by_name(spec: Any, sizes: dict[str, int], version: str, says: str) -> None:
    from layerflow.connectors.vllm.context import context_of, sizes_of

    parallel = SimpleNamespace(tensor_parallel_size=12, cp_kv_cache_interleave_size=1, **sizes)
    layers = {f"layers.{layer}": (spec, 2) for layer in range(LAYERS)}
    with pytest.raises(Unsupported, match=says) as refused:
        context_of(sizes_of(parallel), layers, version)
    (name,) = sizes
    assert str(refused.value).startswith(f"{name} = {sizes[name]}: ") and "Set it to 1, or" in str(refused.value)
