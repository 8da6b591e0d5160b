"""A request that ends with an error because its prefill is lost, or cannot be had: HTTP 500 of vLLM, 503 of the proxy.

A connector has no call for that. What vLLM's scheduler has is a request whose grammar could not be compiled: it waits
in a state of its own, and the next pass ends it with an error, whatever else runs. Since 0.33 that error says that the
client's grammar is at fault, which is HTTP 400: of ours it is made one of the server.
"""

from __future__ import annotations

import functools
from typing import Any

import structlog

log = structlog.get_logger("layerflow.vllm.pd")

SERVERS_FAULT = "Internal server error"
"""What vLLM tells a client whose request it has ended without a reason."""


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
    _tell_as_servers_fault()  # before the request is changed: what fails here leaves it as it was
    failed = StructuredOutputRequest(StructuredOutputsParams(json_object=True))
    failed._grammar = PrefillLost(reason)
    request.structured_output_request = failed
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


def _tell_as_servers_fault() -> None:
    """Let vLLM's scheduler name no client's fault where it ends a request for a prefill that is lost."""
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415

    promote = getattr(Scheduler, "_try_promote_blocked_waiting_request", None)
    if promote is None or "RequestError" not in promote.__code__.co_names:  # before 0.33, or wrapped already
        return
    from vllm.outputs import RequestError  # noqa: PLC0415

    @functools.wraps(promote)
    def told(self: Any, request: Any) -> Any:
        promoted = promote(self, request)
        ended = request.request_id in self.grammar_compile_error_reqs
        if ended and isinstance(request.structured_output_request.grammar, PrefillLost):
            self.grammar_compile_error_reqs[request.request_id] = RequestError("prefill_lost", SERVERS_FAULT)
        return promoted

    Scheduler._try_promote_blocked_waiting_request = told
