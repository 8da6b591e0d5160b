"""What holds of a device on this machine, found by using it; takes some seconds."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from layerflow.device import Device, device_for, is_emulated
from layerflow.device.accelerator import Accelerator
from layerflow.errors import LayerflowError
from layerflow.findings import Finding, ok, problem, warning
from layerflow.objects import object_bytes
from layerflow.ops.copier import copier_for
from layerflow.ops.extents import BlockList
from layerflow.ops.paged import PagedMemory
from layerflow.spec import GroupSpec, ModelSpec, Plane
from layerflow.system.memfd import SharedMemory
from layerflow_cli.device_versions import examine_versions

BLOCKS, TOKENS, ROW = 256, 16, 1024
PATIENCE_S = 10.0
PLANES = (Plane("k", "uint8", (ROW,)), Plane("v", "uint8", (ROW,)))
SPEC = ModelSpec("doctor", "doctor", (GroupSpec("full", TOKENS, (0,), PLANES),), chunk_tokens=TOKENS * BLOCKS)


def examine_device(name: str) -> Iterator[Finding]:
    """Every check; the first that fails ends them, but for the versions, which are told whatever fails.

    :param name: e.g. ``"cuda"`` or ``"npu:1"``.
    """
    yield from examine_versions(name.partition(":")[0])
    try:
        device = device_for(name)
    except LayerflowError as error:
        yield problem("device", str(error), f"install the driver, and torch for {name.split(':', maxsplit=1)[0]}")
        return
    yield _found(device, name)
    arena = SharedMemory.create(_arena_bytes(), name="layerflow-doctor")
    pinned = False
    try:
        pinned_as = _pinning(device, arena)
        pinned = pinned_as.state.value == "ok" and device.kind != "cpu"
        yield pinned_as
        checks = [("streams and events", _events), ("copies", _copies)]
        if device.kind == "cuda":
            checks.append(("copies by kernel", _kernel_copies))
        for check, examine in checks:
            try:
                yield examine(device, name, arena)
            except Exception as error:  # noqa: BLE001 - whatever a driver raises is what the check has found
                yield problem(check, f"{type(error).__name__}: {error}", "see the driver's log; engines would fail so")
                return
    finally:
        if pinned:
            device.unpin(arena.address)
        arena.close()


def _found(device: Device, name: str) -> Finding:
    emulated = is_emulated(name)
    count = device.capabilities().count
    found = f"{name}: {count} visible, torch {torch.__version__}"
    if emulated:
        return warning("device", f"{found}; CANN emulated", "what follows says nothing of a real NPU")
    return ok("device", found)


def _pinning(device: Device, arena: SharedMemory) -> Finding:
    if device.kind == "cpu":
        return ok("pinning", "the cpu copies from any memory")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    told = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"
    arena.populate()
    began = time.perf_counter()
    try:
        done = device.pin(arena.address, arena.nbytes)
    except LayerflowError as error:
        return warning("pinning", f"{error} (limit: {told})", "raise ulimit -l; without, each block is a copy")
    if not done:
        return warning("pinning", "this build cannot pin memory", "install a torch_npu with npurt(), or newer")
    seconds = time.perf_counter() - began
    return ok("pinning", f"{arena.nbytes >> 20} MiB at {arena.nbytes / seconds / 1e9:.1f} GB/s (limit: {told})")


def _events(device: Device, name: str, arena: SharedMemory) -> Finding:
    event = device.record()
    device.wait(event)
    if not _done(event.query):
        return problem("streams and events", f"an event was not done after {PATIENCE_S:.0f} s", "is the device busy?")
    return ok("streams and events", "an event was recorded, waited for by a stream, and seen done")


def _copies(device: Device, name: str, arena: SharedMemory) -> Finding:
    """Each block as a range."""
    return _there_and_back(device, name, arena, "copies", "ranges")


def _kernel_copies(device: Device, name: str, arena: SharedMemory) -> Finding:
    """By a kernel on the device's cores."""
    device.prepare()
    if not isinstance(device, Accelerator) or device.kernel is None:
        advice = "blocks below 64 KiB move slower, and hold the engine up; the log says why: is Triton there, and gcc?"
        return warning("copies by kernel", "this device has no such kernel", advice)
    return _there_and_back(device, name, arena, "copies by kernel", "kernel")


def _there_and_back(device: Device, name: str, arena: SharedMemory, check: str, way: str) -> Finding:
    """Blocks go from the device to the arena and back into other blocks, and must be equal then."""
    expected = np.random.default_rng().integers(0, 256, (2, BLOCKS, TOKENS, ROW), dtype=np.uint8)
    planes = {plane: torch.empty((2 * BLOCKS, TOKENS, ROW), dtype=torch.uint8, device=name) for plane in ("k", "v")}
    memory = PagedMemory(SPEC, {0: planes})
    here, there = np.split(np.random.default_rng(1).permutation(2 * BLOCKS).astype(np.int64), 2)
    for plane, rows in zip("kv", expected, strict=True):
        whole = np.zeros((2 * BLOCKS, TOKENS, ROW), np.uint8)
        whole[here] = rows
        planes[plane].copy_(torch.from_numpy(whole))
    copier = copier_for(memory, arena, device)
    copier.way = way
    before = device.copies.counts
    for table, move in ((here, copier.save), (there, copier.load)):
        zeros = np.zeros(BLOCKS, np.int64)
        blocks = BlockList(memory, 0, arena.nbytes, table, zeros, zeros + BLOCKS, np.arange(BLOCKS))
        event = move(blocks.extents(0, 0, BLOCKS), device.record())
        if event is not None and not _done(event.query):
            return problem(check, f"a copy was not done after {PATIENCE_S:.0f} s", "is the device busy?")
    copier.close()
    wrong = sum(
        int((planes[plane].cpu().numpy()[there] != rows).any((1, 2)).sum())
        for plane, rows in zip("kv", expected, strict=True)
    )
    if wrong:
        advice = "do not use this device" if way == "ranges" else 'set transfer.copy_way = "ranges"'
        return problem(check, f"{wrong} of {2 * BLOCKS} blocks came back with other bytes", advice)
    batches, calls, single, _, kernels = (now - then for now, then in zip(device.copies.counts, before, strict=True))
    if way == "kernel" and kernels < batches:
        return warning(check, "no batch was copied by it", "see the log: could its lists be pinned?")
    if single:
        return warning(
            check,
            f"{2 * BLOCKS} blocks came back equal; each range was a copy of its own ({single})",
            "pin the arena, and update the driver: cuda 12.8 or newer, CANN with aclrtMemcpyBatchAsync",
        )
    said = f"; {calls or kernels} {'calls' if calls else 'launches'} for {batches} batches" if batches else ""
    return ok(check, f"{2 * BLOCKS} blocks went to the arena and came back equal{said}")


def _arena_bytes() -> int:
    page = 1 << 21
    return -(-object_bytes(SPEC.groups[0], BLOCKS) // page) * page


def _done(query: Callable[[], Any]) -> bool:
    until = time.monotonic() + PATIENCE_S
    while not query():
        if time.monotonic() > until:
            return False
        time.sleep(1e-3)
    return True
