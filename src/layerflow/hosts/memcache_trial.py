"""Does a client that has just joined reach the memory of the others?

One that joins after another died without a farewell has been seen to lack the memory of some, for as long as it lives;
all its copies there fail. When it left and joined again it was whole.
"""

from __future__ import annotations

import os
import time

from layerflow.hosts.memcache_calls import Calls
from layerflow.hosts.memcache_scratch import Scratch
from layerflow.objects import HEADER_BYTES

OBJECTS = 16
"""The MetaService spreads them over the clients that give memory."""
LEASE_MS = 2000


def reaches_all(calls: Calls, scratch: Scratch) -> bool:
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
