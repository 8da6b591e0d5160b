"""Objects' headers in memcache, read and written through memory of our own."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator, Sequence

from layerflow.hosts.backend import Unusable
from layerflow.hosts.memcache.client.client import G2H, H2G, AddressRange, MemcacheClient
from layerflow.hosts.memcache.client.codes import explain
from layerflow.objects import HEADER_BYTES

SLOTS = 1024


class Scratch:
    """Room for :data:`SLOTS` headers, and one header of zeros. One thread's.

    :raises Unusable: the transport refuses the memory.
    """

    def __init__(self, calls: MemcacheClient) -> None:
        self._calls = calls
        self._memory = mmap.mmap(-1, (SLOTS + 1) * HEADER_BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._zeros = self._address + SLOTS * HEADER_BYTES
        code = calls.register(self._address, len(self._memory))
        if code != 0:
            raise Unusable(f"memcache cannot register memory ({explain(code)}); raise the limit of locked memory")

    def read(self, gvas: Sequence[int], until: float) -> Iterator[tuple[int, bytes]]:
        """For each address in the pool the code of the copy, and the header there."""
        for first in range(0, len(gvas), SLOTS):
            batch = gvas[first : first + SLOTS]
            spans = [AddressRange(gva, self._address + at * HEADER_BYTES, HEADER_BYTES) for at, gva in enumerate(batch)]
            for at, code in enumerate(self._calls.copy(spans, G2H, max(until, time.monotonic() + 0.1))):
                yield code, self._memory[at * HEADER_BYTES : (at + 1) * HEADER_BYTES]

    def blank(self, gvas: Sequence[int], until: float) -> list[int]:
        """Write zeros where headers will be; a code for each."""
        return self._calls.copy([AddressRange(gva, self._zeros, HEADER_BYTES) for gva in gvas], H2G, until)


OBJECTS = 16
"""The MetaService spreads them over the clients that give memory."""
LEASE_MS = 2000


def reaches_all(calls: MemcacheClient, scratch: Scratch) -> bool:
    """Write a few bytes wherever the MetaService allocates; nothing of it becomes visible.

    :raises Unreachable: the MetaService does not answer.
    """
    nonce = os.urandom(8).hex()
    names = [f"layerflow-trial-{nonce}-{at}" for at in range(OBJECTS)]
    gvas = calls.allocate(names, [HEADER_BYTES] * OBJECTS, LEASE_MS)
    given = [at for at, gva in enumerate(gvas) if gva]
    try:
        codes = scratch.blank([gvas[at] for at in given], time.monotonic() + LEASE_MS / 1e3)
    finally:
        calls.remove([names[at] for at in given])
    return not any(codes)
