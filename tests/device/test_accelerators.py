"""The stream path of accelerators, one body of tests for cuda and npu.

On npu this is the real torch_npu over the CANN emulator ("CANN emulated"): the API, the order of calls and the
data; nothing here says anything about a real NPU. ``tests/npu/run.sh`` sets that up, in an environment of its own.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from layerflow.device import DeviceEvent, device_for
from layerflow.device.base import CopyCounts
from layerflow.device.poller import Poller
from layerflow.errors import Unsupported
from layerflow.objects import object_bytes
from layerflow.ops.copier import copier_for
from layerflow.ops.extents import BlockList
from layerflow.ops.paged import PagedMemory
from layerflow.ops.streamed import StreamCopier
from layerflow.spec import GroupSpec, ModelSpec, Plane
from layerflow.system.memfd import SharedMemory
from layerflow_cli.bench.transfer.device import measure
from layerflow_cli.device_check import examine_device

EMULATED_NPU = bool(os.environ.get("LAYERFLOW_TEST_NPU"))
if EMULATED_NPU:
    importlib.import_module("torch_npu")
elif not torch.cuda.is_available():
    pytest.skip("no cuda device here, and npu tests run by tests/npu/run.sh only", allow_module_level=True)

DEVICE = torch.device("npu" if EMULATED_NPU else "cuda", 0)
PATIENCE = 20.0  # seconds until a test gives up
EMULATED_EVENT_S = int(os.environ.get("CANN_EMU_EVENT_DELAY_US", "0")) * 1e-6
BLOCKS, BLOCK_SIZE, HEADS, DIM = 12, 4, 2, 8
KV = GroupSpec("full", BLOCK_SIZE, (0, 2), (Plane("k", "bfloat16", (HEADS, DIM)), Plane("v", "bfloat16", (HEADS, DIM))))
LATENT = GroupSpec("mla", BLOCK_SIZE, (1,), (Plane("latent", "float16", (32,)), Plane("scale", "int8", (3,))))
SPEC = ModelSpec("m", "c", (KV, LATENT), chunk_tokens=8)
PER_OBJECT = 2  # blocks
SHAPE = (BLOCKS, BLOCK_SIZE, HEADS, DIM)

Tensors = dict[int, dict[str, torch.Tensor]]


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


class Engine:
    """Paged tensors on the device, with the strides that engines use: one blob for k and v, head-major, plain."""

    def __init__(self) -> None:
        elements = 2 * int(np.prod(SHAPE))
        self.blobs = [
            torch.empty(elements, dtype=torch.bfloat16, device=DEVICE),
            torch.empty(elements, dtype=torch.bfloat16, device=DEVICE),
            torch.empty(BLOCKS * BLOCK_SIZE * 32, dtype=torch.float16, device=DEVICE),
            torch.empty(BLOCKS * BLOCK_SIZE * 3, dtype=torch.int8, device=DEVICE),
        ]
        blob = self.blobs[0].view(BLOCKS, 2, *SHAPE[1:])
        head_major = self.blobs[1].view(2, BLOCKS, HEADS, BLOCK_SIZE, DIM).permute(0, 1, 3, 2, 4)
        self.tensors: Tensors = {
            0: {"k": blob[:, 0], "v": blob[:, 1]},
            1: {
                "latent": self.blobs[2].view(BLOCKS, BLOCK_SIZE, 32),
                "scale": self.blobs[3].view(BLOCKS, BLOCK_SIZE, 3),
            },
            2: {"k": head_major[0], "v": head_major[1]},
        }

    def _raw(self) -> list[torch.Tensor]:
        return [
            torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(
                blob.untyped_storage(), 0, (blob.numel() * blob.element_size(),), (1,)
            )
            for blob in self.blobs
        ]

    def fill(self, seed: int) -> None:
        for number, raw in enumerate(self._raw()):
            raw.copy_(random_bytes(raw.numel(), seed * 10 + number))

    def bytes(self) -> list[np.ndarray]:
        return [raw.cpu().numpy() for raw in self._raw()]


@pytest.fixture
def poller() -> Iterator[Poller]:
    poller = Poller("test-poller")
    yield poller
    assert poller.close()


@pytest.fixture
def arena() -> Iterator[SharedMemory]:
    arena = SharedMemory.create(1 << 16)
    yield arena
    arena.close()


def lists(memory: PagedMemory, arena: SharedMemory, ids: list[int]) -> list[BlockList]:
    """The same engine blocks in every group, in objects one behind the other."""
    at, result = 0, []
    for number, group in enumerate(SPEC.groups):
        n = np.arange(len(ids), dtype=np.int64)
        size = object_bytes(group, PER_OBJECT)
        held = np.full(n.size, PER_OBJECT, np.int64)
        offsets = at + n // PER_OBJECT * size
        result.append(BlockList(memory, number, arena.nbytes, np.array(ids, np.int64), offsets, held, n % PER_OBJECT))
        at += -(-len(ids) // PER_OBJECT) * size
    return result


def native_batches() -> tuple[int, int]:
    """What the emulated runtime has seen: batch calls, and copies in them."""
    calls, copies = ctypes.c_uint64(), ctypes.c_uint64()
    if EMULATED_NPU:
        ctypes.CDLL("libascendcl.so").cann_emu_batches(ctypes.byref(calls), ctypes.byref(copies))
    return calls.value, copies.value


def still_running(event: DeviceEvent, began: float) -> None:
    """The emulator completes an event 3 ms after it was recorded; a real device may be done at once.

    :param began: monotonic seconds, before it was recorded: a machine that was busy for so long shows nothing.
    """
    done = event.query()
    assert not (EMULATED_NPU and done) or time.monotonic() - began >= EMULATED_EVENT_S


def done(poller: Poller, event: DeviceEvent) -> threading.Event:
    fired = threading.Event()
    poller.watch(event, fired.set)
    return fired


def test_what_the_device_says_of_itself() -> None:
    device = device_for(DEVICE)
    assert device.kind == DEVICE.type
    capabilities = device.capabilities()
    assert capabilities.streams
    assert capabilities.events
    assert capabilities.pinned
    assert capabilities.count >= 1


def test_an_event_is_seen_done_by_the_poller_and_not_before(poller: Poller) -> None:
    device = device_for(DEVICE)
    began = time.monotonic()
    event = device.record()
    still_running(event, began)
    fired = done(poller, event)
    assert fired.wait(PATIENCE)
    assert not EMULATED_NPU or time.monotonic() - began >= EMULATED_EVENT_S
    assert event.query()
    device.wait(event)


def test_saved_blocks_come_back_byte_for_byte(poller: Poller, arena: SharedMemory) -> None:
    engine = Engine()
    memory = PagedMemory(SPEC, engine.tensors)
    assert memory.packing == "k=NHD,v=NHD@0|k=HND,v=HND@2;latent=ND,scale=ND"
    device = device_for(DEVICE)
    assert device.pin(arena.address, arena.nbytes)
    copier = copier_for(memory, arena, device)
    assert isinstance(copier, StreamCopier)
    ids = [7, 8, 3, 11, 0]
    blocks = lists(memory, arena, ids)
    layers = [(layer, blocks[group]) for layer, (group, _) in enumerate(SPEC.layer_places())]

    engine.fill(1)
    saved = engine.bytes()
    before = native_batches()
    computed = device.record()
    for layer, listed in layers:
        began = time.monotonic()
        event = copier.save(listed.extents(layer, 0, len(ids)), after=computed)
        still_running(event, began)
        assert done(poller, event).wait(PATIENCE)
    assert arena.array.any()

    engine.fill(2)
    noise = engine.bytes()
    free = device.record()
    for layer, listed in layers:
        event = copier.load(listed.extents(layer, 0, len(ids)), after=free)
        device.wait(event)
        assert done(poller, event).wait(PATIENCE)
    device.unpin(arena.address)
    counted = device.copies.counts
    assert (counted.batches, counted.single) == (2 * len(layers), 0) or not device.native
    if EMULATED_NPU:
        calls, copies = (now - then for now, then in zip(native_batches(), before, strict=True))
        assert calls == counted.calls == 2 * len(layers), "one native call for each batch"
        ranges = [listed.extents(layer, 0, len(ids)).nbytes.size for layer, listed in layers]
        assert copies == 2 * sum(ranges) > calls

    moved = [np.zeros(raw.size, bool) for raw in saved]
    for group, layer, blob in ((0, 0, 0), (0, 2, 1), (1, 1, 2), (1, 1, 3)):
        base = engine.blobs[blob].data_ptr()
        listed = blocks[group].extents(layer, 0, len(ids))
        for address, nbytes in zip(listed.engine - base, listed.nbytes, strict=True):
            if 0 <= address < moved[blob].size:
                moved[blob][address : address + nbytes] = True
    for before, after, scrambled, mine in zip(saved, engine.bytes(), noise, moved, strict=True):
        assert mine.sum() == len(ids) * mine.size // BLOCKS
        np.testing.assert_array_equal(after, np.where(mine, before, scrambled))


def test_runs_are_one_copy_each_and_parts_of_a_block_too(poller: Poller, arena: SharedMemory) -> None:
    engine = Engine()
    memory = PagedMemory(SPEC, engine.tensors)
    blocks = lists(memory, arena, [4, 5])[1]
    whole = blocks.extents(1, 0, 2)
    assert whole.nbytes.size == 2  # a run per plane
    engine.fill(3)
    copier = copier_for(memory, arena, device_for(DEVICE))
    assert done(poller, copier.save(whole)).wait(PATIENCE)
    expected = arena.array.copy()
    arena.array[:] = 0
    for lo, hi in ((0, 100), (100, 257), (257, memory.block_bytes(1))):
        for block in (0, 1):
            assert done(poller, copier.save(blocks.extents(1, block, block + 1, lo, hi))).wait(PATIENCE)
    np.testing.assert_array_equal(arena.array, expected)


def test_batches_go_by_the_streams_that_torch_has_and_wait_for_an_engine_on_its_own(
    poller: Poller, arena: SharedMemory
) -> None:
    """The engine's thread is on a stream that is not the default one."""
    engine = Engine()
    memory = PagedMemory(SPEC, engine.tensors)
    device = device_for(DEVICE)
    assert device.pin(arena.address, arena.nbytes)
    copier = copier_for(memory, arena, device)
    blocks = lists(memory, arena, [9, 1, 6])[0].extents(0, 0, 3)
    module = torch.get_device_module(DEVICE)
    with module.stream(module.Stream(device=DEVICE)):
        engine.fill(4)
        event = copier.save(blocks, after=device.record())
        assert done(poller, event).wait(PATIENCE)
        expected = arena.array.copy()
        engine.fill(5)
        loaded = copier.load(blocks, after=device.record())
        device.wait(loaded)
        module.current_stream().synchronize()
    arena.array[:] = 0
    again = copier.save(blocks, after=loaded)
    assert done(poller, again).wait(PATIENCE)
    device.unpin(arena.address)
    assert expected.any()
    np.testing.assert_array_equal(arena.array, expected)


