"""A pool of memcache_hybrid in this process's memory: its client's calls and codes, and what a host process sees of it.

Addresses are those of the pool's memory here, so that copies move real bytes. As with the real one a second allocation
of a key answers with the first one's address, a put is write-once, and what is not finished is not there.
"""

from __future__ import annotations

import ctypes
import mmap
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hosts.fake_backend import FakeBackend

from layerflow.hosts.backend import pool_name

HOST = "agent.fake_memcache:FolderHost"
NOT_THERE, INVALID, UNLINKED, UNKNOWN = -3007, -3000, -3014, -3102
L2G, G2L, G2H, H2G = range(4)


@dataclass
class Stored:
    """One key. :param number: of the client that allocated it."""

    at: int
    nbytes: int
    complete: bool = False
    leases: Counter[int] = field(default_factory=Counter)


class FakePool:
    """What the MetaService and the clients that give memory are to a client.

    :param folder: where complete keys are told to :class:`FolderHost`.
    """

    def __init__(self, folder: Path, nbytes: int = 8 << 20) -> None:
        self.folder = folder
        self.memory = mmap.mmap(-1, nbytes)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.objects: dict[str, Stored] = {}
        self.room = nbytes
        self.end = 0
        self.clients = 0
        self.calls: Counter[str] = Counter()
        self.copied: Counter[int] = Counter()
        #: calls that wait until their gate is opened, by method, or by direction for copies
        self.gates: dict[str | int, threading.Event] = {}
        #: the gates at which a call has arrived
        self.arrived: defaultdict[str | int, threading.Event] = defaultdict(threading.Event)
        self.copy_codes: dict[int, int] = {}
        self.away = False
        self._lock = threading.RLock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)

    @property
    def urls(self) -> dict[str, str]:
        """Where its MetaService is; connections wait in its socket's queue, and nothing is said on them."""
        address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        return {"meta_service_url": f"tcp://{address}", "metrics_url": f"http://{address}"}

    def complete(self) -> set[str]:
        """Keys that readers find."""
        return {name for name, stored in self.objects.items() if stored.complete}

    def leases(self) -> int:
        """All that are held."""
        return sum(stored.leases.total() for stored in self.objects.values())

    def bytes_of(self, name: str) -> bytearray:
        """A view of the object would outlive it: a copy."""
        stored = self.objects[name]
        return bytearray(self.memory[stored.at - self.base : stored.at - self.base + stored.nbytes])

    def wake(self, name: str, offset: int, data: bytes) -> None:
        """Spoil an object's bytes."""
        at = self.objects[name].at - self.base + offset
        self.memory[at : at + len(data)] = data

    def drop(self, name: str) -> None:
        """As eviction does."""
        with self._lock:
            self.objects.pop(name, None)
            (self.folder / name).unlink(missing_ok=True)

    def end_service(self) -> None:
        """The MetaService ends, and another one is there at once that knows of nothing."""
        with suppress(BlockingIOError):
            while True:
                self._listener.accept()[0].close()

    def gate(self, call: str | int) -> threading.Event:
        """Such calls wait from now on; set the event to let them go."""
        self.gates[call] = threading.Event()
        self.arrived[call].clear()
        return self.gates[call]

    def pass_gate(self, call: str | int) -> None:
        gate = self.gates.get(call)
        self.arrived[call].set()
        if gate is not None:
            gate.wait()

    def close(self) -> None:
        for gate in self.gates.values():
            gate.set()
        self._listener.close()


class Info:
    """As memcache's ``KeyInfo``."""

    def __init__(self, nbytes: int, gvas: list[int]) -> None:
        self._nbytes, self._gvas = nbytes, gvas

    def size(self) -> int:
        return self._nbytes

    def gva_list(self) -> list[int]:
        return self._gvas


