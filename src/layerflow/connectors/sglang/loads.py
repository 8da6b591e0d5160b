"""Loads of SGLang's batches: looked up when a request is matched, begun with its batch, waited for layer by layer."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import structlog

from layerflow.agent.values import Hit, StepRequest
from layerflow.connectors.common.guard import attempt, tell
from layerflow.connectors.sglang.breaker import LoadBreaker
from layerflow.connectors.sglang.layout import PoolLayout
from layerflow.expiring import ExpiringSet
from layerflow.keys import HashedChain

if TYPE_CHECKING:
    from layerflow.agent import Agent, NoStep, Step
    from layerflow.device.base import DeviceEvent

STALE_S = 1.0
"""A lookup's answer is used for so long: SGLang matches a waiting request in every round. Leases live longer."""

MOST_FOUND = 4096
"""Requests whose hits are remembered; the oldest are forgotten beyond that, the same ones on every rank."""

AVOID_S, MOST_AVOIDED = 30.0, 1024
"""A prefix whose load has failed is computed for so long: a client that repeats its request is served."""

LOST = "its hit was forgotten before it was loaded: too many requests wait"

log = structlog.get_logger("layerflow.sglang")


@dataclass(slots=True)
class _Found:
    """A lookup's answer.

    :param at: monotonic seconds.
    """

    hashes: Sequence[str]
    chain: HashedChain
    hit: Hit
    at: float


@dataclass(slots=True, eq=False)
class _Batch:
    """One batch of SGLang's that loads.

    :param step: None = it could not be opened.
    :param loads: by request.
    :param failed: by request: why.
    :param waited: the layers that have been waited for.
    """

    step: Step | NoStep | None
    loads: Mapping[str, StepRequest]
    failed: dict[str, str] = field(default_factory=dict)
    waited: set[int] = field(default_factory=set)


