"""Reading from Mooncake: get sessions. Opening asks the master once for all objects; layers then ask it nothing."""

from __future__ import annotations

from collections.abc import Sequence

from layerflow.hosts.backend import OK, ObjectLocation, ObjectResult, ObjectStatus, pool_name
from layerflow.hosts.mooncake.client import NOT_IN_MEMORY, MooncakeClient, moved, reading
from layerflow.hosts.shared.open_read import OTHER_SIZE, OpenRead, StoreReader
from layerflow.hosts.shared.service import Service

_NO_SIZE = ObjectResult(ObjectStatus.FAILED, "Mooncake's master did not say how large it is")


class MooncakeReader(StoreReader):
    """The fetch thread's. The library knows one session by an object's name, however many jobs read the object.

    :ivar offloads: a client of the store moves objects to a disk of its own. Then that an object is there does not mean
        that it is in memory, and a session reads from memory only.
    """

    def __init__(self, calls: MooncakeClient, master: Service) -> None:
        super().__init__(calls, master)
        self._calls = calls
        self._open: dict[bytes, OpenRead] = {}
        self.offloads = False

    def _lease(self, places: Sequence[ObjectLocation], generation: int) -> list[ObjectResult]:
        names = [pool_name(place.key) for place in places]
        codes = self._calls.codes("batch_get_session_start", names)
        self.offloads = self.offloads or NOT_IN_MEMORY in codes
        results = [reading(code) for code in codes]
        sizes = self._sizes([name for name, result in zip(names, results, strict=True) if result is OK])
        refused: list[str] = []
        for at, (place, name) in enumerate(zip(places, names, strict=True)):
            if results[at] is OK and sizes.get(name) != {place.nbytes}:
                results[at] = OTHER_SIZE if name in sizes else _NO_SIZE
                if place.key not in self._open:
                    refused.append(name)
            elif results[at] is OK:
                opened = self._open.setdefault(place.key, OpenRead(generation))
                opened.generation = generation  # the library's session was replaced, for earlier readers too
                opened.readers += 1
        if refused:
            self._calls("batch_get_session_end", refused)
        return results

    def in_memory(self, names: list[str]) -> set[str]:
        """Those of which a copy is in the memory of some client. Any thread.

        :raises Unreachable: the master does not answer.
        """
        return {name for name, sizes in self._sizes(names).items() if sizes}

    def forget(self) -> None:
        """See :meth:`StoreReader.forget`."""
        super().forget()
        self._open.clear()

    def _opened(self, place: ObjectLocation) -> OpenRead | None:
        return self._open.get(place.key)

    def _copy(self, places: Sequence[ObjectLocation], lo: int, hi: int, until: float) -> list[ObjectResult]:
        spans = [(place.start(lo) if lo else 0, place.start(hi)) for place in places]
        codes = self._calls.codes(
            "batch_get_into_multi_buffer_ranges",
            [pool_name(place.key) for place in places],
            [[place.address + start] for place, (start, _) in zip(places, spans, strict=True)],
            [[stop - start] for start, stop in spans],
            [[start] for start, _ in spans],
        )
        return [reading(moved(code, stop - start)) for code, (start, stop) in zip(codes, spans, strict=True)]

    def _unlease(self, places: Sequence[ObjectLocation]) -> None:
        """End the sessions of objects that nobody else reads; the master is not asked."""
        ended: list[str] = []
        for place in places:
            opened = self._open.get(place.key)
            if opened is None:
                continue
            opened.readers -= 1
            if not opened.readers:
                del self._open[place.key]
                ended.append(pool_name(place.key))
        if ended:
            self._calls("batch_get_session_end", ended)

    def _sizes(self, names: list[str]) -> dict[str, set[int]]:
        """Bytes of each object, as its copies in memory have it; one call."""
        copies = self._calls("batch_get_replica_desc", names) if names else {}
        self.offloads = self.offloads or any(each.is_local_disk_replica() for some in copies.values() for each in some)
        return {
            name: {each.get_memory_descriptor().buffer_descriptor.size for each in some if each.is_memory_replica()}
            for name, some in copies.items()
        }
