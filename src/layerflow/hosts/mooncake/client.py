"""Mooncake's store client: its calls, what its codes mean, and its master."""

from __future__ import annotations

import time
from typing import Any

from layerflow.hosts.backend import OK, ObjectResult, ObjectStatus, Unreachable
from layerflow.hosts.shared.client import ClientHandle
from layerflow.hosts.shared.monitor import HttpProbe, ServiceMonitor
from layerflow.hosts.shared.service import Service

NO_ROOM = -200
INVALID = -600  # also: no such session here, or one that is open already
NOT_OURS = -601
NOT_IN_MEMORY = -702
NOT_READY, NOT_FOUND, EXISTS, LEASED, LEASE_OVER = -703, -704, -705, -706, -707
TRANSFER_FAILED = -800
CHECKSUM = -801
RPC_FAILED, RPC_LATE = -900, -901
FAULTS = frozenset((-10, -101, NOT_OURS, TRANSFER_FAILED, CHECKSUM, RPC_FAILED, RPC_LATE, -1010))
"""What happens only where something is wrong: neither misses nor a full store."""

_WORDS = {
    -10: "a buffer is too small",
    -101: "the segment is gone",
    NO_ROOM: "no room in the store",
    INVALID: "invalid parameters, or no such session",
    NOT_OURS: "another client has taken the key over",
    NOT_IN_MEMORY: "it is on the disk of a client only",
    NOT_READY: "it is being written",
    NOT_FOUND: "it is not there",
    EXISTS: "it is there already, or being written",
    LEASED: "it is leased",
    LEASE_OVER: "its lease ran out",
    -708: "it is being replicated",
    TRANSFER_FAILED: "the transfer failed: is the client alive that gave the memory?",
    CHECKSUM: "its checksum is wrong",
    RPC_FAILED: "the master does not answer",
    RPC_LATE: "the master did not answer in time",
    -1010: "the store cannot do it in its present state",
}
_READING = {
    NOT_IN_MEMORY: ObjectStatus.MISSING,
    NOT_READY: ObjectStatus.MISSING,
    NOT_FOUND: ObjectStatus.MISSING,
    INVALID: ObjectStatus.EXPIRED,  # the library drops a session whose lease ran out
    LEASE_OVER: ObjectStatus.EXPIRED,
    CHECKSUM: ObjectStatus.BROKEN,
}
_OPENING = {EXISTS: ObjectStatus.EXISTS, NO_ROOM: ObjectStatus.FULL}


def explain(code: int) -> str:
    """A code in words, for people who look it up too."""
    return f"Mooncake says {code}: {_WORDS.get(code, 'unknown to layerflow')}"


def unreachable(code: int) -> bool:
    """Whether the master itself did not answer."""
    return code in (RPC_FAILED, RPC_LATE)


def reading(code: int) -> ObjectResult:
    """Of a get session; 0 = OK."""
    return _result(code, _READING)


def opening(code: int) -> ObjectResult:
    """Of the start of a put session; 0 = OK."""
    return _result(code, _OPENING)


def writing(code: int) -> ObjectResult:
    """Of the rest of a put session; 0 = OK."""
    return _result(code, {})


def moved(code: int, nbytes: int) -> int:
    """A range call returns the bytes it moved: 0 if those are `nbytes`, else a code."""
    if code == nbytes:
        return 0
    return code if code < 0 else TRANSFER_FAILED


def _result(code: int, outcomes: dict[int, ObjectStatus]) -> ObjectResult:
    return OK if code == 0 else ObjectResult(outcomes.get(code, ObjectStatus.FAILED), explain(code))


# The library keeps several connections. After the master ended, the first call over each fails at once, even if another
# master is there by now; calls that fail late have tried to connect again, for seconds.
_REPEATED = frozenset(("batch_is_exist", "batch_get_session_start", "batch_put_session_start"))
_QUICK_S = 0.2
# They ask the master nothing.
_LOCAL = frozenset(
    (
        "batch_get_into_multi_buffer_ranges",
        "batch_get_session_end",
        "batch_put_from_multi_buffer_ranges",
        "register_buffer",
    )
)


class MooncakeClient(ClientHandle):
    """A client while it is set up. Any thread; calls that move data do not hold the GIL.

    :param master: nothing is asked of it while it is ill.
    """

    def __init__(self, master: Service) -> None:
        super().__init__("the Mooncake client is not set up")
        self._master = master

    def __call__(self, method: str, *arguments: Any) -> Any:
        """:raises Unreachable: it is not set up, or closed, or the master is known to be ill."""
        if method not in _LOCAL and self._master.ill:
            raise Unreachable(self._master.ill)
        with self.client() as store:
            return getattr(store, method)(*arguments)

    def codes(self, method: str, *arguments: Any) -> list[int]:
        """A call that answers with a code per object.

        :raises Unreachable: also where the master did not answer for any of them.
        """
        quick = time.monotonic() + _QUICK_S
        codes: list[int] = self(method, *arguments)
        while method in _REPEATED and set(codes) == {RPC_FAILED} and time.monotonic() < quick:
            codes = self(method, *arguments)
        if failed := sum(code in FAULTS for code in codes):
            self.count("failed_calls", failed)
        if codes and all(map(unreachable, codes)):
            raise Unreachable(explain(codes[0]))
        return codes


_WHOSE = "Mooncake's master"
_ADVICE = "start mooncake_master there, or set pool.mooncake.master"


class Master(Service):
    """One master's addresses.

    :param address: of its RPC, ``host:port``.
    :param http_url: of its HTTP; ``""`` = ask nothing there.
    """

    def __init__(self, address: str, http_url: str) -> None:
        host, _, port = address.rpartition(":")
        monitor = ServiceMonitor((host.strip("[]"), int(port)), _WHOSE, _ADVICE)
        super().__init__(_WHOSE, monitor, HttpProbe(http_url, _WHOSE, "segment_total_capacity_bytes"))
