"""The decoder-first convention of vLLM-Ascend: D gets the request and asks the proxy's metaserver for the prefill.

The proxy forwards what D posts to P as it is, keys that it does not know included, and answers when the prefill has
ended. vLLM-Ascend's keys are kept, so that what reads them goes on to; layerflow's own stand under one of their own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from layerflow.connectors.vllm.pd.conventions.parts import (
    KEY,
    Convention,
    DecodePart,
    HandoffTerms,
    PrefillPart,
    RequestParams,
    Sizes,
    address,
    shown,
)
from layerflow.errors import ProtocolError

# vLLM appends eight random digits to the id that its caller knows.
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


def decode_part(request_params: RequestParams) -> DecodePart:
    """D.

    :raises ProtocolError: the metaserver is no http address.
    """
    url = request_params.params["metaserver"]
    parts = address(url, "metaserver")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ProtocolError(f"metaserver = {shown(url)}: should be a URL such as http://proxy:8000/v1/metaserver")
    return DecodePart(
        handoff=request_params.own_handoff,
        prompt=request_params.digest,
        deadline_s=request_params.deadline_s,
        servers=request_params.prefill_servers,
        metaserver=url,
    )


def prefill_part(request_params: RequestParams) -> PrefillPart:
    """P: what D has posted names the hand-off."""
    assert request_params.terms is not None
    return PrefillPart(
        handoff=request_params.terms.handoff,
        convention=Convention.METASERVER,
        prompt=request_params.digest,
        lease_s=request_params.lease_s,
        deadline_s=min(request_params.terms.deadline_s, request_params.deadline_s),
        decoder=request_params.terms,
    )


def body(request: str, terms: HandoffTerms, sizes: Sizes, blocks: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
    """What D posts.

    :param request: vLLM's id of the request.
    :param blocks: its block ids per cache group; layerflow posts before it has any.
    """
    return {
        "token_ids": [],
        "request_id": _SUFFIX.sub("", request),
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [list(ids) for ids in blocks] or [[] for _ in sizes.block_sizes],
        "remote_block_size": list(sizes.block_sizes),
        "remote_engine_id": sizes.engine_id,
        "remote_host": sizes.host,
        "remote_port": sizes.port,
        "remote_tp_size": sizes.tp_size,
        "remote_pcp_size": sizes.pcp_size,
        "remote_dcp_size": sizes.dcp_size,
        "remote_cached_tokens": 0,
        KEY: terms.to_json(),
    }
