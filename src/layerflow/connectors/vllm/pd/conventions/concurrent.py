"""The concurrent convention: both legs leave at once and share a ``transfer_id``. As Mooncake's connector has it.

``GET /query`` on the prefill engine's bootstrap port names its engine; a router asks it once, and a decode engine that
was given its address learns from it which servers hold what this engine prefills.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layerflow.connectors.vllm.pd.conventions.parts import (
    KEY,
    MAX_ID,
    Convention,
    DecodePart,
    PrefillPart,
    RequestParams,
    address,
    number,
    servers_of,
    shown,
    text,
)
from layerflow.errors import ProtocolError

QUERY = "/query"


def prefill_part(request_params: RequestParams) -> PrefillPart:
    """P. The hand-off is named by the proxy's id and the prompt: prompts of a list share the id."""
    told = request_params.params.get(KEY)
    return PrefillPart(
        handoff=_handoff(request_params),
        convention=Convention.CONCURRENT,
        prompt=request_params.digest,
        lease_s=request_params.lease_s,
        deadline_s=_deadline_s(told, request_params),
        decoder=request_params.terms,
    )


def decode_part(request_params: RequestParams) -> DecodePart:
    """D. Where its servers are not told, the prefill engine's ``GET /query`` tells them."""
    told = request_params.params.get(KEY)
    servers = servers_of(told) if isinstance(told, Mapping) else None
    known = servers or request_params.prefill_servers
    bootstrap = request_params.params.get("remote_bootstrap_addr")
    return DecodePart(
        handoff=_handoff(request_params),
        prompt=request_params.digest,
        deadline_s=_deadline_s(told, request_params),
        servers=known,
        prefiller=request_params.terms,
        bootstrap=_url(bootstrap) if bootstrap and servers is None and not known else "",
        engine=_name(request_params.params.get("remote_engine_id") or "", "remote_engine_id"),
    )


def query_answer(engines: Mapping[int, str], servers: tuple[str, ...], incarnation: str) -> dict[str, Any]:
    """What ``GET /query`` answers.

    :param engines: engine ids by data-parallel rank.
    """
    own = {"v": 1, "servers": list(servers), "incarnation": incarnation}
    return {str(rank): {"engine_id": engine, "worker_addr": {}, KEY: own} for rank, engine in engines.items()}


def servers_in(answer: Any, engine: str) -> tuple[str, ...]:
    """The servers of one of the engines that ``GET /query`` has told.

    :param engine: its id; "" = the first one.
    :raises ProtocolError: no such engine, or it does not speak layerflow.
    """
    ranks = list(answer.values()) if isinstance(answer, Mapping) else []
    for rank in ranks:
        if isinstance(rank, Mapping) and engine in ("", rank.get("engine_id")):
            own = rank.get(KEY)
            if not isinstance(own, Mapping):
                raise ProtocolError(f"prefill engine {shown(rank.get('engine_id'))} does not speak layerflow")
            servers = servers_of(own)
            if servers is None:
                raise ProtocolError(f"prefill engine {engine!r} does not tell its servers")
            return servers
    raise ProtocolError(
        f"the prefill engine's {QUERY} does not name engine {engine!r}; let its proxy discover the engines again"
    )


def _deadline_s(told: Any, request_params: RequestParams) -> float:
    """:raises ProtocolError: the request's is not a number of seconds."""
    wanted = (
        told.get("deadline_s", request_params.deadline_s) if isinstance(told, Mapping) else request_params.deadline_s
    )
    seconds = number(wanted, f"kv_transfer_params.{KEY}.deadline_s")
    if not seconds > 0:
        raise ProtocolError(f"kv_transfer_params.{KEY}.deadline_s = {shown(wanted)}: should be a number above 0")
    return min(seconds, request_params.deadline_s)


def _handoff(request_params: RequestParams) -> str:
    return f"{_name(request_params.params['transfer_id'], 'transfer_id')}:{request_params.digest}"


def _name(value: Any, where: str) -> str:
    """A proxy's name of something: text, or a number.

    :raises ProtocolError: it is neither, or longer than a hand-off's name may be.
    """
    if isinstance(value, int) and abs(value) < 1 << 128:
        value = str(value)
    name = text(value, where)
    if len(name) > MAX_ID:
        raise ProtocolError(f"{where} has {len(name)} characters; should be at most {MAX_ID}")
    return name


def _url(bootstrap: Any) -> str:
    """:raises ProtocolError: not an http address."""
    parts = address(bootstrap, "remote_bootstrap_addr")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ProtocolError(f"remote_bootstrap_addr = {shown(bootstrap)}: should be a URL such as http://host:8998")
    return str(bootstrap).rstrip("/") + QUERY
