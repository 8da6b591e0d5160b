"""What this engine does for one request: prefill for somebody, decode what another has prefilled, or neither."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import numpy as np

from layerflow.errors import ProtocolError
from layerflow.spec import first_mismatch

# What the two engines of a hand-off tell each other: layerflow's own object in ``kv_transfer_params``.


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
    :param layout: of the same engine, see :func:`layerflow.spec.model_facts`; {} = not told.
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


class Convention(StrEnum):
    """How a proxy carries a hand-off; one file of this package each."""

    METASERVER = "metaserver"
    TWO_PHASE = "two-phase"
    CONCURRENT = "concurrent"


class RequestParams(NamedTuple):
    """What a request says of its hand-off, and what the engine that reads it is.

    :param params: the request's ``kv_transfer_params``.
    :param terms: layerflow's own object in them, if it names a hand-off.
    :param request: vLLM's id of the request.
    :param prompt: its tokens, all of them.
    :param engine: names this start of this engine.
    :param deadline_s: how long a hand-off may take where the request does not say it, seconds.
    :param lease_s: how long one stays unclaimed; 0 = as its server says.
    :param prefill_servers: who holds hand-offs of which the request does not tell the servers.
    """

    params: Mapping[str, Any]
    terms: HandoffTerms | None
    request: str
    prompt: Sequence[int]
    engine: str
    deadline_s: float = DEFAULT_DEADLINE_S
    lease_s: float = DEFAULT_LEASE_S
    prefill_servers: tuple[str, ...] = ()

    @property
    def own_handoff(self) -> str:
        """Names a hand-off of this request, where this engine is the one that names it."""
        return f"{self.engine}:{self.request}"

    @property
    def digest(self) -> str:
        """Return the digest of the prompt's tokens."""
        return prompt_digest(self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPart:
    """This engine computes the prompt and hands it over.

    :param deadline_s: the hand-off has failed if the prefill has not ended so soon.
    :param decoder: what the decode engine has said; None = nothing.
    :param prompt: digest of the tokens.
    """

    handoff: str
    convention: Convention
    prompt: str
    lease_s: float = DEFAULT_LEASE_S
    deadline_s: float = DEFAULT_DEADLINE_S
    decoder: HandoffTerms | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePart:
    """This engine loads the prompt as another computes it.

    :param servers: where the hand-off is to be found; () = at this engine's own server.
    :param otherwise: other such lists, to be tried one after the other.
    :param prefiller: what the prefill engine has said; None = nothing yet.
    :param metaserver: URL that starts the prefill; "" = it has been started.
    :param bootstrap: URL of the prefill engine that tells its servers; "" = they are known.
    :param engine: the prefill engine's id; "" = not told.
    """

    handoff: str
    prompt: str
    deadline_s: float = DEFAULT_DEADLINE_S
    servers: tuple[str, ...] = ()
    otherwise: tuple[tuple[str, ...], ...] = ()
    prefiller: HandoffTerms | None = None
    metaserver: str = ""
    bootstrap: str = ""
    engine: str = ""


@dataclass(frozen=True, slots=True)
class NoHandoff:
    """Neither: what the pool holds is loaded, what is computed is saved.

    :param reason: why a request that wanted more gets this; "" = it did not.
    """

    reason: str = ""


@dataclass(frozen=True, slots=True)
class RefusedPart:
    """The request asks for what cannot be done, and whoever sent it waits for the outcome: it ends with an error."""

    reason: str


Part = PrefillPart | DecodePart | NoHandoff | RefusedPart
PLAIN = NoHandoff()


@dataclass(frozen=True, slots=True)
class Sizes:
    """The engine's sizes, for the keys that other systems' proxies read.

    :param block_sizes: rows of a block on one rank, per vLLM cache group.
    :param dcp_size: ranks over which a block's tokens are spread. :param pcp_size: that compute shares of a prompt.
    """

    engine_id: str = ""
    host: str = ""
    port: int = 0
    tp_size: int = 1
    pp_size: int = 1
    block_sizes: tuple[int, ...] = ()
    dcp_size: int = 1
    pcp_size: int = 1


def layout_mismatch(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return the first of :func:`layerflow.spec.model_facts` in which two engines differ, with both texts; "" = none.

    :param theirs: as a request has brought it.
    """
    found = first_mismatch(mine, theirs)
    return f"{found[0]}: {found[1]!r} here, {found[2]!r} at the other engine" if found is not None else ""
