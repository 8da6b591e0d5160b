"""The importer: a backend whose pool is the arenas of other servers. Bytes are read into this server's arena only.

What lies where its server knows, and says with each job (:class:`layerflow.wire.peer_link.Origin`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerflow.backends import named
from layerflow.errors import ProtocolError
from layerflow.hosts.backend import OK, Backend, BackendInfo, ObjectLocation, ObjectResult, ObjectStatus, Unusable
from layerflow.hosts.peer.link import LinkFailed, PeerLink
from layerflow.links import links
from layerflow.objects import pack_header
from layerflow.system.memfd import SharedMemory
from layerflow.wire.peer_link import LINK_REST_S, Origin, decode_origin


class EmulatedRate:
    """Holds back what was read until a link of this rate had brought it: for experiments on one machine.

    :param gbps: 10^9 bytes per second; 0 = nothing is held back.
    """

    def __init__(self, gbps: float) -> None:
        self._seconds_per_byte = 1 / (gbps * 1e9) if gbps > 0 else 0.0
        self._busy_until = self._late = 0.0

    def pass_on(self, nbytes: int, began: float) -> None:
        """Return when the last of these would have come.

        :param began: when they were asked for, monotonic seconds.
        """
        if self._seconds_per_byte:
            # That the last sleep was too long has not kept the link from going on.
            began = max(began - self._late, self._busy_until)
            self._busy_until = began + nbytes * self._seconds_per_byte
            time.sleep(max(0.0, self._busy_until - time.monotonic()))
            self._late = max(0.0, time.monotonic() - self._busy_until)


class Importer(Backend):
    """Reads objects of peers. Called by one thread, the host's fetch thread, but for `check` and `statistics`.

    :param options: ``link``: its name; ``link_gbps``: a link of so many gigabytes (10^9 bytes) per second is emulated,
        0 = none.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._arena: SharedMemory | None = None
        self._link_name: str = options["link"]
        self._reader: Callable[[SharedMemory, Origin, float], PeerLink] = named(links()[self._link_name].reader)
        self._links: dict[tuple[str, str, bytes], PeerLink] = {}
        self._link_of: dict[str, tuple[str, str, bytes]] = {}
        self._resting: dict[tuple[str, str, bytes], tuple[float, str]] = {}
        self._bytes = self._failures = 0
        self._emulated = EmulatedRate(float(options.get("link_gbps", 0.0)))

    def attach(self, arena: SharedMemory, gone: Callable[[Sequence[bytes]], None]) -> BackendInfo:
        self._arena = arena
        plane = links()[self._link_name].plane
        if plane:
            named(plane).load()  # a first read shall not wait for that
        return BackendInfo({})

    def check(self) -> None:
        """Peers are looked after by the server, over its connections to them."""

    def statistics(self) -> dict[str, float]:
        return {"links": len(self._links), "read_bytes_total": self._bytes, "failed_calls_total": self._failures}

    def lookup(self, keys: Sequence[bytes], until: float) -> list[bool]:
        return [False] * len(keys)

    def hide(self, keys: Sequence[bytes]) -> None:
        """The owner's objects are the owner's."""

    # Reading -------------------------------------------------------------------------------------

    def open_fetch(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        return [OK] * len(places)

    def fetch(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        try:
            origin = decode_origin(places[0].origin)
        except ProtocolError as error:
            return [ObjectResult(ObjectStatus.FAILED, str(error))] * len(places)
        if origin.link != self._link_name:
            why = f"peer {origin.peer} is read over {origin.link}; this importer knows {self._link_name}"
            return [ObjectResult(ObjectStatus.FAILED, why)] * len(places)
        name, began = (origin.link, origin.address, origin.incarnation), time.monotonic()
        rests_until, why = self._resting.get(name, (0.0, ""))
        if time.monotonic() < rests_until:
            return [ObjectResult(ObjectStatus.FAILED, why)] * len(places)
        try:
            results = self._link(name, origin, until).read(origin, places, lo, hi, until)
        except LinkFailed as error:
            self._failures += 1
            self._drop(name)
            why = f"peer {origin.peer} at {origin.address}: {error}"
            self._resting[name] = (time.monotonic() + LINK_REST_S, why)
            return [ObjectResult(ObjectStatus.FAILED, why)] * len(places)
        if not lo:
            self._write_headers(places)
        nbytes = sum((hi - lo) * place.layer_bytes for place in places)
        self._bytes += nbytes
        self._emulated.pass_on(nbytes, began)
        return results

    def close_fetch(self, places: Sequence[ObjectLocation]) -> None:
        """The server releases the lease."""

    def _link(self, name: tuple[str, str, bytes], origin: Origin, until: float) -> PeerLink:
        link = self._links.get(name)
        if link is not None and link.closed:  # the exporter hangs up on links over which nothing is asked for
            self._drop(name)
            link = None
        if link is None:
            # An exporter that was there before; the peer's next one may listen elsewhere.
            before = self._link_of.get(origin.peer)
            for old in [old for old in self._links if old[:2] == name[:2] or old == before]:
                self._drop(old)
            self._link_of[origin.peer] = name
            assert self._arena is not None
            link = self._links[name] = self._reader(self._arena, origin, until)
            self._resting = {rest: kept for rest, kept in self._resting.items() if kept[0] > time.monotonic()}
        return link

    def _drop(self, name: tuple[str, str, bytes]) -> None:
        link = self._links.pop(name, None)
        if link is not None:
            link.close()

    def _write_headers(self, places: Sequence[ObjectLocation]) -> None:
        """An object that is still being saved has none yet; this one is as its owner will write it."""
        assert self._arena is not None
        for place in places:
            header = pack_header(
                place.key, blocks=place.blocks, tokens=place.tokens, payload=place.layers * place.layer_bytes
            )
            self._arena.write(place.offset, header)

    # Writing: never ------------------------------------------------------------------------------

    def open_write(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        return [ObjectResult(ObjectStatus.FAILED, "peers are read only")] * len(places)

    def write(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        raise Unusable("peers are read only")

    def commit(self, places: Sequence[ObjectLocation], until: float) -> list[ObjectResult]:
        raise Unusable("peers are read only")

    def revoke(self, places: Sequence[ObjectLocation]) -> None:
        """Nothing was written."""

    def close(self) -> None:
        for name in list(self._links):
            self._drop(name)