def test_the_doctor_copies_blocks_there_and_back_and_compares_them() -> None:
    findings = {finding.check: finding for finding in examine_device(str(DEVICE))}
    own = [] if EMULATED_NPU else ["copies by kernel"]
    assert list(findings) == ["driver", "runtime", "device", "pinning", "streams and events", "copies", *own]
    assert {findings[check].state.value for check in ("pinning", "streams and events", "copies")} == {"ok"}, findings
    if EMULATED_NPU:
        assert "CANN emulated" in findings["device"].found
        assert "V100R001C23SPC005B219" in findings["driver"].found
        assert "CANN emulated" in findings["driver"].found
        assert f"torch_npu {importlib.metadata.version('torch_npu')}" in findings["runtime"].found
        assert "acl runtime 1.0.0" in findings["runtime"].found
        assert "2 calls for 2 batches" in findings["copies"].found
    else:
        assert findings["copies by kernel"].state.value == "ok"


def test_the_measurement_makes_one_call_for_each_batch() -> None:
    result = measure(device=str(DEVICE), moved_mib=1, turns=1, block_kib=(16, 64), matrix=64)
    assert result["emulated"] is EMULATED_NPU
    assert result["calls_per_batch"] == 1.0
    assert result["register_gb_per_s"] > 0
    assert all(result[way][size]["gbps"] > 0 for way in ("h2d", "d2h") for size in ("16KiB", "64KiB"))


