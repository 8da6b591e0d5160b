"""What a check found."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Severity(enum.StrEnum):
    """How bad it is: a problem keeps the server or its backend from working, a warning does not."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    :param check: what was looked at, e.g. ``"mooncake master"``.
    :param found: what is there, or what is wrong.
    :param advice: what to do; "" if nothing.
    """

    check: str
    state: Severity
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(check, Severity.OK, found)


def warning(check: str, found: str, advice: str) -> Finding:
    """It works, and not as well as it could or not as the user may think."""
    return Finding(check, Severity.WARNING, found, advice)


def problem(check: str, found: str, advice: str) -> Finding:
    """It will not work."""
    return Finding(check, Severity.PROBLEM, found, advice)
