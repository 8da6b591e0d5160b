"""A worker whose cache vLLM can unmap on a CPU: as on a device, whatever touches it then ends the process.

vLLM's own worker for CPUs does not sleep. This one tells its connector what vLLM's worker for devices tells it, at the
same moments.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.worker.cpu_worker import CPUWorker

_PROTECT = ctypes.CDLL(None, use_errno=True).mprotect
_PROTECT.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class SleepingWorker(CPUWorker):  # type: ignore[misc]
    """Takes the access to its cache away, and gives it back with other contents."""

    def sleep(self, level: int = 1) -> None:
        """As vLLM's for devices, of the cache."""
        get_kv_transfer_group().unregister_kv_caches()
        self._protect(0)

    def discard(self, tags: tuple[str, ...]) -> None:
        """The same."""
        assert tags == ("kv_cache",)
        self.sleep()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """The same."""
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
        for storage in self._storages():
            ctypes.memset(storage.data_ptr(), 0x55, storage.nbytes())
        get_kv_transfer_group().restore_kv_caches()

    def _storages(self) -> list[Any]:
        storages = [tensor.untyped_storage() for tensor in self.model_runner.kv_caches]
        return list({storage.data_ptr(): storage for storage in storages}.values())

    def _protect(self, access: int) -> None:
        """Of whole pages."""
        for storage in self._storages():
            first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            nbytes = (storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE * mmap.PAGESIZE
            if _PROTECT(first, nbytes, access):
                raise OSError(ctypes.get_errno(), "mprotect")
