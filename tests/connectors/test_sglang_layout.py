"""SGLang's pools as groups, planes and block tables; what is packed otherwise is refused with a sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang_fakes import (
    HEADS,
    PAGE,
    SIZE,
    SLOTS,
    STATES,
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    SWAKVPool,
    layout,
    states,
)

from layerflow.connectors.sglang.layout import KV, MAMBA, SWA, PoolGroup, layout_of
from layerflow.errors import Unsupported
from layerflow.spec import Shard


def test_keys_and_values_are_blocks_of_one_token_that_can_be_cut_between_heads() -> None:
    found = layout("mha")
    (group,) = found.spec.groups
    assert (group.kind, group.block_size, group.layers) == ("full", 1, (0, 1, 2))
    assert [(plane.name, plane.dtype, plane.shape) for plane in group.planes] == [
        ("k", "uint8", (HEADS, SIZE)),
        ("v", "uint8", (HEADS, SIZE)),
    ]
    assert found.spec.chunk_tokens == PAGE
    assert found.spec.shard.heads == (HEADS,)
    assert found.shortens
    assert {tuple(tensor.shape) for planes in found.tensors.values() for tensor in planes.values()} == {
        (SLOTS, 1, HEADS, SIZE)
    }


def test_latent_rows_are_blocks_of_a_page() -> None:
    found = layout("mla")
    (group,) = found.spec.groups
    assert (group.kind, group.block_size, found.spec.shard.heads) == ("mla", PAGE, (1,))
    assert tuple(found.tensors[0]["latent"].shape) == (SLOTS // PAGE, PAGE, 24)


def test_tensors_are_the_pools_own_memory() -> None:
    pool = MHATokenToKVPool(2)
    found = layout_of(pool, None, PAGE, 0, {KV: HEADS}, Shard())
    found.tensors[1]["v"][3] = 7
    assert (pool.v_buffer[1][3] == 7).all()
    latent = MLATokenToKVPool(2)
    found = layout_of(latent, None, PAGE, 0, {KV: HEADS}, Shard())
    found.tensors[0]["latent"][1] = 7
    assert (latent.kv_buffer[0][PAGE : 2 * PAGE] == 7).all()


def test_a_window_is_of_whole_pages_and_one_token_more() -> None:
    """The next query sits behind the hit: of its window's tokens before it all are read."""
    found = layout("swa")
    full, sliding = found.spec.groups
    assert [group.pool for group in found.groups] == [KV, SWA]
    assert (full.kind, full.layers) == ("full", (0, 2))
    assert (sliding.kind, sliding.layers, sliding.window) == ("sliding", (1, 3), 2 * PAGE + 1)
    assert not found.shortens


def test_layers_with_states_have_numbers_among_the_others() -> None:
    found = layout("hybrid")
    full, state = found.spec.groups
    assert found.layers == {0: 0, 1: 1, 2: 2, 3: 3}
    assert (full.layers, state.layers, state.kind, state.block_size) == ((3,), (0, 1, 2), "state", PAGE)
    assert [plane.name for plane in state.planes] == ["temporal", "conv0"]
    assert tuple(found.tensors[0]["conv0"].shape) == (STATES, 1, 40)
    assert not found.shortens


def test_layers_without_a_cache_have_no_number() -> None:
    pool = HybridLinearKVPool(MHATokenToKVPool(2))
    found = layout_of(pool, states(layers=1), PAGE, 0, {KV: HEADS}, Shard())
    assert found.layers == {0: 0, 3: 1, 7: 2}
    assert found.spec.groups[0].layers == (1, 2)