def test_nothing_to_move_still_gives_an_event(poller: Poller, arena: SharedMemory) -> None:
    memory = PagedMemory(SPEC, Engine().tensors)
    copier = copier_for(memory, arena, device_for(DEVICE))
    assert done(poller, copier.load(lists(memory, arena, [4])[0].extents(0, 1, 1))).wait(PATIENCE)


def is_pinned(address: int) -> bool:
    """What the runtime knows of the address."""
    if not EMULATED_NPU:
        return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * 1).from_address(address))).is_pinned()
    # aclrtPtrAttributes: device, location type, page size, four reserved words
    attributes = (ctypes.c_uint32 * 7)()
    assert ctypes.CDLL("libascendcl.so").aclrtPointerGetAttributes(ctypes.c_void_p(address), attributes) == 0
    return attributes[1] == 0  # ACL_MEM_LOCATION_TYPE_HOST


def test_pins_are_counted(arena: SharedMemory) -> None:
    device, again = device_for(DEVICE), device_for(DEVICE.type)
    assert not is_pinned(arena.address)
    assert device.pin(arena.address, arena.nbytes)
    assert again.pin(arena.address, arena.nbytes)
    device.unpin(arena.address)
    assert is_pinned(arena.address + arena.nbytes - 1)
    again.unpin(arena.address)
    again.unpin(arena.address)
    assert not is_pinned(arena.address)


