"""What the two engines of a hand-off tell each other: layerflow's own object in ``kv_transfer_params``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from layerflow.errors import ProtocolError

KEY = "layerflow"
VERSION = 1

DEFAULT_LEASE_S = 0.0
"""As long as the prefill engine's server is configured to: ``pd.handoff_lease_s``."""
DEFAULT_DEADLINE_S = 60.0

MAX_ID = 512
MAX_SERVERS = 1024
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
            f"{_WHERE}: version {version!r}; this layerflow speaks version {VERSION}: use equal releases"
        )
    handoff = _text(own, "handoff")
    if not 0 < len(handoff) <= MAX_ID:
        raise ProtocolError(f"{_WHERE}.handoff has {len(handoff)} characters; should be 1 to {MAX_ID}")
    servers = own.get("servers", ())
    if not isinstance(servers, list | tuple) or not all(isinstance(server, str) for server in servers):
        raise ProtocolError(f"{_WHERE}.servers = {servers!r}: should be a list of control addresses")
    if len(servers) > MAX_SERVERS:
        raise ProtocolError(f"{_WHERE}.servers lists {len(servers)} addresses; at most {MAX_SERVERS} are used")
    layout = own.get("layout", {})
    if not isinstance(layout, Mapping) or not all(isinstance(fact, str) for pair in layout.items() for fact in pair):
        raise ProtocolError(f"{_WHERE}.layout = {layout!r}: should be an object of texts")
    return HandoffTerms(
        handoff=handoff,
        servers=tuple(servers),
        incarnation=_text(own, "incarnation"),
        layout=dict(layout),
        prompt=_text(own, "prompt"),
        tokens=int(_number(own, "tokens", 0)),
        lease_s=_number(own, "lease_s", DEFAULT_LEASE_S),
        deadline_s=_number(own, "deadline_s", DEFAULT_DEADLINE_S),
    )


def prompt_digest(tokens: Sequence[int]) -> str:
    """16 hexadecimal digits that tell a prompt's tokens, whatever model reads them."""
    return hashlib.blake2b(np.asarray(tokens, dtype="<i8").tobytes(), digest_size=8).hexdigest()


def _text(own: Mapping[str, Any], key: str) -> str:
    value = own.get(key, "")
    if not isinstance(value, str):
        raise ProtocolError(f"{_WHERE}.{key} = {value!r}: should be text")
    return value


def _number(own: Mapping[str, Any], key: str, default: float) -> float:
    value = own.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ProtocolError(f"{_WHERE}.{key} = {value!r}: should be a number from 0 on")
    return value
