"""A request that ends with an error because its prefill is lost, or cannot be had: HTTP 500 of vLLM, 503 of the proxy.

A connector has no call for that. What vLLM's scheduler has is a request whose grammar could not be compiled: it waits
in a state of its own, and the next pass ends it with an error, whatever else runs.
"""

from __future__ import annotations

from typing import Any

import structlog

log = structlog.get_logger("layerflow.vllm.pd")


class PrefillLost(Exception):
    """Why the request has ended, where vLLM keeps a grammar's error."""


def can_end_with_error() -> bool:
    """Does this vLLM end such requests? 0.27 does not."""
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415 - this package is used without vLLM too

    return "grammar_compile_error_reqs" in Scheduler.__init__.__code__.co_names


def end_with_error(request: Any, reason: str) -> None:
    """Let vLLM's next scheduling pass end a request that has not been scheduled yet.

    :param request: vLLM's Request, in ``get_num_new_matched_tokens``, which then answers "not known yet".
    """
    from vllm.sampling_params import StructuredOutputsParams  # noqa: PLC0415
    from vllm.v1.request import RequestStatus  # noqa: PLC0415
    from vllm.v1.structured_output.request import StructuredOutputRequest  # noqa: PLC0415

    log.warning("request_refused", request=request.request_id, reason=reason)
    failed = StructuredOutputRequest(StructuredOutputsParams(json_object=True))
    failed._grammar = PrefillLost(reason)
    request.structured_output_request = failed
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
