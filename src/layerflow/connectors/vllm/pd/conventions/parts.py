"""What this engine does for one request: prefill for somebody, decode what another has prefilled, or neither."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from layerflow.connectors.vllm.pd.conventions.terms import (
    DEFAULT_DEADLINE_S,
    DEFAULT_LEASE_S,
    HandoffTerms,
    prompt_digest,
)


class Convention(StrEnum):
    """How a proxy carries a hand-off; one file of this package each."""

    METASERVER = "metaserver"
    TWO_PHASE = "two-phase"
    CONCURRENT = "concurrent"


class Words(NamedTuple):
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
        """Of the prompt's tokens."""
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
class PlainPart:
    """Neither: what the pool holds is loaded, what is computed is saved.

    :param reason: why a request that wanted more gets this; "" = it did not.
    """

    reason: str = ""


@dataclass(frozen=True, slots=True)
class RefusedPart:
    """The request asks for what cannot be done, and whoever sent it waits for the outcome: it ends with an error."""

    reason: str


Part = PrefillPart | DecodePart | PlainPart | RefusedPart
PLAIN = PlainPart()


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the engine, for the keys that other systems' proxies read.

    :param block_sizes: tokens of a block, per vLLM cache group.
    """

    engine_id: str = ""
    host: str = ""
    port: int = 0
    tp_size: int = 1
    pp_size: int = 1
    block_sizes: tuple[int, ...] = ()
