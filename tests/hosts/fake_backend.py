"""A backend in the host's own memory, with switches for everything that goes wrong with real ones.

A host finds it by the name :data:`NAME` where the folder above this one is on its path.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from layerflow.hosts.backend import (
    OK,
    Backend,
    BackendInfo,
    IndexEntry,
    ObjectLocation,
    ObjectResult,
    ObjectStatus,
    Unreachable,
    Unusable,
)
from layerflow.objects import HEADER_BYTES, stored_header
from layerflow.system.memfd import SharedMemory

NAME = "hosts.fake_backend:FakeBackend"


class FakeBackend(Backend):
    """Options, all of them optional:

    * ``gates``: by method, a FIFO: each call takes one byte from it before it goes on.
    * ``raises``: by method, the text of an exception that each call raises.
    * ``dies``: by method, how the process ends in it: ``segfault``, ``exit``; ``gil`` holds it for ever.
    * ``away``: a file; while it exists the backend is unreachable.
    * ``unusable``: attaching says so.
    * ``says``: lines that attaching prints.
    * ``holds``: number of objects in its index; with it, it has one.
    * ``full``, ``existing``: hex keys that cannot be opened for writing.
    * ``bytes_per_s``: by method, how fast it moves.
    * ``call_s``: what each call that moves bytes takes beside that.
    * ``spoilt``: hex keys that come with a wrong header.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._arena: SharedMemory | None = None
        self._objects: dict[bytes, bytes] = {}
        self._writing: dict[bytes, bytearray] = {}
        self._calls = 0
        self._largest = {"fetch": 0, "write": 0}
        self._lock = threading.Lock()
        self._found: Callable[[Sequence[IndexEntry]], None] = lambda _: None

    def report_found(self, found: Callable[[Sequence[IndexEntry]], None]) -> None:
        self._found = found

    def attach(self, arena: SharedMemory, gone: Callable[[Sequence[bytes]], None]) -> BackendInfo:
        self._enter("attach")
        if "unusable" in self._options:
            raise Unusable(self._options["unusable"])
        self._reach()
        for line in self._options.get("says", ()):
            print(line)
        self._arena = arena
        index = None
        if "holds" in self._options:
            index = [
                IndexEntry(number.to_bytes(24), number, 16, b"") for number in range(1, self._options["holds"] + 1)
            ]
        return BackendInfo({"version": "fake"}, index)

    def check(self) -> None:
        self._reach()
        self._enter("check")

    def statistics(self) -> dict[str, float]:
        return {"calls": float(self._calls), **{f"largest_{name}_bytes": size for name, size in self._largest.items()}}

    def lookup(self, keys: Sequence[bytes], until: float) -> list[bool]:
        self._enter("lookup", len(keys))
        return [key in self._objects for key in keys]

    def hide(self, keys: Sequence[bytes]) -> None:
        self._enter("hide", len(keys))
        for key in keys:
            self._objects.pop(key, None)

    def open_fetch(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        self._enter("open_fetch", len(places))
        missing = ObjectResult(ObjectStatus.MISSING, "not there")
        return [OK if len(self._objects.get(place.key, b"")) == place.nbytes else missing for place in places]

    def fetch(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        self._enter("fetch", len(places), f"{lo}:{hi}")
        self._move("fetch", places, lo, hi)
        spoilt = self._options.get("spoilt", ())
        for place in places:
            start, stop = place.start(lo) if lo else 0, place.start(hi)
            self._view[place.offset + start : place.offset + stop] = self._objects[place.key][start:stop]
            if place.key.hex() in spoilt and not lo:
                self._view[place.offset : place.offset + HEADER_BYTES] = bytes(HEADER_BYTES)
        return [OK] * len(places)

    def close_fetch(self, places: Sequence[ObjectLocation]) -> None:
        self._enter("close_fetch", len(places))

    def open_write(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        self._enter("open_write", len(places))
        return [self._open(place) for place in places]

    def write(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        self._enter("write", len(places), f"{lo}:{hi}")
        self._move("write", places, lo, hi)
        for place in places:
            start, stop = place.start(lo), place.start(hi)
            self._writing[place.key][start:stop] = self._view[place.offset + start : place.offset + stop]
        return [OK] * len(places)

    def commit(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        self._enter("commit", len(places))
        for place in places:
            whole = self._writing.pop(place.key)
            whole[:HEADER_BYTES] = stored_header(self._view, place.offset)
            self._objects[place.key] = bytes(whole)
            self._found([IndexEntry(place.key, place.blocks, place.tokens, place.parent, place.block_digests)])
        return [OK] * len(places)

    def revoke(self, places: Sequence[ObjectLocation]) -> None:
        self._enter("revoke", len(places))
        for place in places:
            self._writing.pop(place.key, None)

    def close(self) -> None:
        self._enter("close")

    @property
    def _view(self) -> memoryview:
        assert self._arena is not None
        return self._arena.view

    def _open(self, place: ObjectLocation) -> ObjectResult:
        name = place.key.hex()
        if place.key in self._objects or name in self._options.get("existing", ()):
            return ObjectResult(ObjectStatus.EXISTS, "complete already")
        if name in self._options.get("full", ()):
            return ObjectResult(ObjectStatus.FULL, "no room")
        self._writing[place.key] = bytearray(place.nbytes)
        return OK

    def _reach(self) -> None:
        if Path(self._options.get("away", "/nowhere")).exists():
            raise Unreachable("it is away")

    def _move(self, method: str, places: Sequence[ObjectLocation], lo: int, hi: int) -> None:
        nbytes = (hi - lo) * sum(place.layer_bytes for place in places)
        self._largest[method] = max(self._largest[method], nbytes)
        time.sleep(self._options.get("call_s", 0))
        if rate := self._options.get("bytes_per_s", {}).get(method):
            time.sleep(nbytes / rate)

    def _enter(self, method: str, *what: object) -> None:
        """A call begins.

        :param what: objects, and layers as ``lo:hi``.
        """
        with self._lock:
            self._calls += 1
        if gate := self._options.get("gates", {}).get(method):
            with open(gate, "rb", buffering=0) as file:
                file.read(1)
        if method in self._options.get("raises", {}):
            raise RuntimeError(self._options["raises"][method])
        match self._options.get("dies", {}).get(method):
            case "segfault":
                ctypes.string_at(0)
            case "gil":
                ctypes.PyDLL(None).sleep(3600)
            case "exit":
                print("the end", file=sys.stderr)
                os._exit(7)
