"""What the two engines of a hand-off tell each other: layerflow's own object in ``kv_transfer_params``."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

import numpy as np

from layerflow.errors import ProtocolError

KEY = "layerflow"
VERSION = 1

DEFAULT_LEASE_S = 0.0
"""As long as the prefill engine's server is configured to: ``pd.handoff_lease_s``."""
DEFAULT_DEADLINE_S = 60.0

MAX_ID = 512
MAX_TOKENS = 1 << 40
MAX_S = 1e9
"""What a request says beyond these is taken for these."""
MAX_SERVERS = 1024
MAX_SHOWN = 200
_WHERE = "kv_transfer_params.layerflow"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTerms:
    """One side's words to the other.

    :param handoff: names the hand-off, everywhere.
    :param servers: control addresses of the servers that hold its objects; () = the one that both engines use.
    :param incarnation: of the engine that speaks: another one after each start.
    :param layout: of the same engine, see :mod:`.layouts`; {} = not told.
    :param prompt: digest of the prompt's tokens, see :func:`prompt_digest`; "" = not told.
    :param tokens: leading tokens that the prefill engine has computed; 0 = not known yet.
    :param lease_s: how long the objects stay after the prefill without a claim, seconds; 0 = as the server says.
    :param deadline_s: how long the decode engine waits at most, from its request's arrival, seconds.
    """

    handoff: str
    servers: tuple[str, ...] = ()
    incarnation: str = ""
    layout: Mapping[str, str] = field(default_factory=dict)
    prompt: str = ""
    tokens: int = 0
    lease_s: float = DEFAULT_LEASE_S
    deadline_s: float = DEFAULT_DEADLINE_S

    def to_json(self) -> dict[str, Any]:
        """As it stands under :data:`KEY`."""
        return {
            "v": VERSION,
            "handoff": self.handoff,
            "servers": list(self.servers),
            "incarnation": self.incarnation,
            "layout": dict(self.layout),
            "prompt": self.prompt,
            "tokens": self.tokens,
            "lease_s": self.lease_s,
            "deadline_s": self.deadline_s,
        }


def terms_in(params: Mapping[str, Any]) -> HandoffTerms | None:
    """What the other side has said; None where it names no hand-off.

    :raises ProtocolError: another version, or a field of the wrong kind.
    """
    own = params.get(KEY)
    if not isinstance(own, Mapping) or "handoff" not in own:
        return None
    version = own.get("v", VERSION)
    if version != VERSION:
        raise ProtocolError(
            f"{_WHERE}: version {shown(version)}; this layerflow speaks version {VERSION}: use equal releases"
        )
    handoff = _text(own, "handoff")
    if not 0 < len(handoff) <= MAX_ID:
        raise ProtocolError(f"{_WHERE}.handoff has {len(handoff)} characters; should be 1 to {MAX_ID}")
    layout = own.get("layout", {})
    if not isinstance(layout, Mapping):
        raise ProtocolError(f"{_WHERE}.layout = {shown(layout)}: should be an object of texts")
    for pair in layout.items():
        for fact in pair:
            text(fact, f"{_WHERE}.layout")
    return HandoffTerms(
        handoff=handoff,
        servers=servers_of(own) or (),
        incarnation=_text(own, "incarnation"),
        layout=dict(layout),
        prompt=_text(own, "prompt"),
        tokens=int(min(_number(own, "tokens", 0), MAX_TOKENS)),
        lease_s=min(_number(own, "lease_s", DEFAULT_LEASE_S), MAX_S),
        deadline_s=_number(own, "deadline_s", DEFAULT_DEADLINE_S),
    )


def servers_of(own: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Control addresses under :data:`KEY`; None where there are none.

    :raises ProtocolError: not a list of texts.
    """
    servers = own.get("servers")
    if servers is None:
        return None
    if not isinstance(servers, list | tuple):
        raise ProtocolError(f"{_WHERE}.servers = {shown(servers)}: should be a list of control addresses")
    if len(servers) > MAX_SERVERS:
        raise ProtocolError(f"{_WHERE}.servers lists {len(servers)} addresses; at most {MAX_SERVERS} are used")
    return tuple(text(server, f"{_WHERE}.servers") for server in servers)


def text(value: Any, where: str) -> str:
    """A text that can be sent on.

    :raises ProtocolError: it is none, or has no UTF-8: half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise ProtocolError(f"{where} = {shown(value)}: should be text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ProtocolError(f"{where} = {shown(value)}: has half of a surrogate pair; should be text") from None
    return value


def number(value: Any, where: str) -> float:
    """A number from 0 on.

    :raises ProtocolError: it is none, or larger than a float.
    """
    wrong = isinstance(value, bool) or not isinstance(value, int | float)
    try:
        found = -1.0 if wrong else float(value)
    except OverflowError:
        found = math.inf
    if not 0 <= found < math.inf:
        raise ProtocolError(f"{where} = {shown(value)}: should be a number from 0 on")
    return found


def address(url: str, where: str) -> SplitResult:
    """The parts of an address; its port can be read.

    :raises ProtocolError: it cannot be taken apart.
    """
    try:
        parts = urlsplit(text(url, where))
        parts.port  # noqa: B018 - read here, where a wrong one is the request's error
    except ValueError as error:
        raise ProtocolError(f"{where} = {shown(url)}: {error}") from None
    return parts


def shown(value: Any) -> str:
    """A client's value in a message: ASCII, and not all of a long one."""
    try:
        found = ascii(value)
    except (ValueError, RecursionError) as error:  # an int of 5,000 digits has no text
        return f"<{type(value).__name__} without a text: {type(error).__name__}>"
    return found if len(found) <= MAX_SHOWN else f"{found[:MAX_SHOWN]}..."


def prompt_digest(tokens: Sequence[int]) -> str:
    """16 hexadecimal digits that tell a prompt's tokens, whatever model reads them."""
    return hashlib.blake2b(np.asarray(tokens, dtype="<i8").tobytes(), digest_size=8).hexdigest()


def _text(own: Mapping[str, Any], key: str) -> str:
    return text(own.get(key, ""), f"{_WHERE}.{key}")


def _number(own: Mapping[str, Any], key: str, default: float) -> float:
    return number(own.get(key, default), f"{_WHERE}.{key}")
