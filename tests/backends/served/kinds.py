"""What may be behind a server's arena, and how a test breaks it."""

from __future__ import annotations

import abc
import contextlib
import shutil
import tempfile
from pathlib import Path

from memcache_client import RemoteMemcache
from meta_service import MetaService
from mooncake_master import MooncakeMaster
from mooncake_owner import Owner
from redis_server import RedisServer

from layerflow.system.memfd import SharedMemory

MIB = 1 << 20


class Kind(abc.ABC):
    """What is behind the servers of one test.

    :param capacity: bytes that it holds, about.
    :param lease_ms: how long what is being read is safe there, where it has leases.
    :param absent: it is not there yet; :meth:`mend` makes it.
    """

    name = ""
    tiered = True  #: there is something behind the arena
    shared = False  #: several servers may use it
    indexed = False  #: the server itself knows what is in it, tails of other prompts too
    keeps: bool | None = True  #: what is in it outlives :meth:`cut`; None = it may
    leases = False  #: reading takes a lease that can run out

    def __init__(self, capacity: int = 64 * MIB, lease_ms: int = 10_000, *, absent: bool = False) -> None:
        self.capacity, self.lease_ms, self.absent = capacity, lease_ms, absent
        self._closing = contextlib.ExitStack()

    @abc.abstractmethod
    def open(self) -> None:
        """Start it, unless it shall be absent."""

    @abc.abstractmethod
    def settings(self) -> dict[str, object]:
        """For a server, by dotted key."""

    def cut(self) -> None:
        """It is out of reach from now on."""
        raise NotImplementedError

    def mend(self) -> None:
        """It is back."""
        raise NotImplementedError

    def close(self) -> None:
        """Clean up."""
        self._closing.close()


class Memory(Kind):
    """Nothing."""

    name = "memory"
    tiered = False

    def open(self) -> None:
        """There is nothing to start."""

    def settings(self) -> dict[str, object]:
        return {}


class Disk(Kind):
    """A folder. Out of reach means that the file system it is on was unmounted: its parent is gone."""

    name = "disk"
    indexed = True

    def open(self) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="layerflow-disk-"))
        self._closing.callback(shutil.rmtree, self._home)
        self._mount, self._away = self._home / "mount", self._home / "away"
        (self._away if self.absent else self._mount).mkdir()
        self.path = self._mount / "objects"

    def settings(self) -> dict[str, object]:
        return {"pool.disk.path": self.path, "pool.disk.capacity": self.capacity}

    def cut(self) -> None:
        self._mount.rename(self._away)

    def mend(self) -> None:
        self._away.rename(self._mount)


class Mooncake(Kind):
    """A real master, and one process that gives the store all its memory, so that the store outlives servers.

    Out of reach means that the master is dead; a new one knows of no object.
    """

    name = "mooncake"
    shared = True
    keeps = False
    leases = True

    def open(self) -> None:
        self.master = self._closing.enter_context(MooncakeMaster(default_kv_lease_ttl=self.lease_ms))
        self._owner: Owner | None = None
        if self.absent:
            self.cut()
        else:
            self._own()

    def settings(self) -> dict[str, object]:
        return {"pool.backend": "mooncake"} | {
            f"pool.mooncake.{key}": value for key, value in self._client(segment_size=0).items()
        }

    def cut(self) -> None:
        self.master.kill()

    def mend(self) -> None:
        self.master.start()
        if self._owner is None:
            self._own()

    def _own(self) -> None:
        self._owner = self._closing.enter_context(Owner(**self._client(segment_size=self.capacity)))

    def _client(self, **more: object) -> dict[str, object]:
        return {"master": self.master.address, "metrics": self.master.url} | more


class Memcache(Kind):
    """A real MetaService, and one process that gives the pool all its memory. CANN is emulated: no NPU takes part.

    Out of reach means that the MetaService is dead. A new one is told of objects by who gives the memory, which the
    dead one had told of them a moment after they were written, or not yet. Its leases outlive every hung host.
    """

    name = "memcache"
    shared = True
    keeps = None

    def open(self) -> None:
        self.meta = self._closing.enter_context(MetaService())
        self._owned = False
        if self.absent:
            self.cut()
        else:
            self._own()

    def settings(self) -> dict[str, object]:
        options = self.meta.options()
        del options["timeout_ms"]
        return {"pool.backend": "memcache"} | {f"pool.memcache.{key}": value for key, value in options.items()}

    def cut(self) -> None:
        self.meta.kill()

    def mend(self) -> None:
        self.meta.start()
        if not self._owned:
            self._own()

    def _own(self) -> None:
        arena = self._closing.enter_context(SharedMemory.create(MIB))
        owner = RemoteMemcache(self.meta.options(dram_size=self.capacity), arena)
        self._closing.callback(owner.kill)
        owner.attach(arena, lambda keys: None)
        self._owned = True


class Redis(Kind):
    """A Redis of its own; the tests of shapes and sizes run on it too."""

    name, shared = "redis", True

    def open(self) -> None:
        self.server = RedisServer()
        self._closing.callback(self.server.kill)

    def settings(self) -> dict[str, object]:
        return {"pool.backend": "redis", "pool.redis.url": self.server.url}


KINDS: tuple[type[Kind], ...] = (Memory, Disk, Mooncake, Memcache)
