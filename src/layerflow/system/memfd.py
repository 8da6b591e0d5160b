"""Memory that several processes map: an anonymous file (memfd), sealed, and one mapping of it.

The server creates it and passes the descriptor over a Unix socket; agents and hosts attach. Needs numpy
and the C library only, so that it costs an engine's process nothing to import.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from typing import Self

import numpy as np
import numpy.typing as npt

from layerflow.errors import ExtentError, ProtocolError, Unsupported

HUGE_PAGE_BYTES = 2 << 20
POPULATE_PIECE_BYTES = 32 << 20  # about 15 ms per call: short enough for memory-map locks and for stopping
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # <asm-generic/mman-common.h>, Linux 5.14
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # nobody can make a mapped page vanish (SIGBUS)
_SEAL_FUTURE_WRITE = 0x10  # <linux/fcntl.h>, Linux 5.1: mappings and writes after this one only read

# mmap.madvise holds the GIL for the whole call; a foreign function call through CDLL does not.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.mincore.restype = ctypes.c_int


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


class SharedMemory:
    """One mapping of a sealed memfd, readable and (unless said otherwise) writable.

    Made by :meth:`create` or :meth:`attach`.
    """

    def __init__(self, fd: int, nbytes: int, page_bytes: int, *, writable: bool = True, mapped: bool = True) -> None:
        self.nbytes = nbytes
        self.page_bytes = page_bytes
        self.writable = writable
        self._mapping: mmap.mmap | None = None
        self._array: npt.NDArray[np.uint8] | None = None
        if mapped:
            self._map(fd)
        self._fd = fd  # last: until here the caller owns it

    def _map(self, fd: int) -> None:
        nbytes, page_bytes, writable = self.nbytes, self.page_bytes, self.writable
        mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        if page_bytes == mmap.PAGESIZE:
            _advise_huge(mapping)
        self._mapping = mapping
        self._array = np.frombuffer(mapping, dtype=np.uint8)

    @classmethod
    def create(
        cls, nbytes: int, *, name: str = "layerflow", hugepages: bool = False, readers_only: bool = False
    ) -> Self:
        """New zeroed memory. Pages are taken from the machine when they are first touched.

        :param nbytes: bytes, rounded up to whole pages; see :attr:`nbytes` for the outcome.
        :param name: what ``/proc/PID/maps`` shows.
        :param hugepages: take reserved 2 MiB pages (hugetlb) instead of ordinary ones.
        :param readers_only: only this mapping may write; whoever gets the descriptor can only read. Kernels before
            Linux 5.1 cannot promise that.
        :raises Unsupported: the machine has not that many huge pages reserved, or no memfd.
        """
        if nbytes < 1:
            raise Unsupported(f"shared memory of {nbytes} bytes: the size must be positive")
        page = HUGE_PAGE_BYTES if hugepages else mmap.PAGESIZE
        nbytes = _round_up(nbytes, page)
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if hugepages:
            flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
        fd = -1
        try:
            fd = os.memfd_create(name, flags)
            os.ftruncate(fd, nbytes)
            if not readers_only:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
                return cls(fd, nbytes, page)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            memory, fd = cls(fd, nbytes, page), -1
            _seal_for_readers(memory.fd)
            return memory
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            hint = (
                f"reserve {nbytes // HUGE_PAGE_BYTES} pages with vm.nr_hugepages or turn huge pages off"
                if hugepages
                else "choose a smaller size or free memory"
            )
            raise Unsupported(f"cannot create {nbytes} bytes of shared memory: {error.strerror}; {hint}") from error

    @property
    def taken_bytes(self) -> int:
        """What it has of the machine's memory: its pages that any process has touched."""
        return os.fstat(self.fd).st_blocks * 512  # stat(2)

    @classmethod
    def attach(cls, fd: int, nbytes: int, *, writable: bool = True, mapped: bool = True) -> Self:
        """Map memory that another process created.

        :param fd: its descriptor. It is duplicated: the caller still owns, and closes, the one passed in.
        :param nbytes: the creator's :attr:`nbytes`.
        :param writable: map it for writing too; refused where the creator gave it to readers only.
        :param mapped: False = do not map it: only :meth:`read`, :meth:`write` and :attr:`fd` reach it.
        :raises ExtentError: the memory is smaller than `nbytes`.
        :raises ProtocolError: the descriptor is no memory with a sealed size, so mapping it would be unsafe.
        :raises Unsupported: this process may not map that much.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ProtocolError(f"descriptor {fd} is no shared memory: {error.strerror}") from error
        if seals & _SIZE_SEALS != _SIZE_SEALS:
            raise ProtocolError(f"descriptor {fd}: its size is not sealed; a peer could shrink it under this process")
        status = os.fstat(fd)
        if not 0 < nbytes <= status.st_size:
            raise ExtentError(f"shared memory of {nbytes} bytes was announced, descriptor {fd} has {status.st_size}")
        own = os.dup(fd)
        try:
            return cls(own, nbytes, max(mmap.PAGESIZE, status.st_blksize), writable=writable, mapped=mapped)
        except OSError as error:
            os.close(own)
            raise Unsupported(f"cannot map {nbytes} bytes of shared memory: {error.strerror}") from error

    @property
    def fd(self) -> int:
        """The descriptor, to pass to other processes; -1 once closed."""
        return self._fd

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def read(self, at: int, nbytes: int) -> bytes:
        """A copy of some bytes, mapped or not."""
        return bytes(self.view[at : at + nbytes]) if self._array is not None else os.pread(self._fd, nbytes, at)

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Some bytes, mapped or not.

        :raises ExtentError: they do not fit in.
        """
        if self._array is not None:
            self.view[at : at + len(data)] = data
        elif os.pwrite(self._fd, data, at) != len(data):
            raise ExtentError(f"{len(data)} bytes at {at} leave shared memory of {self.nbytes}")

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The mapped bytes: uint8, shape ``(nbytes,)``.

        :raises ExtentError: after :meth:`close`, or it is not mapped here.
        """
        if self._array is None:
            raise ExtentError("shared memory is used after it was closed, or where it is not mapped")
        return self._array

    @property
    def view(self) -> memoryview:
        """The mapped bytes as a memoryview, the quickest way to read or write a few of them."""
        return self.array.data

    @property
    def address(self) -> int:
        """Where the mapping starts in this process, 0 = it is not mapped. Valid while this object is open or a view
        of it lives."""
        return int(self.array.ctypes.data) if self._array is not None or self.closed else 0

    def populate(self, start: int = 0, stop: int | None = None) -> None:
        """Take the pages of bytes ``start:stop`` from the machine and map them here, before first use.

        Never changes content, runs without the GIL, and may run on any thread while others use the memory.
        Each mapping has its own page tables: every process populates its own (0.1 s per GiB for a second one,
        0.5 s per GiB for the first).

        :raises ExtentError: outside the memory.
        :raises Unsupported: the machine ran out of memory (or of reserved huge pages).
        """
        array = self.array  # holds the mapping for the length of this call, whoever closes meanwhile
        stop = self.nbytes if stop is None else stop
        if not 0 <= start <= stop <= self.nbytes:
            raise ExtentError(f"populate bytes {start}:{stop} of shared memory that has {self.nbytes}")
        begin = start // self.page_bytes * self.page_bytes
        end = min(_round_up(stop, self.page_bytes), self.nbytes)
        for at in range(begin, end, POPULATE_PIECE_BYTES):
            _populate_piece(array[at : min(at + POPULATE_PIECE_BYTES, end)], self.writable)

    def missing_bytes(self, start: int, stop: int) -> int:
        """Return how many of bytes ``start:stop`` have no pages yet. Reserved huge pages miss nothing."""
        if self.page_bytes > mmap.PAGESIZE:
            return 0
        begin = start // mmap.PAGESIZE * mmap.PAGESIZE
        piece = self.array[begin:stop]
        pages = np.zeros(-(-piece.nbytes // mmap.PAGESIZE), dtype=np.uint8)
        if _libc.mincore(piece.ctypes.data, piece.nbytes, pages.ctypes.data) != 0:
            return int(piece.nbytes)
        return int(np.count_nonzero(~pages & 1)) * mmap.PAGESIZE

    def unmap_pages(self, start: int, stop: int) -> None:
        """Take whole pages within ``start:stop`` out of this process's page tables; their bytes stay as they are.

        A process with millions of mapped pages takes long to die, and its sockets hang up only after that.
        """
        begin, end = _round_up(start, self.page_bytes), stop // self.page_bytes * self.page_bytes
        if begin < end:
            piece = self.array[begin:end]
            _libc.madvise(piece.ctypes.data, piece.nbytes, mmap.MADV_DONTNEED)

    def close(self) -> bool:
        """Close the descriptor and unmap; calling it again does nothing.

        Memory is never unmapped under a user: while other views of :attr:`array` or :attr:`view` live, the
        mapping stays, and goes with the last of them.

        :returns: whether it is unmapped already.
        """
        mapping, self._mapping, self._array = self._mapping, None, None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if mapping is None:
            return True
        try:
            mapping.close()
        except BufferError:  # a view lives on; it holds the mapping, whose deallocation unmaps
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


def _advise_huge(mapping: mmap.mmap) -> None:
    """Ask for transparent huge pages; kernels without them for shared memory say EINVAL, which is fine."""
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def _seal_for_readers(fd: int) -> None:
    """Let nobody map it for writing from here on. Kernels that lack this seal say EINVAL; its readers map read-only."""
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


def _populate_piece(piece: npt.NDArray[np.uint8], writable: bool) -> None:
    advice = MADV_POPULATE_WRITE if writable else MADV_POPULATE_READ
    while _libc.madvise(piece.ctypes.data, piece.nbytes, advice) != 0:
        code = ctypes.get_errno()
        if code in (errno.EINTR, errno.EAGAIN):
            continue
        if code == errno.EINVAL:  # before Linux 5.14: a read fault allocates shared pages too, and races with nobody
            piece[:: mmap.PAGESIZE].max(initial=0)
            return
        raise Unsupported(
            f"cannot take {piece.nbytes} bytes of shared memory from the machine: {os.strerror(code)}; "
            "choose a smaller pool or free memory"
        )
