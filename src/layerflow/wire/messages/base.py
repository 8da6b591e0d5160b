"""What both directions of the control protocol have in common: the message, the heartbeat, marks and limits."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

BROKEN = "broken"
"""How a Failure's reason begins when the load failed because of the object itself: it is hidden from lookup."""
LACKING = "a load that it builds on is missing"
"""Why what a request saves in a step is given up from the start."""

WANT_ARENA, WANT_PRESENCE = b"a", b"p"
"""The byte after the token at the fd server: which descriptor the client asks for."""

QUIET = b"q"
"""What a client says at the fd server before it hangs up: it touches the shared memory no more."""

STRANGER = "stranger"
"""Code of the Problem for a client that the server does not know: greet and say hello (again)."""

VERSION = "version"
"""Code of the Problem for a greeting in a version that the server does not speak."""

MAX_NAME, MAX_REASON = 1024, 65_536
"""Characters of a name (of a request, an engine) and of a reason that a client gives."""

MAX_PARTS, MAX_ITEMS = 16_384, 65_536
"""Load or save parts of one OpenStep, and items of any other list in a message to the server."""

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
Few = msgspec.Meta(max_length=MAX_PARTS)
Many = msgspec.Meta(max_length=MAX_ITEMS)
Servers = Annotated[list[Name], msgspec.Meta(max_length=256)]
"""Control addresses."""


class Message(msgspec.Struct, array_like=True, frozen=True):
    """Base of all messages.

    :cvar needs_version: the version of the protocol that has it first, among those that are spoken; it is not sent to
        older servers (:func:`layerflow.wire.codec.check_spoken`).
    """

    needs_version: ClassVar[int] = 1


class Beat(Message, frozen=True, tag=7):
    """Still here. Answered by a Beat with the same `sent`.

    :param pinned: how many bytes of the arena, from its start, an agent has pinned for its device; -1 = it pins none.
    """

    sent: float
    pinned: int = -1