def test_a_draft_models_layers_are_behind_the_models_own() -> None:
    """SGLang counts both from 0. Their slots are those of full attention."""
    found = layout("mla-draft")
    assert [group.layers for group in found.spec.groups] == [(0, 1, 2), (3, 4)]
    assert (found.layers, found.draft_layers) == ({0: 0, 1: 1, 2: 2}, ({0: 3, 1: 4},))
    assert [(group.pool, group.name) for group in found.groups] == [(KV, KV), (KV, "draft")]
    assert found.shortens
    tables = found.tables(2, {KV: np.arange(PAGE, 3 * PAGE)})
    assert [table.tolist() for table in tables] == [[1, 2], list(range(PAGE, 3 * PAGE))]
    hybrid = layout("hybrid-draft")
    assert hybrid.draft_layers == ({0: 4, 1: 5},) and not hybrid.shortens


def test_of_a_hybrid_draft_model_the_attention_has_a_cache() -> None:
    draft = HybridLinearKVPool(MHATokenToKVPool(1))
    found = layout_of(MHATokenToKVPool(2), None, PAGE, 0, {KV: HEADS}, Shard(), [(draft, HEADS)])
    assert found.draft_layers == ({3: 2},)


def test_a_draft_model_beside_sliding_windows_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"sliding windows.*run without --speculative-algorithm"):
        layout("swa-draft")


@pytest.mark.parametrize("kind", ["mha", "mla", "one-head", "swa", "mha-draft"])
def test_workers_of_other_tensor_sizes_have_one_fingerprint(kind: str) -> None:
    sizes = [layout(kind, rank, size).spec for size in (1, 2) for rank in range(size)]
    assert len({spec.fingerprint for spec in sizes}) == 1
    assert all(spec.shard.shareable for spec in sizes)
    assert not sizes[0].bound_to_size()


