from __future__ import annotations

import fcntl
import gc
import mmap
import os
import subprocess
import sys
import tempfile
import threading

import numpy as np
import pytest
from e2e.known import open_fds

from layerflow.errors import ExtentError, ProtocolError, Unsupported
from layerflow.pool.arena import Arena, Warmer
from layerflow.system import memfd
from layerflow.system.memfd import SharedMemory

PAGE = mmap.PAGESIZE


def resident_pages(memory: SharedMemory) -> int:
    """Pages that the kernel holds for the file, whoever mapped them."""
    return os.fstat(memory.fd).st_blocks * 512 // PAGE


def test_two_mappings_see_the_same_bytes():
    with SharedMemory.create(3 * PAGE - 5) as first, SharedMemory.attach(first.fd, first.nbytes) as second:
        assert first.nbytes == 3 * PAGE == len(first.array) == len(second.view)
        assert first.address != second.address and first.fd != second.fd
        first.array[PAGE + 7] = 42
        second.view[5:8] = b"abc"
        assert second.array[PAGE + 7] == 42
        assert first.view[5:8] == b"abc"


def test_another_process_maps_it_by_descriptor():
    with SharedMemory.create(PAGE) as memory:
        code = (
            "import sys; from layerflow.system.memfd import SharedMemory\n"
            "with SharedMemory.attach(int(sys.argv[1]), int(sys.argv[2])) as memory: memory.view[:5] = b'hello'\n"
            "assert 'torch' not in sys.modules"
        )
        subprocess.run(
            [sys.executable, "-c", code, str(memory.fd), str(memory.nbytes)], pass_fds=[memory.fd], check=True
        )
        assert memory.view[:5] == b"hello"


def test_its_size_is_sealed_and_its_descriptor_not_inherited():
    with SharedMemory.create(PAGE) as memory:
        for size in (0, 2 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.fd, size)
        assert not os.get_inheritable(memory.fd)
        with pytest.raises(PermissionError):
            fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_attach_refuses_what_is_not_safe_to_map():
    with tempfile.TemporaryFile() as file, pytest.raises(ProtocolError, match=r"no shared memory|not sealed"):
        file.truncate(PAGE)
        SharedMemory.attach(file.fileno(), PAGE)
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, PAGE)
    with pytest.raises(ProtocolError, match="not sealed"):
        SharedMemory.attach(unsealed, PAGE)
    os.close(unsealed)
    with SharedMemory.create(PAGE) as memory:
        for nbytes in (2 * PAGE, 0, -1):
            with pytest.raises(ExtentError):
                SharedMemory.attach(memory.fd, nbytes)


def test_impossible_sizes_are_refused_without_leaking_a_descriptor():
    gc.collect()  # what earlier tests left behind
    before = open_fds()
    for nbytes in (0, -1, 1 << 62):
        with pytest.raises(Unsupported):
            SharedMemory.create(nbytes)
    gc.collect()
    assert not open_fds() - before


def test_huge_pages_are_given_or_refused_with_advice():
    try:
        with SharedMemory.create(1, hugepages=True) as memory:
            assert memory.nbytes == memfd.HUGE_PAGE_BYTES
    except Unsupported as error:
        assert "vm.nr_hugepages" in str(error)


def test_populate_takes_pages_and_keeps_content():
    with SharedMemory.create(64 * PAGE) as memory:
        memory.view[PAGE : PAGE + 4] = b"kept"
        memory.populate(PAGE, 3 * PAGE)
        assert resident_pages(memory) == 2
        memory.populate(5 * PAGE + 1, 5 * PAGE + 2)
        assert resident_pages(memory) == 3
        memory.populate()
        assert resident_pages(memory) == 64
        assert memory.view[PAGE : PAGE + 4] == b"kept"
        for start, stop in ((-1, 5), (5, 4), (0, 64 * PAGE + 1)):
            with pytest.raises(ExtentError):
                memory.populate(start, stop)


def test_populate_without_the_system_call(monkeypatch):
    monkeypatch.setattr(memfd, "MADV_POPULATE_WRITE", 9999)  # as on kernels before 5.14
    with SharedMemory.create(16 * PAGE) as memory:
        memory.view[0:4] = b"kept"
        memory.populate()
        assert resident_pages(memory) == 16
        assert memory.view[0:4] == b"kept"


def test_close_never_unmaps_under_a_user():
    memory = SharedMemory.create(PAGE)
    part = memory.array[10:20]
    assert memory.close() is False
    part[:] = 7  # a segmentation fault if it were unmapped
    assert part.sum() == 70
    assert memory.close() is True
    assert memory.closed and memory.fd == -1
    with pytest.raises(ExtentError):
        _ = memory.array