class Loads:
    """Of one worker, on its scheduler's thread.

    What ranks answer must be the same wherever SGLang does not compare it: :meth:`queue` depends on its arguments alone
    unless there is one rank. A rank whose load cannot be begun says so when the batch has ended.

    :param after: makes the event behind the last work that may touch the slots of a load; see
        :meth:`layerflow.agent.Agent.open_step`.
    :param timeout_s: of a batch's loads; None = the server's.
    """

    def __init__(
        self,
        agent: Agent,
        layout: PoolLayout,
        *,
        after: Callable[[], DeviceEvent | None],
        timeout_s: float | None,
        breaker: LoadBreaker,
    ) -> None:
        self._agent = agent
        self._layout = layout
        self._after = after
        self._timeout_s = timeout_s
        self._breaker = breaker
        self._single = agent.spec.shard.workers == 1
        self._found: OrderedDict[str, _Found] = OrderedDict()
        self._queued: dict[str, StepRequest] = {}
        self._refused: dict[str, str] = {}
        self._batches: dict[int, _Batch] = {}
        self._avoided = ExpiringSet[bytes](MOST_AVOIDED)  #: digests of the last pages of loads that have failed
        self._last = -1
        self.failures: dict[str, str] = {}  #: of the batch that has ended last: requests, and why

    def look_up(self, request: str, hashes: Sequence[str]) -> list[int]:
        """Every number of leading pages that can be loaded."""
        if self._breaker.open:
            return []
        now = time.monotonic()
        found = self._found.get(request)
        if found is None or now - found.at > STALE_S or found.hashes != hashes:
            chain = self._agent.hashed_chain([each.encode() for each in hashes])
            found = self._found[request] = _Found(hashes, chain, self._agent.lookup(request, chain), now)
            self._found.move_to_end(request)
            while len(self._found) > MOST_FOUND:
                forgotten, _ = self._found.popitem(last=False)
                self._agent.drop_lease(forgotten)
        if self._avoided.among(found.chain.digests, now):
            return []
        pages = found.hit.tokens // found.chain.chunk_tokens
        return list(range(1, pages + 1)) if self._layout.shortens else [pages] * bool(pages)

    def queue(self, request: str, pages: int, slots: Mapping[str, np.ndarray]) -> bool:
        """The request is in the batch that is being made; False = it is to be computed.

        :param pages: leading ones of its hit. :param slots: see :meth:`.layout.PoolLayout.tables`.
        """
        found = self._found.pop(request, None)
        lost = found is None or pages * found.chain.chunk_tokens > found.hit.tokens
        if self._single and (lost or not self._agent.attached):
            return False
        if found is None or lost:
            self._refused[request] = LOST
            return True
        tokens = pages * found.chain.chunk_tokens
        tables = self._layout.tables(pages, slots)
        self._queued[request] = StepRequest(request, found.chain, tables, load=(0, tokens), hit=found.hit)
        return True

    def cancel(self, request: str) -> bool:
        """The request has left before its batch began."""
        if self._refused.pop(request, None) is not None:
            return True
        if self._queued.pop(request, None) is None:
            return False
        self._agent.drop_lease(request)
        return True

    def start(self) -> int:
        """Begin what is queued; the batch's number, -1 = nothing is loaded."""
        if not self._queued and not self._refused:
            return -1
        self._last += 1
        queued, self._queued = self._queued, {}
        batch = _Batch(None, queued, dict(self._refused))
        self._refused.clear()
        self._batches[self._last] = batch
        try:
            batch.step = self._agent.open_step(list(queued.values()), self._timeout_s, after=self._after())
        except Exception as error:  # noqa: BLE001 - told, and SGLang is told that these have failed
            tell("start_layer_wise_loading", None, error)
            batch.failed |= dict.fromkeys(batch.loads, f"{type(error).__name__}: {error}"[:200])
        return self._last

    def wait(self, number: int, layer: int) -> None:
        """Wait until a layer of a batch is in place, or has failed, or for the step's deadline.

        :param layer: layerflow's number.
        """
        batch = self._batches.get(number)
        if batch is None or batch.step is None or layer in batch.waited:
            return
        batch.waited.add(layer)
        step = batch.step
        if not attempt(lambda: step.wait_layer(layer), "wait_until"):
            batch.failed |= dict.fromkeys(batch.loads, f"layer {layer} could not be waited for")

    def finish(self, number: int) -> bool:
        """Wait until the batch writes nothing any more; False = some of it is not in place, see :attr:`failures`."""
        batch = self._batches.pop(number, None)
        self.failures = {}
        if batch is None:  # it could not be begun: SGLang asks of batches that load, only
            return False
        if batch.step is not None:
            batch.step.wait_loaded(self._timeout_s or self._step_timeout_s())
            outcome = batch.step.wait_all()
            for blocks in outcome.failed:
                batch.failed.setdefault(blocks.request, blocks.reason)
            if outcome.aborted:
                batch.failed |= dict.fromkeys(batch.loads, "its load was cut off")
            batch.step.close()
        self.failures = batch.failed
        if not batch.failed:
            self._breaker.succeeded()
            return True
        until = time.monotonic() + AVOID_S
        for request in batch.failed:
            load = batch.loads.get(request)
            if load is not None:
                self._avoided.add(load.chain.digests[load.load[1] // load.chain.chunk_tokens - 1], until)
        reason = next(iter(batch.failed.values()))
        log.error("load_failed", requests=sorted(batch.failed)[:16], failed=len(batch.failed), reason=reason)
        self._breaker.failed(reason)
        return False

    def reset(self) -> None:
        """Nothing that was found or queued is loaded."""
        for request in [*self._found, *self._queued]:
            self._agent.drop_lease(request)
        for number in list(self._batches):
            self.finish(number)
        self._found.clear()
        self._queued.clear()
        self._refused.clear()

    def _step_timeout_s(self) -> float:
        terms = self._agent.terms
        return terms.step_timeout_ms / 1e3 if terms is not None else 60.0
