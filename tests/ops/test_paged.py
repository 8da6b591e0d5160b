"""Registration: what is accepted as it is, what is refused and with which words."""

from __future__ import annotations

import pytest
import torch

from layerflow.errors import ExtentError, SpecError
from layerflow.ops.paged import PagedMemory
from layerflow.spec import GroupSpec, ModelSpec, Plane

BLOCKS, BLOCK_SIZE, HEADS, DIM = 5, 4, 2, 8
KV = (Plane("k", "bfloat16", (HEADS, DIM)), Plane("v", "bfloat16", (HEADS, DIM)))
SPEC = ModelSpec("m", "c", (GroupSpec("full", BLOCK_SIZE, (0, 1), KV),), chunk_tokens=8)
SHAPE = (BLOCKS, BLOCK_SIZE, HEADS, DIM)

Tensors = dict[int, dict[str, torch.Tensor]]


def tensors() -> Tensors:
    return {layer: {name: torch.zeros(SHAPE, dtype=torch.bfloat16) for name in ("k", "v")} for layer in (0, 1)}


def refused(change: Tensors, words: str) -> None:
    registered = tensors()
    for layer, planes in change.items():
        registered.setdefault(layer, {}).update(planes)
    with pytest.raises(SpecError, match=words):
        PagedMemory(SPEC, registered)


def test_wrong_tensors_are_refused_by_layer_and_plane() -> None:
    good = torch.zeros(SHAPE, dtype=torch.bfloat16)
    refused({1: {"v": good[:, :3]}}, r"layer 1, plane 'v': .*shape \(5, 3, 2, 8\).*\(5, 4, 2, 8\)")
    refused({1: {"k": good[:4]}}, r"layer 1, plane 'k': .*shape \(4, 4, 2, 8\)")
    refused({1: {"v": good.to(torch.float16)}}, "layer 1, plane 'v': .*float16.*bfloat16")
    raw = torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, DIM * 2, dtype=torch.int8)
    refused({0: {"k": raw}}, "layer 0, plane 'k': .*int8.*holds raw bytes")
    refused({0: {"v": good.to("meta")}}, "layer 0, plane 'v': .*on meta, the others are on cpu")
    refused({2: {"k": good, "v": good}}, r"extra layers \[2\]")
    refused({1: {"rope": good}}, r"layer 1: .*\['rope'\] are not in the spec")
    refused({1: {"v": good[0].expand(SHAPE)}}, "layer 1, plane 'v': .*share memory")
    refused({0: {"k": torch.zeros(0, *SHAPE[1:], dtype=torch.bfloat16)}}, "layer 0, plane 'k': .*num_blocks > 0")
    refused({0: {"k": torch.tensor(1.0, dtype=torch.bfloat16)}}, r"layer 0, plane 'k': .*shape \(\)")


def test_missing_layers_and_planes_are_named() -> None:
    registered = tensors()
    del registered[1]["v"]
    with pytest.raises(SpecError, match=r"layer 1: planes \['v'\] are missing"):
        PagedMemory(SPEC, registered)
    del registered[1]
    with pytest.raises(SpecError, match=r"lack layers \[1\]"):
        PagedMemory(SPEC, registered)


def test_one_tensor_for_two_planes_is_refused() -> None:
    registered = tensors()
    registered[1]["v"] = registered[1]["k"]
    with pytest.raises(SpecError, match=r"layer 1: planes 'k' and 'v' start at the same address"):
        PagedMemory(SPEC, registered)


def test_raw_bytes_are_taken_where_the_plane_says_so() -> None:
    spec = ModelSpec("m", "c", (GroupSpec("mla", 4, (0,), (Plane("latent", "uint8", (656,)),)),), chunk_tokens=4)
    memory = PagedMemory(spec, {0: {"latent": torch.zeros(3, 4, 656, dtype=torch.uint8)}})
    assert memory.block_bytes(0) == 4 * 656
    assert memory.num_blocks == (3,)
    with pytest.raises(ExtentError, match="layer 1 does not exist"):
        memory.block_bytes(1)


@pytest.mark.parametrize(
    ("physical", "permutation", "pieces", "packing"),
    [
        ((BLOCKS, BLOCK_SIZE, HEADS, DIM), (0, 1, 2, 3), 1, "NHD"),
        ((BLOCKS, HEADS, BLOCK_SIZE, DIM), (0, 2, 1, 3), 1, "HND"),
        ((HEADS, BLOCKS, BLOCK_SIZE, DIM), (1, 2, 0, 3), HEADS, "HND"),
        ((BLOCK_SIZE, BLOCKS, HEADS, DIM), (1, 0, 2, 3), BLOCK_SIZE, "NHD"),
    ],
)
def test_physical_order_is_read_from_the_strides(
    physical: tuple[int, ...], permutation: tuple[int, ...], pieces: int, packing: str
) -> None:
    view = [torch.zeros(physical, dtype=torch.bfloat16).permute(permutation) for _ in range(4)]
    memory = PagedMemory(SPEC, {0: {"k": view[0], "v": view[1]}, 1: {"k": view[2], "v": view[3]}})
    assert memory.packing == f"k={packing},v={packing}"
    plane = memory.planes(0)[0]
    assert plane.pieces.size == pieces
    assert plane.block_bytes == BLOCK_SIZE * HEADS * DIM * 2
    assert plane.dense is (pieces == 1)


def test_layers_that_differ_are_listed_in_the_packing() -> None:
    registered = tensors()
    registered[1]["v"] = torch.zeros(BLOCKS, HEADS, BLOCK_SIZE, DIM, dtype=torch.bfloat16).permute(0, 2, 1, 3)
    assert PagedMemory(SPEC, registered).packing == "k=NHD,v=NHD@0|k=NHD,v=HND@1"


def test_planes_of_one_blob_are_addressed_by_their_own_start() -> None:
    blob = torch.zeros(2, BLOCKS, 2, BLOCK_SIZE, HEADS, DIM, dtype=torch.bfloat16)
    memory = PagedMemory(SPEC, {layer: {"k": blob[layer, :, 0], "v": blob[layer, :, 1]} for layer in (0, 1)})
    block = BLOCK_SIZE * HEADS * DIM * 2
    assert [plane.base - blob.data_ptr() for layer in (0, 1) for plane in memory.planes(layer)] == [
        0,
        block,
        2 * BLOCKS * block,
        (2 * BLOCKS + 1) * block,
    ]
    assert {plane.stride for plane in memory.planes(1)} == {2 * block}
    (region,) = memory.regions()
    assert (region.address, region.nbytes) == (blob.data_ptr(), blob.numel() * 2)
    region.bytes[:2] = 1
    assert blob.view(torch.uint8).sum() == 2


def test_per_token_interleaving_makes_one_piece_a_token() -> None:
    blob = torch.zeros(BLOCKS, BLOCK_SIZE, 2, HEADS, DIM, dtype=torch.bfloat16)
    registered = tensors()
    registered[0] = {"k": blob[:, :, 0], "v": blob[:, :, 1]}
    plane = PagedMemory(SPEC, registered).planes(0)[1]
    assert plane.pieces.tolist() == [token * 2 * HEADS * DIM * 2 for token in range(BLOCK_SIZE)]
    assert plane.piece_bytes == HEADS * DIM * 2
    assert plane.packing == "NHD"
