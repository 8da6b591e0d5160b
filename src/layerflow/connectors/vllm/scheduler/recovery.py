"""Takes back what vLLM has computed on a load of the running step that failed.

vLLM 0.32 hears of such a failure by block, and for one cache group only: with several it raises, and everything is
over. With one group and the next step under way by then it may emit that step's token, or compute on a token that is
not there yet. Its scheduler has what is needed all the same: it can preempt a running request and drop what the steps
in flight have computed for it, as when its prefix cache is reset under running requests. So layerflow looks at a step's
output just before vLLM does: a request whose load has failed is preempted, and so is every request that shares a block
with it from the failed load on, and they start over; or they end with an error where ``kv_load_failure_policy`` says
so. Not one token that was computed on such a block leaves the engine, none is saved, and the blocks leave vLLM's prefix
cache.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import structlog

from layerflow.connectors.vllm.context import sizes_of
from layerflow.connectors.vllm.scheduler.loads import NULL_BLOCK, PendingLoad
from layerflow.connectors.vllm.versions import release

KNOWN = ((0, 30), (0, 32), (0, 33))
"""The vLLMs whose scheduler this was written for."""
ENDS_REQUESTS = (0, 32)
"""From here on a request can be ended with an error from outside."""

log = structlog.get_logger("layerflow.vllm")

Tables = Sequence[Sequence[int]]


def is_known(vllm_version: str, scheduler_config: Any, *, recompute: bool) -> bool:
    """Is the engine's scheduler one that can be made to recover?

    :param scheduler_config: vLLM's.
    :param recompute: requests of failed loads are computed; else they end with an error.
    """
    found = release(vllm_version)
    if found not in KNOWN or not (recompute or found >= ENDS_REQUESTS):
        return False
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: PLC0415 - heavy, and not always asked for
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415

    return (
        scheduler_config.get_scheduler_cls() in {Scheduler, AsyncScheduler}
        and "drop_stale_output" in inspect.signature(Scheduler._preempt_request).parameters
    )


def install(connector: type[Any]) -> bool:
    """Let vLLM's scheduler recover, where :func:`is_known`.

    :param connector: the class that answers ``failed_in_step``.
    """
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415 - heavy, and not always asked for

    if not hasattr(Scheduler.update_from_output, "recovers"):
        original = Scheduler.update_from_output

        @functools.wraps(original)
        def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
            for own in _own(self.connector, connector):
                failed = own.failed_in_step(model_runner_output.kv_connector_output)
                if failed:
                    preempt_dependents(self, failed)
            return original(self, scheduler_output, model_runner_output)

        update_from_output.recovers = True  # type: ignore[attr-defined]
        Scheduler.update_from_output = update_from_output
    return True


def preempt_dependents(scheduler: Any, failed: Mapping[str, Sequence[PendingLoad]]) -> set[str]:
    """Preempt every request that has computed, or is to go on, on a load that failed.

    :param scheduler: vLLM's, before it looks at the step's output.
    :param failed: by request: its loads under way.
    :returns: the requests that were taken back.
    """
    sizes = sizes_of(scheduler.vllm_config.parallel_config).group_tokens(scheduler.kv_cache_config)
    invalid = _InvalidBlocks(sizes)
    for arrival in itertools.chain.from_iterable(failed.values()):
        invalid.add(arrival.tables, arrival.start)
        invalid.add(arrival.last, arrival.start)
    running = {request.request_id: request for request in scheduler.running}
    waiting = {
        request.request_id: request
        for request in _waiting(scheduler)
        if request.status.name == "WAITING_FOR_REMOTE_KVS"
    }
    holders = {name: scheduler.kv_cache_manager.get_block_ids(name) for name in (*running, *waiting)}
    for name in holders.keys() & failed.keys():
        if not failed[name]:  # which load is not known, so nothing of the request counts
            invalid.add(holders[name], 0)
    invalid_requests = invalid.closure(holders)
    gone = [failed[name] for name in failed.keys() - running.keys()]
    if all(arrivals and all(arrival.has_all_blocks for arrival in arrivals) for arrivals in gone):
        scheduler.kv_cache_manager.evict_blocks(invalid.blocks)
    else:
        # A request that was preempted meanwhile: which of its blocks vLLM had hashed is not known any more.
        pool = scheduler.kv_cache_manager.block_pool
        scheduler.kv_cache_manager.evict_blocks(set(range(len(pool.blocks))))
    now = time.monotonic()
    for name in reversed([name for name in running if name in invalid_requests]):  # the first is to be the first again
        scheduler.running.remove(running[name])
        scheduler._preempt_request(running[name], now, drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(name)
    scheduler._handle_failed_recving(invalid_requests & waiting.keys())
    if not scheduler.recompute_kv_load_failures:
        scheduler.encoder_cache_mismatch_reqs.update(invalid_requests)  # ended with an error, with the step's output
    log.warning(
        "step_loads_taken_back",
        failed=sorted(failed),
        requests=sorted(invalid_requests),
        outcome="recomputed" if scheduler.recompute_kv_load_failures else "ended with an error",
    )
    return invalid_requests


def _waiting(scheduler: Any) -> Iterable[Any]:
    """Requests that do not run, those with blocks among them."""
    if hasattr(scheduler, "kv_holding_waiting"):
        return scheduler.kv_holding_waiting  # type: ignore[no-any-return]
    return (*scheduler.waiting, *scheduler.skipped_waiting)  # before 0.32


class _InvalidBlocks:
    """Blocks that hold nothing valid, and what was computed on them.

    :param sizes: tokens of a block, per vLLM group.

    :ivar blocks: all of them.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._groups: list[set[int]] = [set() for _ in sizes]

    @property
    def blocks(self) -> set[int]:
        return set().union(*self._groups)

    def add(self, tables: Tables, start: int) -> None:
        """Everything of a request from a token on."""
        for invalid, size, table in zip(self._groups, self._sizes, tables, strict=False):
            invalid.update(table[start // size :])
            invalid.discard(NULL_BLOCK)

    def closure(self, holders: Mapping[str, Tables]) -> set[str]:
        """Who holds such a block; everything of these from there on is invalid too."""
        found: set[str] = set()
        while True:
            more = {name: at for name in holders.keys() - found if (at := self._first(holders[name])) is not None}
            if not more:
                return found
            for name, at in more.items():
                self.add(holders[name], at)
            found |= more.keys()

    def _first(self, tables: Tables) -> int | None:
        """The first token of an invalid block."""
        firsts = [
            number * size
            for invalid, size, table in zip(self._groups, self._sizes, tables, strict=False)
            for number, block in enumerate(table)
            if block in invalid
        ]
        return min(firsts, default=None)


def _own(connector: Any, wanted: type[Any]) -> Iterable[Any]:
    """Ours: vLLM's connector itself, or among those of a MultiConnector."""
    return [each for each in (connector, *getattr(connector, "_connectors", ())) if isinstance(each, wanted)]