@pytest.mark.skipif(not EMULATED_NPU, reason="cuda rounds addresses to pages and refuses nothing here")
def test_a_refused_pin_says_what_to_do(arena: SharedMemory) -> None:
    with pytest.raises(Unsupported, match=r"failed with code 107000; .*ulimit"):
        device_for(DEVICE).pin(arena.address + 1, 4096)


@pytest.mark.skipif(EMULATED_NPU, reason="the kernel is made for cuda")
@pytest.mark.parametrize("width", [16, 96, 512, 1152, 8192])
def test_blocks_by_the_kernel(poller: Poller, width: int) -> None:
    """Blocks of 1 KiB to 512 KiB, by one launch for each batch."""
    group = GroupSpec("full", 64, (0,), (Plane("kv", "uint8", (width,)),))
    spec = ModelSpec("m", "c", (group,), chunk_tokens=64 * 8)
    blocks = torch.randint(0, 256, (32, 64, width), dtype=torch.uint8, device=DEVICE)
    memory = PagedMemory(spec, {0: {"kv": blocks}})
    device = device_for(DEVICE)
    device.prepare()
    slot = object_bytes(group, 8)
    arena = SharedMemory.create(-(-2 * slot // 4096) * 4096)
    assert device.pin(arena.address, arena.nbytes)
    copier = copier_for(memory, arena, device)
    copier.way = "kernel"
    n = np.arange(16, dtype=np.int64)
    here, there = np.split(np.random.default_rng(2).permutation(32).astype(np.int64), 2)
    lists = [
        BlockList(memory, 0, arena.nbytes, table, n // 8 * slot, np.full(16, 8, np.int64), n % 8)
        for table in (here, there)
    ]
    before, counted = blocks.cpu(), device.copies.counts
    saved = copier.save(lists[0].extents(0, 0, 16), after=device.record())
    assert saved is not None
    loaded = copier.load(lists[1].extents(0, 0, 16), after=saved)
    assert loaded is not None and done(poller, loaded).wait(PATIENCE)
    after = blocks.cpu()
    assert torch.equal(after[torch.from_numpy(there)], before[torch.from_numpy(here)])
    assert torch.equal(after[torch.from_numpy(here)], before[torch.from_numpy(here)])
    moved = tuple(now - then for now, then in zip(device.copies.counts, counted, strict=True))
    assert moved == CopyCounts(batches=2, kernels=2)
    copier.close()
    device.unpin(arena.address)
    arena.close()
