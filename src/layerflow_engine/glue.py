"""The engine's whole connection to layerflow, and the example for authors of other engines.

An engine owes the agent five things:
1. a :class:`~layerflow.spec.ModelSpec` that names whatever changes cached bytes (:func:`.identity.model_spec`);
2. a lookup before it allocates, and block tables that hold the hit's blocks (:meth:`LayerflowConnection.lookup`);
3. one open step per forward pass: what to load, what is being computed (:meth:`LayerflowConnection.open_step`);
4. ``wait_layer(i)`` before anything touches layer i's cache, ``layer_done(i)`` once its new KV is written;
5. patience: blocks are reused only when the agent is no longer busy with their request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import structlog

from layerflow.agent import MISS, Agent, Hit, Mode, StepRequest
from layerflow.agent import NoStep as NothingToMove
from layerflow.agent import Step as AgentStep
from layerflow.keys import Chain
from layerflow.spec import DEFAULT_CHUNK_TOKENS
from layerflow_engine.config import model_spec
from layerflow_engine.connection import NoStep, StepHooks
from layerflow_engine.engine import Engine
from layerflow_engine.request import Request, TokenSpan

ModeSetting = Literal["auto", "layerwise", "bulk"]
log = structlog.get_logger("layerflow_engine")


def attach(
    engine: Engine,
    endpoint: str,
    engine_id: str,
    *,
    mode: ModeSetting = "auto",
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    connect: Callable[[Agent, ModeSetting], LayerflowConnection] | None = None,
    **settings: Any,
) -> LayerflowConnection:
    """Register the engine's paged tensors with the server at `endpoint` and let the engine use it.

    :param connect: makes the connection; None = :class:`LayerflowConnection`.
    :param settings: further arguments of :class:`~layerflow.agent.Agent`.
    """
    spec = model_spec(engine.config, engine.model.weights, chunk_tokens)
    connection = (connect or LayerflowConnection)(
        Agent(endpoint, spec, engine.cache.tensors, engine_id, **settings), mode
    )
    engine.connect(connection)
    return connection


class _Live(NamedTuple):
    """What is needed again about a request: its digests (hashed once), its last lookup, and how to use it."""

    chain: Chain
    hit: Hit = MISS
    mode: Mode = Mode.RECOMPUTE


class LayerflowConnection:
    """Translates between the engine's requests and the agent's steps.

    :param agent: anything with :class:`~layerflow.agent.Agent`'s public methods.
    :param mode: ``"layerwise"``: wait for each layer when its turn comes; ``"bulk"``: wait for all of
        them before the first, as engines without layer-wise loading do; ``"auto"``: as the server's
        ``transfer.mode`` says, which may leave it to the agent to choose for each hit, or to recompute it.
    """

    def __init__(self, agent: Agent, mode: ModeSetting = "auto") -> None:
        self.agent = agent
        self.mode: ModeSetting = mode
        self._live: dict[str, _Live] = {}

    def lookup(self, request: Request) -> int:
        """Ask what can be loaded; a miss too while the server is away."""
        known = self._live.get(request.id)
        chain = known.chain if known else self.agent.chain(request.prompt.tolist())
        hit = self.find(request, chain)
        mode = self.choose(hit, len(request.prompt))
        if hit.tokens and mode is Mode.RECOMPUTE:
            self.agent.drop_lease(request.transfer_id)
            hit = MISS
        self._live[request.id] = _Live(chain, hit, mode)
        return hit.tokens

    def find(self, request: Request, chain: Chain) -> Hit:
        """What of a prompt can be loaded."""
        return self.agent.lookup(request.transfer_id, chain)

    def chain_of(self, request: Request) -> Chain:
        """The digests of a request that was looked up."""
        return self._live[request.id].chain

    def choose(self, hit: Hit, prompt_tokens: int) -> Mode:
        """How to use a hit."""
        return self.agent.advise(hit, prompt_tokens) if self.mode == "auto" else Mode(self.mode)

    def open_step(self, spans: Sequence[TokenSpan]) -> StepHooks:
        """Start the loads of the step's new requests, and announce the saves of the tokens that are computed."""
        decoded = self.agent.terms is not None and self.agent.terms.save_decode
        asked = [self._ask(span) for span in spans if decoded or span.start < len(span.request.prompt)]
        if not asked:
            return NoStep()
        names = {span.request.transfer_id: span.request.id for span in spans}
        bulk = any(span.load and self._live[span.request.id].mode is Mode.BULK for span in spans)
        return _LayerflowStep(self.agent, self.agent.open_step(asked), bulk, names)

    def _ask(self, span: TokenSpan) -> StepRequest:
        request = span.request
        live = self._live.get(request.id)
        if live is None:  # never looked up: it had too many failed loads and is only saved
            live = self._live[request.id] = _Live(self.agent.chain(request.prompt.tolist()))
        if span.stop > len(live.chain):
            live.chain.extend(request.tokens(len(live.chain), span.stop))
        return StepRequest(
            request=request.transfer_id,
            chain=live.chain,
            blocks=tuple(request.tables),
            load=(0, span.load),
            hit=live.hit,
            save=(span.start, span.stop),
            tail=span.stop == len(request.prompt),
        )

    def poll(self) -> None:
        """Hear what ended. Saves that were given up cost nothing but a later miss."""
        ended = self.agent.poll()
        for request, reason in ended.failed_saves:
            log.info("save_given_up", request=request, reason=reason)

    def busy(self, request: Request) -> bool:
        """May a transfer still touch this request's blocks?"""
        return self.agent.busy(request.transfer_id)

    def abort(self, request: Request) -> None:
        """Stop its transfers; until they have stopped it is busy."""
        self.agent.abort(request.transfer_id)

    def forget(self, request: Request) -> None:
        """It is over."""
        self._live.pop(request.id, None)

    def reset(self, model_content: str = "") -> None:
        """The engine's weights are being replaced."""
        self.agent.reset(model_content)
        self._live.clear()

    def close(self) -> None:
        """Detach from the server."""
        self.agent.close()


class _LayerflowStep:
    """The model's two hooks, on an agent's step."""

    def __init__(self, agent: Agent, step: AgentStep | NothingToMove, bulk: bool, names: Mapping[str, str]) -> None:
        self._agent, self._step, self._bulk, self._names = agent, step, bulk, names
        self._failed: set[str] = set()

    def wait_layer(self, layer: int) -> Collection[str]:
        """Ids of the requests that have lost KV so far; they are aborted, wait until quiet, and start over."""
        at_once = self._bulk and layer == 0
        outcome = self._step.wait_all() if at_once else self._step.wait_layer(layer)
        if outcome.ready:
            return ()
        for failed in outcome.failed:
            if failed.request not in self._failed:
                self._failed.add(failed.request)
                # Its new KV would be computed from bytes that never came: no chunk of it may be published.
                # Aborting now, before the last layer is done, makes sure of that. What is left of its
                # other loads stops too; the next lookup no longer offers the objects that failed.
                self._agent.abort(failed.request)
                log.warning(
                    "load_failed", request=failed.request, layer=layer, group=failed.group, reason=failed.reason
                )
        return {self._names[request] for request in self._failed}

    def layer_done(self, layer: int) -> None:
        """The saves of `layer` may leave."""
        self._step.layer_done(layer)

    def __enter__(self) -> _LayerflowStep:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._step.close(False if kind is not None else None)
