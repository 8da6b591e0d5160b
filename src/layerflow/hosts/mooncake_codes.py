"""What Mooncake's return codes mean here.

Source: ``mooncake-store/include/types.h``, and each code seen with 0.3.13.post1 against a real master.
"""

from __future__ import annotations

from layerflow.hosts.backend import OK, Outcome, Verdict

NO_ROOM = -200
INVALID = -600  # also: no such session here, or one that is open already
NOT_OURS = -601
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
    NOT_READY: Outcome.MISSING,
    NOT_FOUND: Outcome.MISSING,
    INVALID: Outcome.EXPIRED,  # the library drops a session whose lease ran out
    LEASE_OVER: Outcome.EXPIRED,
    CHECKSUM: Outcome.BROKEN,
}
_OPENING = {EXISTS: Outcome.EXISTS, NO_ROOM: Outcome.FULL}


def explain(code: int) -> str:
    """A code in words, for people who look it up too."""
    return f"Mooncake says {code}: {_WORDS.get(code, 'unknown to layerflow')}"


def unreachable(code: int) -> bool:
    """Whether the master itself did not answer."""
    return code in (RPC_FAILED, RPC_LATE)


def reading(code: int) -> Verdict:
    """Of a get session; 0 = OK."""
    return _judge(code, _READING)


def opening(code: int) -> Verdict:
    """Of the start of a put session; 0 = OK."""
    return _judge(code, _OPENING)


def writing(code: int) -> Verdict:
    """Of the rest of a put session; 0 = OK."""
    return _judge(code, {})


def moved(code: int, nbytes: int) -> int:
    """A range call returns the bytes it moved: 0 if those are `nbytes`, else a code."""
    if code == nbytes:
        return 0
    return code if code < 0 else TRANSFER_FAILED


def _judge(code: int, outcomes: dict[int, Outcome]) -> Verdict:
    return OK if code == 0 else Verdict(outcomes.get(code, Outcome.FAILED), explain(code))