class FakeStore:
    """As memcache's ``DistributedObjectStore``, connected."""

    def __init__(self, pool: FakePool) -> None:
        self.pool = pool
        pool.clients += 1
        self.number = pool.clients
        self.closed = False

    def get_local_service_id(self) -> int:
        return self.number

    def register_buffer(self, address: int, nbytes: int) -> int:
        return 0

    def close(self) -> int:
        self.closed = True
        return 0

    def batch_is_exist(self, names: Sequence[str]) -> list[int]:
        self._enter("batch_is_exist")
        if self.pool.away:
            return [UNLINKED] * len(names)
        return [int(name in self.pool.complete()) for name in names]

    def batch_get_key_info(self, names: Sequence[str], flag: int = 1) -> list[Info]:
        self._enter("batch_get_key_info")
        found = [self.pool.objects.get(name) for name in names]
        return [
            Info(it.nbytes, [it.at]) if it is not None and (it.complete or not flag) else Info(0, []) for it in found
        ]

    def batch_add_lease(self, names: Sequence[str], ttl_ms: int = 0) -> list[int]:
        self._enter("batch_add_lease")
        if self.pool.away:
            return [UNLINKED] * len(names)
        codes = []
        for name in names:
            stored = self.pool.objects.get(name)
            there = stored is not None and stored.complete
            if there:
                stored.leases[self.number] += 1
            codes.append(0 if there else NOT_THERE)
        return codes

    def batch_remove_lease(self, names: Sequence[str]) -> int:
        self._enter("batch_remove_lease")
        for name in names:
            stored = self.pool.objects.get(name)
            if stored is None or not stored.leases[self.number]:
                return UNKNOWN
            stored.leases[self.number] -= 1
        return 0

    def batch_alloc(self, names: Sequence[str], sizes: Sequence[int], media: int = 1, ttl_ms: int = 0) -> list[int]:
        self._enter("batch_alloc")
        pool, gvas = self.pool, []
        for name, nbytes in zip(names, sizes, strict=True):
            if name not in pool.objects and pool.end + nbytes <= pool.room:
                pool.objects[name] = Stored(pool.base + pool.end, nbytes)
                pool.end += -(-nbytes // 4096) * 4096
            stored = pool.objects.get(name)
            gvas.append(0 if stored is None else stored.at)
        return gvas

    def batch_copy(
        self, gvas: Sequence[int], addresses: Sequence[int], sizes: Sequence[int], direct: int = 1, flag: int = 0
    ) -> int:
        pool = self.pool
        pool.calls["batch_copy"] += 1
        pool.pass_gate(direct)
        if code := pool.copy_codes.get(direct, 0):
            return code
        for gva, address, nbytes in zip(gvas, addresses, sizes, strict=True):
            if not pool.base <= gva <= pool.base + len(pool.memory) - nbytes:
                return UNKNOWN
            ctypes.memmove(*((gva, address) if direct in (L2G, H2G) else (address, gva)), nbytes)
            pool.copied[direct] += nbytes
        return 0

    def batch_write_finish(self, names: Sequence[str], res: Sequence[int]) -> list[int]:
        self._enter("batch_write_finish")
        codes = []
        for name, failed in zip(names, res, strict=True):
            assert not failed, "a writer never says so: the key may be another's"
            stored = self.pool.objects.get(name)
            if stored is not None:
                stored.complete = True
                (self.pool.folder / name).touch()
            codes.append(0 if stored is not None else INVALID)
        return codes

    def remove_batch(self, names: Sequence[str]) -> list[int]:
        self._enter("remove_batch")
        codes = [0 if name in self.pool.objects else UNKNOWN for name in names]
        for name in names:
            self.pool.drop(name)
        return codes

    def _enter(self, method: str) -> None:
        self.pool.calls[method] += 1
        assert not self.closed, f"{method} after close"
        self.pool.pass_gate(method)


class FolderHost(FakeBackend):
    """A host process that finds what a :class:`FakePool` has by the files in its folder."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__({})
        self._folder = Path(options["folder"])

    def lookup(self, keys: Sequence[bytes], until: float) -> list[bool]:
        return [(self._folder / pool_name(key)).exists() for key in keys]
