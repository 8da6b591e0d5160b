"""What memcache_hybrid's return codes mean here. Each was seen with 1.3.0 against a real MetaService."""

from __future__ import annotations

from layerflow.hosts.backend import OK, ObjectResult, ObjectStatus

INVALID = -3000
TIMED_OUT = -3004
NOT_THERE = -3007
UNLINKED = -3014
NO_CLIENT = -3019
WRONG_STATE, UNKNOWN = -3101, -3102
LEASE_OVER = -3106
UNANSWERED = frozenset((TIMED_OUT, UNLINKED, -3017, -3018, NO_CLIENT))
"""The MetaService did not answer, or the client is not there; nothing is known of the object."""

_WORDS = {
    -1: "failed",
    -2: "the copy failed: is the client alive that gave the memory, and known to this one?",
    INVALID: "invalid parameters, or a key that this client did not open",
    -3001: "no memory in the client",
    TIMED_OUT: "the MetaService did not answer in time",
    NOT_THERE: "it is not there",
    -3008: "not initialised",
    UNLINKED: "no connection to the MetaService",
    -3016: "no memory",
    -3017: "the MetaService is not connected",
    -3018: "the client's memory is not connected",
    NO_CLIENT: "the client is not initialised, or closed",
    WRONG_STATE: "it is not complete, or not to be written",
    UNKNOWN: "it is not there, or not leased by this client",
    -3103: "an impossible change of its state",
    -3104: "it is leased",
    -3105: "its entry could not be backed up",
    LEASE_OVER: "its lease ran out",
}
_LEASING = {
    -1: ObjectStatus.MISSING,  # in this client's table, another object is in its place: one that left a moment ago
    NOT_THERE: ObjectStatus.MISSING,
    UNKNOWN: ObjectStatus.MISSING,
    WRONG_STATE: ObjectStatus.MISSING,
}
_READING = {LEASE_OVER: ObjectStatus.EXPIRED, UNKNOWN: ObjectStatus.EXPIRED}


def explain(code: int) -> str:
    """A code in words, for people who look it up too."""
    return f"memcache says {code}: {_WORDS.get(code, 'unknown to layerflow')}"


def leasing(code: int) -> ObjectResult:
    """Of ``batch_add_lease``."""
    return _result(code, _LEASING)


def reading(code: int) -> ObjectResult:
    """Of ``batch_copy`` out of the pool, under a lease: what the client does not know any more has expired."""
    return _result(code, _READING)


def writing(code: int) -> ObjectResult:
    """Of ``batch_copy`` into the pool, and of ``batch_write_finish``."""
    return _result(code, {})


def _result(code: int, outcomes: dict[int, ObjectStatus]) -> ObjectResult:
    return OK if code == 0 else ObjectResult(outcomes.get(code, ObjectStatus.FAILED), explain(code))