def test_two_ranks_hold_half_of_the_heads_each() -> None:
    boxes = [layout("mha", rank, 2).spec.box(0) for rank in range(2)]
    assert [(box.first_head, box.heads) for box in boxes] == [(0, HEADS // 2), (HEADS // 2, HEADS // 2)]


def test_ranks_that_hold_the_same_head_have_the_same_box() -> None:
    for kind in ("one-head", "mla"):
        assert layout(kind, 0, 2).spec.box(0) == layout(kind, 1, 2).spec.box(0)


@pytest.mark.parametrize("kind", ["hybrid", "hybrid-mla"])
def test_states_are_bound_to_the_tensor_size(kind: str) -> None:
    one, two = layout(kind).spec, layout(kind, 0, 2).spec
    assert one.fingerprint != two.fingerprint
    assert two.fingerprint == layout(kind, 1, 2).spec.fingerprint
    assert list(one.bound_to_size()) == [1]


@pytest.mark.parametrize("other", ["mla", "one-head", "swa", "hybrid", "mha-draft"])
def test_other_pools_have_other_fingerprints(other: str) -> None:
    assert layout("mha").spec.fingerprint != layout(other).spec.fingerprint


def test_another_page_size_is_another_fingerprint() -> None:
    assert layout("mha").spec.fingerprint != layout("mha", page=2 * PAGE).spec.fingerprint


class MHATokenToKVPoolFP4(MHATokenToKVPool):
    """A class that is not known."""


def scaled(name: str) -> Any:
    pool = MHATokenToKVPool(2)
    setattr(pool, name, [torch.ones(1)])
    return pool


def head_major() -> Any:
    pool = MHATokenToKVPool(2)
    pool.k_buffer = [each.view(-1, PAGE, HEADS, SIZE).transpose(1, 2) for each in pool.k_buffer]
    return pool


def transposed() -> Any:
    pool = MHATokenToKVPool(2)
    pool.v_buffer = [each.transpose(1, 2) for each in pool.v_buffer]
    return pool


def half_a_page() -> Any:
    return MHATokenToKVPool(2, slots=SLOTS + PAGE // 2)


@pytest.mark.parametrize(
    ("pool", "says"),
    [
        (scaled("k_scale_buffer"), "keeps scales beside its keys and values"),
        (scaled("native_k_scale_buffer"), "choose a --kv-cache-dtype without them"),
        (head_major(), "packs its blocks as"),
        (transposed(), "unset SGLANG_USE_HND_KVCACHE"),
        (half_a_page(), f"whole pages of {PAGE}"),
        (MHATokenToKVPoolFP4(2), "in a MHATokenToKVPoolFP4, which layerflow does not know"),
        (HybridLinearKVPool(MHATokenToKVPoolFP4(1)), "in a MHATokenToKVPoolFP4, which layerflow does not know"),
    ],
)
def test_a_pool_that_is_packed_otherwise_is_refused(pool: Any, says: str) -> None:
    with pytest.raises(Unsupported, match=says):
        layout_of(pool, states(), PAGE, 0, {KV: HEADS, SWA: HEADS}, Shard())


@pytest.mark.parametrize(
    ("side", "says"),
    [
        ({"mamba_ckpt_pool": SimpleNamespace()}, "checkpoints beside this model's states"),
        ({"short_conv_pool": SimpleNamespace()}, "short convolutions beside"),
        ({"ngram_pool": SimpleNamespace(enabled=True)}, "n-grams beside"),
        ({"replayssm_d": torch.ones(1)}, "--enable-linear-replayssm"),
    ],
)
def test_what_is_kept_beside_states_is_refused(side: dict[str, Any], says: str) -> None:
    with pytest.raises(Unsupported, match=says):
        layout_of(HybridLinearKVPool(MHATokenToKVPool(1)), states(**side), PAGE, 0, {KV: HEADS}, Shard())


def test_what_is_switched_off_beside_states_is_not() -> None:
    held = states(ngram_pool=SimpleNamespace(enabled=False), short_conv_pool=None, replayssm_k=None)
    assert layout_of(HybridLinearKVPool(MHATokenToKVPool(1)), held, PAGE, 0, {KV: HEADS}, Shard()).groups


def test_heads_that_are_not_the_models_are_bound_to_the_tensor_size() -> None:
    found = layout_of(MHATokenToKVPool(2, heads=3), None, PAGE, 0, {KV: HEADS}, Shard(0, 2))
    assert found.spec.shard.heads == (0,)


PAGES = st.integers(1, 12)


@given(PAGES, st.integers(1, 8), st.data())
def test_a_table_of_tokens_ends_with_the_slots(pages: int, page: int, data: st.DataObject) -> None:
    held = data.draw(st.integers(0, pages))
    numbers = np.array(data.draw(st.permutations(range(20)))[:held], np.int64)
    slots = (numbers[:, None] * page + np.arange(page)).reshape(-1)
    table = PoolGroup(KV).table(pages, page, slots)
    assert table.dtype == np.int64
    assert len(table) == pages * page
    assert (table[: (pages - held) * page] == -1).all()
    assert table[(pages - held) * page :].tolist() == slots.tolist()
    paged = PoolGroup(KV, blocks_are_pages=True).table(pages, page, slots)
    assert paged.tolist() == [-1] * (pages - held) + numbers.tolist()


@given(PAGES, st.integers(0, 100))
def test_a_table_of_states_has_one_at_the_chains_end(pages: int, slot: int) -> None:
    group = PoolGroup(MAMBA)
    assert group.table(pages, PAGE, np.array([slot])).tolist() == [-1] * (pages - 1) + [slot]
    assert group.table(pages, PAGE, np.empty(0, np.int64)).tolist() == [-1] * pages


def test_a_pool_without_slots_has_a_table_of_no_blocks() -> None:
    full, sliding = layout("swa").tables(3, {KV: np.arange(3 * PAGE)})
    assert full.tolist() == list(range(3 * PAGE))
    assert sliding.tolist() == [-1] * 3 * PAGE


def test_sglangs_own_classes_are_told_by_name() -> None:
    """The stand-ins of these tests are called as SGLang's are; a subclass of another name may pack otherwise."""
    assert {each.__name__ for each in (MHATokenToKVPool, MLATokenToKVPool, SWAKVPool, HybridLinearKVPool)} == {
        "MHATokenToKVPool", "MLATokenToKVPool", "SWAKVPool", "HybridLinearKVPool",
    }  # fmt: skip
