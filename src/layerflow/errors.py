"""Every exception that layerflow raises.

::

    LayerflowError
    ├── ConfigError            a setting is unknown, of the wrong type or out of range
    ├── SpecError              a model description contradicts itself (also a ValueError)
    ├── BadKey                 a token list or digest that cannot be a key (also a ValueError)
    ├── ProtocolError          a message that the protocol does not allow
    │   ├── VersionMismatch    the two ends speak different protocol versions
    │   └── RemoteError        the server refused a request; carries its reason
    ├── ExtentError            a transfer would leave registered memory or the arena
    ├── PoolError              the pool refused: full, too large, not the writer
    ├── SessionError           the call needs an attached session and there is none
    │   └── ServerLost         the server went away; the agent re-attaches by itself
    │       └── SessionUnknown the server is there and does not know this client: it was restarted, or had forgotten it
    ├── DeadlineExceeded       an answer did not come in time (also a TimeoutError)
    ├── ProxyError             the proxy cannot answer a request; carries the HTTP status
    │   └── UpstreamError      because an engine behind it failed, fell silent or refused
    ├── Unsupported            this machine or build lacks what the call needs
    └── InvalidTransition      the core was asked for something impossible; carries the task's story

Each message says what happened, to which request, layer or block, and what to do about it.
"""

from __future__ import annotations

import json


class LayerflowError(Exception):
    """Base of everything layerflow raises on purpose."""


class ConfigError(LayerflowError):
    """A setting is unknown, of the wrong type or out of range."""


class SpecError(LayerflowError, ValueError):
    """A model description contradicts itself."""


class BadKey(LayerflowError, ValueError):
    """A token list, digest or chunk length that cannot make a key."""


class ProtocolError(LayerflowError):
    """A message that the protocol does not allow."""


class VersionMismatch(ProtocolError):
    """The two ends speak different protocol versions or message schemas."""


class RemoteError(ProtocolError):
    """The server refused a request.

    :param code: the protocol's error code, a short word.
    :param message: what happened and what to do, as the server put it.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class ExtentError(LayerflowError, ValueError):
    """A transfer would touch bytes outside registered memory or outside the arena."""


class PoolError(LayerflowError):
    """The pool refused an operation."""


class SessionError(LayerflowError):
    """The call needs an attached session and there is none."""


class ServerLost(SessionError):
    """The server went away. Waits fail at once; the agent re-attaches by itself."""


class SessionUnknown(ServerLost):
    """The server does not know this client (any more): it was started anew. Greet and say hello again."""


class DeadlineExceeded(LayerflowError, TimeoutError):
    """An answer did not come before the caller's deadline."""


class ProxyError(LayerflowError):
    """The proxy answers a request with an error.

    :param message: what happened, where, what to do; the client reads it.
    :param status: HTTP status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class UpstreamError(ProxyError):
    """An engine behind the proxy failed, fell silent, answered nonsense or refused.

    :param rejected: the engine refused the request itself (4xx): asking another one is no use.
    :param counts: it speaks against the engine (5xx, network, silence), whose circuit breaker hears of it.
    :param body: the engine's own JSON error, which the client gets unchanged; None = made from `message`.
    :param untouched: the engine has not ended what was handed to it: it has not taken the request, or is gone.
    """

    def __init__(
        self,
        message: str,
        status: int = 502,
        *,
        rejected: bool = False,
        counts: bool = True,
        body: bytes | None = None,
        untouched: bool = False,
    ) -> None:
        super().__init__(message, status)
        self.untouched = untouched
        self.rejected = rejected
        self.counts = counts
        self.body = body


class Unsupported(LayerflowError):
    """This machine, build or backend lacks what the call needs."""


class InvalidTransition(LayerflowError):
    """The core was asked for something impossible.

    :param what: the impossible transition.
    :param story: the task's events so far, oldest first.
    """

    def __init__(self, what: str, story: tuple[str, ...] = ()) -> None:
        super().__init__(what if not story else f"{what}; story: {' -> '.join(story)}")
        self.what = what
        self.story = story


REASON_CHARS = 1024
"""Characters of a reason that somebody else gives, as it is kept, logged and told on."""


def shortened(text: str, most: int = REASON_CHARS) -> str:
    """A text of somebody else's, cut to `most` characters where it is longer."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shown(value: object) -> str:
    """A foreign value of a JSON file in a message, cut where it is long."""
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "a huge number"
    return shortened(json.dumps(value, default=str), 60)