def test_the_mapping_goes_with_its_last_view():
    memory = SharedMemory.create(PAGE, name="layerflow-test-view")
    part = memory.view[10:20]
    memory.close()

    def mapped() -> bool:
        with open("/proc/self/maps") as maps:
            return "layerflow-test-view" in maps.read()

    assert mapped()
    del part
    gc.collect()
    assert not mapped()


def test_close_without_views_unmaps_at_once():
    memory = SharedMemory.create(PAGE)
    assert memory.close() is True
    assert memory.close() is True


def test_a_dropped_memory_closes_its_descriptor():
    def is_open() -> bool:  # by its name: another thread may be given the number at once
        return any("layerflow-test-dropped" in opened for opened in open_fds())

    memory = SharedMemory.create(PAGE, name="layerflow-test-dropped")
    assert is_open()
    del memory
    gc.collect()
    assert not is_open()


def test_warming_climbs_from_the_start():
    with Arena(10 * PAGE) as arena:
        assert list(arena.warm(4 * PAGE)) == [4 * PAGE, 8 * PAGE, 10 * PAGE]
        assert list(arena.warm(4 * PAGE)) == []
        assert resident_pages(arena.memory) == 10


def test_the_watermark_counts_only_what_touches_it():
    with Arena(10 * PAGE) as arena:
        arena.populate(5 * PAGE, 6 * PAGE)
        assert arena.warm_bytes == 0
        arena.populate(0, 2 * PAGE)
        arena.populate(PAGE, 3 * PAGE)
        assert arena.warm_bytes == 3 * PAGE


def test_a_warmer_warms_everything_in_the_background():
    with Arena(64 * PAGE) as arena:
        arena.array[:] = np.arange(arena.nbytes, dtype=np.uint64).astype(np.uint8)
        warmer = Warmer(arena, step=8 * PAGE).start()
        assert warmer.join(30)
        assert arena.warm_bytes == arena.nbytes
        assert warmer.error is None and not warmer.running
        assert (arena.array == np.arange(arena.nbytes, dtype=np.uint64).astype(np.uint8)).all()


class SlowArena:
    """An arena whose warming waits for the test."""

    nbytes = 3

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.entered = threading.Event()
        self.warm_bytes = 0

    def warm(self, step):
        while self.warm_bytes < self.nbytes:
            self.entered.set()
            self.gate.acquire()
            self.warm_bytes += 1
            yield self.warm_bytes


def test_a_warmer_stops_between_steps():
    arena = SlowArena()
    warmer = Warmer(arena).start()
    assert arena.entered.wait(30)
    warmer._stop.set()
    arena.gate.release()
    warmer.stop()
    assert arena.warm_bytes == 1 and not warmer.running


def test_a_warmer_that_finds_no_memory_says_so_and_ends():
    class Poor:
        nbytes, warm_bytes = 3, 0

        def warm(self, step):
            raise Unsupported("out of memory")
            yield

    warmer = Warmer(Poor()).start()
    assert warmer.join(30)
    assert "out of memory" in str(warmer.error)


def test_closing_under_a_warmer_is_safe():
    arena = Arena(32 * PAGE)
    warmer = Warmer(arena, step=PAGE).start()
    arena.close()
    assert warmer.join(30)
    assert warmer.error is None


def test_stopping_a_warmer_that_never_started():
    with Arena(PAGE) as arena:
        Warmer(arena).stop()


def test_pages_taken_out_of_the_page_tables_keep_their_bytes() -> None:
    with SharedMemory.create(1 << 20) as memory:
        memory.array[:] = 7
        memory.unmap_pages(100, (1 << 20) - 100)
        memory.unmap_pages(10, 20)
        assert (memory.array == 7).all()


def test_warming_keeps_what_was_written_meanwhile() -> None:
    with Arena(1 << 20) as arena:
        arena.array[:] = 9
        assert list(arena.warm(300_000))[-1] == arena.nbytes
        assert (arena.array == 9).all()


def test_warming_takes_only_memory_that_is_free() -> None:
    """An engine may still have the arena of a server mapped that has died."""
    free = [0.0]
    looked = threading.Event()

    def look() -> float:
        looked.set()
        return free[0]

    with Arena(8 * PAGE) as arena:
        warmer = Warmer(arena, step=PAGE, free=look).start()
        assert looked.wait(30)
        assert arena.warm_bytes == 0 and warmer.running
        free[0] = float("inf")
        assert warmer.join(30)
        assert arena.warm_bytes == arena.nbytes
        free[0] = 0.0
    with Arena(8 * PAGE) as arena:
        warmer = Warmer(arena, step=PAGE, free=look).start()
        warmer.stop()
        assert arena.warm_bytes == 0
