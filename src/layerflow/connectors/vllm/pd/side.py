"""Hand-offs in the connector's scheduler side: what it asks of them at each of vLLM's hooks."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import structlog

from layerflow.agent.values import Follow, Hit
from layerflow.connectors.vllm.context import ALONE, ContextParallel
from layerflow.connectors.vllm.pd.conventions.concurrent import QUERY, query_answer
from layerflow.connectors.vllm.pd.conventions.parts import (
    KEY,
    PLAIN,
    DecodePart,
    NoHandoff,
    Part,
    PrefillPart,
    RefusedPart,
    RequestParams,
    Sizes,
)
from layerflow.connectors.vllm.pd.conventions.reading import part_of
from layerflow.connectors.vllm.pd.decoding import DecodeHandoff, DecodeStatus, Decoding, summary_of
from layerflow.connectors.vllm.pd.options import PdOptions
from layerflow.connectors.vllm.pd.prefilling import PrefillHandoff, Prefilling
from layerflow.errors import ConfigError
from layerflow.keys import Chain
from layerflow.spec import ModelSpec, model_facts
from layerflow.system.descriptors import FOR_HTTP, leaves

if TYPE_CHECKING:
    from layerflow.agent.client import Inquiry
    from layerflow.agent.control import Control
    from layerflow.agent.lookups import Lookups


# ``GET /query`` of a prefill engine, for routers that ask for its name and decode engines that ask for its servers.


MOST_QUESTIONS = 16
"""That are answered at once. One more takes the place of the one that has been asking for longest."""
QUESTION_S = 5.0
"""From a connection to its end: the question is one line, and the answer is known."""


class _QuestionServer(ThreadingHTTPServer):
    """Has few threads and descriptors of the engine's process, for a moment each, whoever connects."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._asking: dict[socket.socket, None] = {}  #: oldest first; under the lock
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            oldest = next(iter(self._asking), None) if len(self._asking) >= MOST_QUESTIONS else None
            # One that was cut off ends at once. Where that takes its time, new ones have to wait for it.
            refused = len(self._asking) >= 2 * MOST_QUESTIONS or not leaves(request.fileno(), FOR_HTTP)
            if not refused:
                self._asking[request] = None
        if oldest is not None:
            _cut(oldest)
        if refused:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # The handler's own time-out begins again with each byte.
        timer = threading.Timer(QUESTION_S, _cut, (request,))
        timer.daemon = True
        try:
            timer.start()
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._ended(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell of errors, but of clients that have gone."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def _ended(self, request: socket.socket) -> None:
        with self._lock:
            self._asking.pop(request, None)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


class BootstrapServer:
    """Answers on a thread of its own until it is closed.

    :param answer: see :func:`.concurrent.query_answer`.
    :raises ConfigError: the port is taken.
    """

    def __init__(self, port: int, answer: Callable[[], dict[str, Any]], host: str = "") -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.split("?")[0] == QUERY
                told = answer() if found else {"error": f"only {QUERY} is served here"}
                body = json.dumps(told).encode()
                self.send_response(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        try:
            self._server = _QuestionServer((host, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"kv_connector_extra_config: pd: bootstrap_port = {port}: {error.strerror}; choose a free one"
            ) from error
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="layerflow-bootstrap", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


# A request that ends with an error because its prefill is lost, or cannot be had: HTTP 500 of vLLM, 503 of the proxy.
#
# A connector has no call for that. What vLLM's scheduler has is a request whose grammar could not be compiled: it waits
# in a state of its own, and the next pass ends it with an error, whatever else runs. Since 0.33 that error says that
# the client's grammar is at fault, which is HTTP 400: of ours it is made one of the server.


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


RequestHandoff = PrefillHandoff | DecodeHandoff | RefusedPart
"""What a request that is followed may have of one."""

LEAST_S = 0.1
"""A load that begins at its hand-off's deadline may take so long."""
TRUNCATED = "_p_side_truncated"
"""vLLM's own connectors mark a prompt so whose last token they have left to the decode engine."""


class TrackedRequest(Protocol):
    """What is needed of a request that the scheduler's side follows."""

    request: Any
    chain: Chain
    may_load: bool
    may_save: bool
    inquiry: Inquiry | None
    handoff: RequestHandoff | None

    @property
    def id(self) -> str:
        """vLLM's id."""
        ...

    @property
    def ends_early(self) -> bool:
        """The prompt goes on behind what has keys."""
        ...


_CHILD = re.compile(r"^\d+_")  # vLLM's id of one of a request's n samples


class HandoffSide:
    """One per engine, for its scheduler's thread.

    :param producer: vLLM's ``kv_role`` lets this engine prefill for others.
    :param consumer: it lets it decode what they have prefilled.
    :param data_parallel_rank: of this engine among `data_parallel_size`.
    """

    def __init__(
        self,
        options: PdOptions | None = None,
        engine_id: str = "",
        *,
        producer: bool = True,
        consumer: bool = True,
        block_sizes: tuple[int, ...] = (),
        context: ContextParallel = ALONE,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
    ) -> None:
        self.options = options or PdOptions()
        self._engine_id = engine_id
        self._incarnation = secrets.token_hex(4)
        self._producer, self._consumer = producer, consumer
        self.child = False  #: the connector is one of a MultiConnector's; known before any request is read
        self._block_sizes = block_sizes
        self._context = context
        self._truncates = False
        self._unit = 1
        self._prefilling: Prefilling | None = None
        self._decoding: Decoding | None = None
        self._can_refuse: bool | None = None
        self._bootstrap: BootstrapServer | None = None
        port = self.options.bootstrap_port
        if port and producer and data_parallel_rank == 0:
            engines = {rank: _ranked(engine_id, rank, data_parallel_size) for rank in range(data_parallel_size)}
            answer = query_answer(engines, self.options.servers, self._incarnation)
            self._bootstrap = BootstrapServer(port, lambda: answer)

    def meet(self, lookups: Lookups, control: Control, spec: ModelSpec, *, partial: bool = True) -> None:
        """The workers are known.

        :param partial: a prompt's last, partial chunk is saved.
        """
        first = urlsplit(self.options.servers[0]) if self.options.servers else None
        sizes = Sizes(
            engine_id=self._engine_id,
            host=(first.hostname or "") if first is not None else "",
            port=(first.port or 0) if first is not None else 0,
            tp_size=spec.shard.tp_size // self._context.prefill,
            pp_size=spec.shard.pp_size,
            block_sizes=self._block_sizes or tuple(group.block_size for group in spec.groups),
            dcp_size=self._context.decode,
            pcp_size=self._context.prefill,
        )
        layout = dict(model_facts(spec))
        # The state behind the last token cannot be continued from that token: it is left to the decode engine.
        self._truncates = spec.exact
        self._unit = 1 if partial else spec.chunk_tokens
        self._prefilling = Prefilling(
            lookups,
            layout=layout,
            sizes=sizes,
            servers=self.options.servers,
            others=self.options.other_servers,
            incarnation=self._incarnation,
        )
        self._decoding = Decoding(lookups, control, layout=layout, sizes=sizes, incarnation=self._incarnation)

    # -- a request arrives ------------------------------------------------------------------------

    def read(self, request: Any) -> Part:
        """Which part this engine plays for it. A prompt to prefill for a recurrent model loses its last token."""
        params = request.kv_transfer_params
        if params and not isinstance(params, Mapping):
            log.warning("handoff_not_followed", request=request.request_id, reason="kv_transfer_params is no object")
            return PLAIN
        if not params or not (params.get("do_remote_decode") or params.get("do_remote_prefill")):
            return PLAIN
        request_params = RequestParams(
            params,
            None,
            str(request.request_id),
            request.prompt_token_ids or (),
            f"{self._engine_id}:{self._incarnation}",
            self.options.deadline_s,
            self.options.lease_s,
            self.options.prefill_servers,
        )
        answers = not self.child if self.options.answer is None else self.options.answer
        part = part_of(request_params, answers=answers, producer=self._producer, consumer=self._consumer)
        if isinstance(part, NoHandoff) and part.reason:
            log.warning("handoff_not_followed", request=request.request_id, reason=part.reason)
        if isinstance(part, PrefillPart) and self._truncates:
            _truncate(request, params)
        return part

    def begin(self, tracked: TrackedRequest, part: Part) -> None:
        """Begin a request that has keys: open its hand-off, start its prefill, or wait for both."""
        if isinstance(part, PrefillPart) and self._prefilling is not None:
            unit = tracked.chain.chunk_tokens if tracked.ends_early else self._unit
            tokens = len(tracked.chain) // unit * unit if tracked.may_save else 0
            tracked.handoff = self._prefilling.begin(part, tracked.chain, tokens)
        elif isinstance(part, DecodePart) and self._decoding is not None:
            if tracked.may_load:
                tracked.handoff = self._decoding.begin(part, tracked.id)
            else:
                self._decoding.decline(part)
        elif isinstance(part, RefusedPart):
            tracked.handoff = part

    def without_keys(self, part: Part) -> None:
        """Decline for a request that has no keys: nothing of it is handed over, to it or by it."""
        if isinstance(part, DecodePart) and self._decoding is not None:
            self._decoding.decline(part)
        elif isinstance(part, PrefillPart) and self._prefilling is not None:
            self._prefilling.decline(part, "its prompt has no keys")

    def seeks(self, tracked: TrackedRequest) -> bool:
        """Is it not known yet where its hand-off is?"""
        handoff = tracked.handoff
        if not isinstance(handoff, DecodeHandoff) or self._decoding is None:
            return False
        return self._decoding.seeks(handoff)

    # -- is it scheduled? ---------------------------------------------------------------------------

    def follow(self, tracked: TrackedRequest) -> Follow | None:
        """What its lookup asks for."""
        handoff = tracked.handoff
        if not isinstance(handoff, DecodeHandoff) or self._decoding is None:
            return None
        return self._decoding.follow(handoff)

    def waits(self, tracked: TrackedRequest, budget_s: float) -> bool:
        """Must vLLM ask again, before there is anything to look up?

        :param budget_s: how long this call may take.
        """
        handoff = tracked.handoff
        if isinstance(handoff, PrefillHandoff) and self._prefilling is not None:
            return self._prefilling.waits(handoff, budget_s)
        if isinstance(handoff, DecodeHandoff) and self._decoding is not None:
            if self._decoding.refused(handoff):
                tracked.inquiry = None  # it waits for the hand-off
            return self._decoding.seeks(handoff)
        if isinstance(handoff, RefusedPart):
            tracked.handoff = None
            return self._refuse(tracked, handoff.reason)
        return False

    def rest(self, tracked: TrackedRequest, wait_s: float) -> None:
        """Nothing is computed, and the request :meth:`waits`: so does this, a moment, for what it waits for."""
        handoff = tracked.handoff
        if isinstance(handoff, DecodeHandoff) and handoff.query is not None:
            handoff.query.wait(wait_s)

    def accepts(self, tracked: TrackedRequest, hit: Hit) -> bool:
        """Is this the answer? False: it has to be looked up again, for the hand-off is elsewhere."""
        handoff = tracked.handoff
        if not isinstance(handoff, DecodeHandoff) or self._decoding is None:
            return True
        return self._decoding.answered(handoff, hit)

    def follows(self, tracked: TrackedRequest) -> bool:
        """Is its lookup one of a hand-off?"""
        return isinstance(tracked.handoff, DecodeHandoff) and tracked.handoff.followed

    def claimed(self, tracked: TrackedRequest) -> bool:
        """The hit is a hand-off's: it is loaded in the background, whatever computing it would cost."""
        return isinstance(tracked.handoff, DecodeHandoff) and tracked.handoff.status is DecodeStatus.CLAIMED

    def gives_up(self, tracked: TrackedRequest, missing: int) -> bool:
        """Is so much to be computed, because its prefill is lost, that the request ends with an error instead?

        :param missing: tokens of the prompt that are neither here nor stored.
        """
        handoff, most = tracked.handoff, self.options.max_recompute_tokens
        if not most or missing <= most:
            return False
        if not isinstance(handoff, DecodeHandoff) or handoff.status is not DecodeStatus.LOST:
            return False
        return self._refuse(
            tracked,
            f"its prefill is lost ({handoff.reason}); {missing} tokens would be computed here, max_recompute_tokens is "
            f"{most}",
        )

    def timeout_of(self, tracked: TrackedRequest) -> dict[str, float]:
        """By its id: how long its load may take, seconds; {} = as any other's."""
        if not self.claimed(tracked):
            return {}
        assert isinstance(tracked.handoff, DecodeHandoff)
        return {tracked.id: max(LEAST_S, tracked.handoff.until - time.monotonic())}

    @property
    def restarts(self) -> bool:
        """A load that fails is told as a whole, so that vLLM asks again how much of the request is to be computed."""
        return self.options.max_recompute_tokens > 0

    # -- how it ends --------------------------------------------------------------------------------

    def loaded(self, tracked: TrackedRequest) -> None:
        """Note that a request's background load has ended."""
        if isinstance(tracked.handoff, DecodeHandoff) and self._decoding is not None:
            self._decoding.loaded(tracked.handoff, shared=_is_shared(tracked.id, tracked.handoff))

    def load_failed(self, tracked: TrackedRequest) -> bool:
        """Something of a load did not arrive. True: it was a hand-off's, and what is stored is still to be had."""
        handoff = tracked.handoff
        if not isinstance(handoff, DecodeHandoff) or self._decoding is None or not handoff.followed:
            return False
        self._decoding.lose(handoff, "its load has failed")
        return True

    def outdated(self, tracked: TrackedRequest) -> None:
        """The weights are being replaced."""
        self.give_up(tracked, "weights were replaced")

    def give_up(self, tracked: TrackedRequest, reason: str) -> None:
        """Give up handing a request over.

        :param reason: of the engine that gives it up.
        """
        if isinstance(tracked.handoff, PrefillHandoff) and self._prefilling is not None:
            self._prefilling.fail(tracked.handoff, f"the prefill engine's {reason}")
        elif isinstance(tracked.handoff, DecodeHandoff) and self._decoding is not None:
            self._decoding.lose(tracked.handoff, f"the decode engine's {reason}")

    def finished(self, tracked: TrackedRequest, blocks: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The request is over: what its response says of the hand-off."""
        handoff = tracked.handoff
        if isinstance(handoff, PrefillHandoff) and self._prefilling is not None:
            return self._prefilling.finished(handoff, tracked.request, blocks) or {}
        if isinstance(handoff, DecodeHandoff) and self._decoding is not None:
            told = summary_of(handoff)
            # Its lease ends one that others may still read.
            if handoff.status is not DecodeStatus.LOADED or not _is_shared(tracked.id, handoff):
                self._decoding.release(handoff)
            return {KEY: told}
        return {}

    def response(self, summary: dict[str, Any], told: dict[str, Any]) -> dict[str, Any] | None:
        """A response's ``kv_transfer_params``: what its hand-off tells, and a summary; both may use our key.

        A MultiConnector may end the engine where two of its connectors say anything (vLLM-Ascend's does, and others
        where they say the same key): there a summary alone is told only where the user has these keys answered here.
        """
        if self.child and not told and not self.options.answer:
            return None
        return {**summary, **told, KEY: {**told.get(KEY, {}), **summary.get(KEY, {})}}

    def close(self) -> None:
        """End its threads."""
        if self._decoding is not None:
            self._decoding.close()
        if self._bootstrap is not None:
            self._bootstrap.close()

    def _refuse(self, tracked: TrackedRequest, reason: str) -> bool:
        """End the request with an error, where this vLLM can."""
        if self._can_refuse is None:
            self._can_refuse = can_end_with_error()
        if not self._can_refuse:
            log.warning("request_not_refused", request=tracked.id, reason=reason, why="this vLLM has no way to")
            return False
        end_with_error(tracked.request, reason)
        return True


def _is_shared(request: str, handoff: DecodeHandoff) -> bool:
    """Has each of the request's n samples the same hand-off? What this engine has asked a metaserver for is its own."""
    return _CHILD.match(request) is not None and not handoff.part.metaserver


def _truncate(request: Any, params: dict[str, Any]) -> None:
    """Take the prompt's last token off, once: preempted, the request is read again."""
    if params.get(TRUNCATED) or request.num_prompt_tokens < 2 or request.prompt_token_ids is None:
        return
    del request.prompt_token_ids[-1:]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
    params[TRUNCATED] = True


def _ranked(engine_id: str, rank: int, size: int) -> str:
    """What vLLM calls the engine of a data-parallel rank."""
    return engine_id if size == 1 else f"{re.sub(r'_dp[0-9]+$', '', engine_id)}_dp{rank}"
