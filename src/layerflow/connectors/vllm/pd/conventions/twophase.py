"""The two-phase convention: NIXL's six keys, filled in by the prefill engine's response and passed on by the router.

Known to vLLM's own toy proxy, vllm-router, llm-d, production-stack and Dynamo. The router first sends the prompt to P
with one token to generate and the six keys empty; what P's response holds goes to D as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layerflow.connectors.vllm.pd.conventions.parts import (
    KEY,
    PLAIN,
    Convention,
    DecodePart,
    HandoffTerms,
    NoHandoff,
    Part,
    PrefillPart,
    RefusedPart,
    RequestParams,
    Sizes,
    address,
    shown,
    text,
)

TRANSFER_MODE = "layerflow"


def prefill_part(request_params: RequestParams) -> Part:
    """P: the keys are empty, or not there at all. Filled, they are a decode engine's that layerflow does not know."""
    params = request_params.params
    if params.get("remote_host") and params.get("remote_block_ids"):
        return RefusedPart(
            f"request {request_params.request}: its decode engine at {shown(params['remote_host'])} wants its own "
            "written to, and does not speak layerflow; give both engines LayerflowConnector"
        )
    return PrefillPart(
        handoff=request_params.own_handoff,
        convention=Convention.TWO_PHASE,
        prompt=request_params.digest,
        lease_s=request_params.lease_s,
        deadline_s=request_params.deadline_s,
    )


def decode_part(request_params: RequestParams) -> Part:
    """D: the keys are P's. Without a hand-off of layerflow's among them, what the pool holds is all there is."""
    terms, params = request_params.terms, request_params.params
    if terms is None:
        if params.get("remote_engine_id") or params.get("remote_host"):
            return NoHandoff(
                f"engine {shown(params.get('remote_engine_id'))} at {shown(params.get('remote_host'))} does not speak "
                "layerflow"
            )
        return PLAIN
    # vLLM tells of a request that it has rejected as one with a single token: that is to release the hand-off.
    if terms.prompt and terms.prompt != request_params.digest and len(request_params.prompt) > 1:
        # Of a list of prompts, vLLM answers with the first one's keys only.
        return NoHandoff(f"hand-off {terms.handoff} is of another prompt")
    servers, otherwise = _addresses(terms.servers, params.get("remote_host"))
    return DecodePart(
        handoff=terms.handoff,
        prompt=request_params.digest,
        deadline_s=min(terms.deadline_s, request_params.deadline_s),
        servers=servers,
        otherwise=otherwise,
        prefiller=terms,
    )


def response(terms: HandoffTerms, sizes: Sizes, blocks: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What P's response says to D.

    :param blocks: the prompt's block ids per cache group. D never reads them: routers look whether there are some.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(ids) for ids in blocks],
        "remote_engine_id": sizes.engine_id,
        "remote_request_id": terms.handoff,
        "remote_host": sizes.host,
        "remote_port": sizes.port,
        "tp_size": sizes.tp_size,
        "pp_size": sizes.pp_size,
        "dcp_size": sizes.dcp_size,
        "remote_num_tokens": terms.tokens,
        "transfer_mode": TRANSFER_MODE,
        KEY: terms.to_json(),
    }


def _addresses(servers: tuple[str, ...], host: Any) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Where to look first, and then: a router may have put another host in, the one that it reaches P by."""
    if not servers or not isinstance(host, str) or not host:
        return servers, ()
    host = text(host, "remote_host")
    first = address(servers[0], "kv_transfer_params.layerflow.servers")
    if first.scheme != "tcp" or first.hostname in (None, host):
        return servers, ()
    shown = f"[{host}]" if ":" in host else host
    return (f"tcp://{shown}:{first.port}", *servers[1:]), (servers,)
