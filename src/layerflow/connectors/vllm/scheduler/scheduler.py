"""The scheduler's side: looks prompts up, decides how hits are loaded, and says what each step moves.

A hit reaches its request in one of two ways. *In the step*: the request runs at once and each layer waits for its
own blocks. *In the background*: the request waits, vLLM goes on with others, and it runs when everything is there.
Layer-wise loading is the first, bulk the second; :mod:`.loads` says which hits of models with several cache groups may
take the first.

Loads can fail, also on another rank, while later steps are planned already: :class:`.plan.SaveApprovals` says whose
saves count.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from layerflow.agent.control import DEFAULT_LOOKUP_TIMEOUT_S, Control
from layerflow.agent.costs import LoadPolicy
from layerflow.agent.descriptors import check_name, loads_drafts
from layerflow.agent.lookups import Lookups
from layerflow.agent.values import MISS
from layerflow.connectors.common.guard import attempt, guarded, nothing
from layerflow.connectors.vllm.identity.identity import RequestKeys
from layerflow.connectors.vllm.options import Options
from layerflow.connectors.vllm.pd.side import HandoffSide
from layerflow.connectors.vllm.plan import (
    NO_REPORT,
    Promise,
    RanPlans,
    SaveApprovals,
    StepPlan,
    UnkeptLoad,
    WorkerLayout,
    WorkerReport,
)
from layerflow.connectors.vllm.scheduler.keys import OwnCache, PromptKeys
from layerflow.connectors.vllm.scheduler.loads import StepLoads, are_rewritten, plan_load
from layerflow.connectors.vllm.scheduler.requests import Allocation, BlockHolders, RequestState, load_save_flags
from layerflow.connectors.vllm.scheduler.saves import SavePlanner
from layerflow.connectors.vllm.scheduler.search import HitSearch
from layerflow.errors import LayerflowError
from layerflow.flow.cost import Mode
from layerflow.spec import ModelSpec

if TYPE_CHECKING:
    from layerflow.connectors.vllm.scheduler.events import PoolEvents

QUIET_S, QUIET_LOOK_S = 5.0, 0.02
"""How long a reset waits for saves to end, and how often it looks; a worker's saves begin 5 ms behind a short step."""

TELL_S = 0.5
"""How long a reset may wait for the server; it is complete without it."""

CONNECT_S = 2.0
"""How long vLLM's start may wait for a server, so that the first prompt finds it."""

log = structlog.get_logger("layerflow.vllm")


def _no_hit() -> tuple[int | None, bool]:
    """A prompt is computed."""
    return 0, False


def _frees() -> tuple[bool, dict[str, Any] | None]:
    """vLLM frees the request's blocks; a step that takes them ends the saves that read them."""
    return False, None


class SchedulerSide:
    """One per engine.

    :param engine_id: vLLM's, shared with its workers.
    :param block_tokens: of each of vLLM's cache groups, the tokens that a block stands for.
    :param name: what the engine is called in status, logs and metrics; "" = `engine_id`.
    :param can_fail_in_background: vLLM can be told that a background load of several groups has failed.
    :param recovers: vLLM takes back what was computed on a load of the running step that has failed; of several groups.
    :param trusts_sight: vLLM recovers from a load that fails, so that a hit need not wait for its lease.
    :param events: tells routers what can be hit, where vLLM's KV cache events are on.
    :param keys: hashes its requests.
    :param reuses: nothing is loaded or saved unless it is set, and no worker tells a layout.
    :param handoffs: between prefill and decode engines.
    :param keeps_reports: see :class:`.loads.StepLoads`.
    :param num_blocks: of vLLM's cache.
    :param tells_loads: its scheduler says of each step whether a connector loads in it, if this vLLM's does at all.
    :param drains_holders: vLLM lets requests run first that hold blocks for their loaded prompt.
    """

    def __init__(
        self,
        options: Options,
        engine_id: str,
        block_tokens: Sequence[int],
        *,
        name: str = "",
        can_fail_in_background: bool,
        recovers: bool = False,
        trusts_sight: bool = False,
        events: PoolEvents | None = None,
        keys: RequestKeys | None = None,
        reuses: bool = True,
        handoffs: HandoffSide | None = None,
        drains_holders: bool = True,
        keeps_reports: bool = True,
        num_blocks: int = 0,
        tells_loads: bool = True,
    ) -> None:
        self.options = options
        self._num_blocks = num_blocks
        self._tells_loads = tells_loads
        self.events = events
        self._engine_id = engine_id
        self._name = name
        self.step_loads = StepLoads(
            block_tokens, recovers=recovers and options.mode != "bulk", keeps_reports=keeps_reports
        )
        self.own_cache = OwnCache()
        self._keys = PromptKeys(keys or RequestKeys(), options.model_content)
        self._handoffs = handoffs or HandoffSide()
        self._trusts_sight = trusts_sight
        self._holders = None if drains_holders else BlockHolders()
        self._block_tokens = tuple(block_tokens)
        self._may_load = options.load and (len(block_tokens) == 1 or can_fail_in_background)
        self._tracked: dict[str, RequestState] = {}
        self._loading: list[RequestState] = []
        self._promised: dict[str, Promise] = {}
        self._leaving: list[str] = []
        self._aborted: list[str] = []
        self._ranks = 0
        self._lookups: Lookups | None = None
        self._search: HitSearch | None = None
        self._control: Control | None = None
        self._advisor: LoadPolicy | None = None
        self._saves: SavePlanner | None = None
        self._ran = RanPlans()
        self._verdicts = SaveApprovals()
        self._layouts: list[WorkerLayout] = []
        self._shares_steps = False  # with another connector
        self._unplanned = False  # a plan could not be made
        # Of the scheduling pass that runs: tokens that vLLM had itself by request, and who got blocks.
        self._own_tokens: dict[str, int] = {}
        self._allocated: list[Allocation] = []
        self._unmet: dict[str, Any] | None = {} if reuses else None
        self._awaits_weights = False
        self._replaced = False
        self._replaced_early = False
        self._held: set[str] = set()  # finished requests whose blocks vLLM keeps for their saves
        if options.load and not self._may_load:
            reason = "this vLLM cannot recover from a failed load of several cache groups; prompts are only saved"
            log.warning("loading_off", groups=len(block_tokens), reason=reason)

    def _introduce(self, layout: WorkerLayout, connected: bool) -> None:
        """Say once, in the engine's log, what is cached and how, and what is not."""
        spec, options = layout.model_spec, self.options
        missing = [
            f"group {number} with engines of other tensor sizes: {why}" for number, why in spec.bound_to_size().items()
        ]
        if options.load and not self._may_load:
            missing.append("loads, as this vLLM cannot recover from a failed load of several cache groups")
        log.info(
            "connector_ready",
            engine=self._name or self._engine_id,
            engine_id=self._engine_id,
            model=spec.name,
            server=layout.endpoint,
            embedded=not options.endpoint,
            connected=connected,
            mode=options.mode,
            loads=self._may_load,
            saves=options.save,
            chunk_tokens=spec.chunk_tokens,
            groups=[
                f"{group.kind}: {len(group.layers)} layers, {group.block_size} tokens a block" for group in spec.groups
            ],
            not_supported=missing,
        )

    @property
    def spec(self) -> ModelSpec | None:
        """What the keys of prompts depend on; None = no worker has told its layout yet."""
        return self._keys.spec

    def meet_workers(self, layouts: Sequence[WorkerLayout], connect_s: float = CONNECT_S) -> None:
        """All workers have registered their caches. Called again, or with none, it does nothing.

        vLLM's handshake may leave some out: it has one place for all ranks that share a prompt's computation, and
        before 0.32 for all stages. Then the first step's reports bring the layouts of all, or that some worker's
        weights have no digest yet.

        :param connect_s: how long this may wait for the server.
        """
        if not layouts or self.spec is not None:
            return
        if not all(layout.spec for layout in layouts):
            return self.await_weights()
        first = layouts[0]
        spec = first.model_spec
        if len(layouts) < spec.shard.workers:
            return
        self._handoffs.child = first.siblings is not None  # first: from here on requests are read
        self._shares_steps = first.shares_steps
        self._keys.spec = spec
        self._ranks = len(layouts)
        self.step_loads.meet_workers(layouts)
        at_sight = self._trusts_sight and not self.step_loads.needs_answer
        self._lookups = Lookups(first.endpoint, self._engine_id, spec, name=self._name, at_sight=at_sight)
        connected = self._lookups.wait_connected(connect_s)
        self._control = Control(first.endpoint, self._engine_id, spec, name=self._name)
        self._introduce(first, connected)
        self._advisor = LoadPolicy(spec)
        self._saves = SavePlanner(
            spec, first.vllm_groups, self._block_tokens, self.options, num_blocks=self._num_blocks
        )
        self._handoffs.meet(self._lookups, self._control, spec, partial=self.options.save_partial)
        wait_s, compute_s = self.options.lookup_wait_s, self._advisor.compute_seconds
        self._search = HitSearch(self._lookups, self._handoffs, wait_s, compute_s)
        if self.events is not None:
            endpoint, engine, name = first.endpoint, self._engine_id, self._name
            connect = functools.partial(Control, endpoint, engine, name=name)
            self.events.meet_workers(spec, first.vllm_groups, connect)
        if self._replaced_early:
            self._keys.replaced(in_use=True)
            self._replaced = True
        waiting, self._unmet = self._unmet or {}, None
        for request in waiting.values():
            self.arrived(request)

    # -- a request arrives ------------------------------------------------------------------------

    @guarded(nothing)
    def arrived(self, request: Any) -> None:
        """Hash the prompt and start its lookup before its answer is waited for."""
        if self._unmet is not None and not self._awaits_weights:
            self._unmet[request.request_id] = request
        if self.spec is None:
            return
        part = self._handoffs.read(request)
        if request.prompt_embeds is not None or not request.prompt_token_ids:
            return self._handoffs.without_keys(part)
        try:
            check_name(request.request_id)
            chain = self._keys.chain(request)
        except LayerflowError as error:
            self._handoffs.without_keys(part)
            return self._unknown(request, error)
        if not len(chain):
            return self._handoffs.without_keys(part)
        may_load, may_save = load_save_flags(request.kv_transfer_params)
        may_load &= self._may_load and not request.skip_reading_prefix_cache
        tracked = RequestState(request, chain, may_load, may_save and self.options.save)
        self._tracked[request.request_id] = tracked
        if self._saves is not None:
            self._saves.open(tracked)
        self._handoffs.begin(tracked, part)
        if may_load and self._search is not None and not self._handoffs.seeks(tracked):
            self._search.ask(tracked)

    @guarded(_no_hit)
    def matched(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those vLLM has, None = not known yet; and whether in the background."""
        self._look_at_own_cache()  # before what starts in this step is noted: its blocks lie in the emptied cache
        self._keys.starts(request)
        self._own_tokens[request.request_id] = num_computed
        if self._unmet is not None and request.request_id in self._unmet:
            return None, False  # a step, be it empty, brings the workers' layouts
        tracked = self._tracked.get(request.request_id)
        if self._holders is not None and self._holders.go_first(request, self.step_loads.has_blocks):
            return None, False
        if tracked is None or self._search is None or self._advisor is None:
            return 0, False
        if len(tracked.chain) > request.num_tokens:  # another connector has taken a token off since it arrived
            self._end(tracked)
        if self._search.undecided(tracked):
            return None, False
        if not self._is_current(tracked, num_computed) or not tracked.may_load:
            return 0, False
        hit = self._search.find(tracked, num_computed)
        if hit is None:
            return None, False
        tracked.hit, tracked.local = hit, num_computed
        if self.events is not None:
            self.events.found(tracked, hit.tokens)
        more = hit.tokens - num_computed
        if more <= 0:
            return 0, False
        if self._handoffs.claimed(tracked):
            tracked.background = True
            return more, True
        mode = self._advisor.advise(self.options.mode, hit, request.num_tokens)
        if mode is Mode.RECOMPUTE:
            return 0, False
        tracked.background = mode is Mode.BULK or not self.step_loads.may(hit, request.num_tokens)
        return more, tracked.background

    @guarded(nothing)
    def allocated(self, request: Any, blocks: Any, num_external: int) -> None:
        """vLLM has given the request its blocks: the load is on, or not."""
        self.step_loads.allocated(request.request_id)
        tracked = self._tracked.get(request.request_id)
        asked = tracked.local if tracked is not None and num_external else request.num_computed_tokens
        own = self._own_tokens.pop(request.request_id, asked)
        self._allocated.append(Allocation(request.request_id, blocks, own))
        if tracked is None or self._lookups is None:
            return
        tracked.tables = blocks.get_block_ids()
        tracked.reads_tables &= request.num_computed_tokens > 0  # else it comes, or was preempted
        if num_external > 0:  # first: whatever follows, it is loaded, or reported as failed
            promised = Promise(tracked.tables, tracked.local, num_external, tracked.background)
            self._promised[tracked.id] = promised
            if self._holders is not None and tracked.background:
                self._holders.loading(tracked.id)
        if tracked.hit is MISS:
            return
        if self._saves is not None:
            self._saves.know(tracked)
        if num_external > 0:
            tracked.load = (tracked.local, tracked.local + num_external)
            self._loading.append(tracked)
        else:
            self._lookups.drop_lease(tracked.id)
            tracked.hit, tracked.inquiry = MISS, None

    # -- a step -----------------------------------------------------------------------------------

    def plan(self, output: Any) -> StepPlan:
        """What the step moves, and which loads that vLLM was promised it does not.

        :param output: vLLM's SchedulerOutput.
        """
        self._look_at_own_cache()
        plan = self._plan(output)
        if self._unplanned and self._saves is not None:  # what the step overwrites may be any block
            plan.fresh, self._unplanned = self._saves.every_block(), False
            plan.prepared = plan.fresh[0] if plan.fresh else ()
        plan.step = self.own_cache.step
        plan.replaced, self._replaced = self._replaced, False
        plan.unkept = self._unkept(plan)
        self._await_verdict(plan, output)
        self.own_cache.planned(computes=bool(output.num_scheduled_tokens))
        return plan

    def _look_at_own_cache(self) -> bool:
        emptied = self.own_cache.look()
        if emptied:
            self._keys.forget_cached()
        return emptied

    @guarded(StepPlan)
    def _plan(self, output: Any) -> StepPlan:
        if self._search is not None:
            self._search.pass_over(idle=not output.num_scheduled_tokens)
        if self._holders is not None:
            self._holders.planned(output.num_scheduled_tokens)
        plan = StepPlan(restarts=self._handoffs.restarts)
        allocated, self._allocated = self._allocated, []
        self._own_tokens.clear()
        if self._saves is None:
            return plan
        plan.verdicts = self._verdicts.take()
        plan.fresh = self._saves.fresh(output, allocated)
        plan.prepared = self._saves.prepared(output, plan.fresh)
        plan.rewritten = are_rewritten(self._saves.spec, output, self._loading)
        loading, self._loading = self._loading, []
        kept: list[str] = []
        for tracked in loading:
            tokens = output.num_scheduled_tokens.get(tracked.id, 0)
            if attempt(functools.partial(self._load, tracked, plan, tokens), "build_connector_meta"):
                kept.append(tracked.id)
            else:
                self._forsake(tracked)
        self._saves.step(output, plan)
        if self.events is not None and plan.saves:
            self.events.planned(plan.saves.requests, self._tracked)
        plan.leaving, plan.aborted = tuple(self._leaving), tuple(self._aborted)
        self._leaving, self._aborted = [], []
        for request in kept:  # last: a plan that raises on its way here has no loads
            self._promised.pop(request, None)
        return plan

    @guarded(nothing)
    def update_from_output(self, output: Any) -> None:
        """What the workers report after a step.

        :param output: vLLM's KVConnectorOutput, of all ranks.
        """
        self._held -= output.finished_sending or set()
        report = output.kv_connector_worker_meta
        if not isinstance(report, WorkerReport):
            report = NO_REPORT
        if self._unmet is not None:
            self._met(report.layouts)
        if report.changed:
            self._found_replaced(report.changed)
        for request in output.finished_recving or ():
            if self._holders is not None:
                self._holders.loaded(request)
            if request in self._tracked:
                self._tracked[request].arriving = False
                if request not in report.failed:
                    self._handoffs.loaded(self._tracked[request])
        lost = bool(output.invalid_block_ids or report.lost)
        ran = self._ran.record(report.ran, of=self._ranks)
        self._verdicts.record_output(ran, failed=lost)
        self.step_loads.seen(report.asking)
        if lost and self._saves is not None:
            self._saves.again(self._tracked.values())
        self._drop(*self.step_loads.ended(ran))
        for request, share in report.failed.items():
            self._load_failed(request, share)
        for request, overlap in report.overlaps.items():
            if request in self._tracked:
                self._tracked[request].overlap = overlap
        if self._saves is not None:
            for (request, number), ranks in report.drained.items():
                self._saves.drained(request, number, ranks, self._ranks)
        if report.costs is not None and self._advisor is not None:
            self._advisor.adopt(*report.costs)

    @guarded(_frees)
    def finished(self, request: Any, tables: tuple[list[int], ...] = ()) -> tuple[bool, dict[str, Any] | None]:
        """The request is over: must its blocks stay until :attr:`StepPlan.leaving` is answered; what its response says.

        While a background load is under way vLLM itself keeps them, until every rank has told its end: then that is the
        one sign that frees them. A save that is still open reads blocks of before that load, which vLLM has freed
        already; :meth:`SavePlanner.fresh` guards those. `tables`: its block ids per cache group.
        """
        if self._unmet is not None:
            self._unmet.pop(request.request_id, None)
        tracked = self._tracked.pop(request.request_id, None)
        under_way = self.step_loads.finished(request.request_id, tables)
        if self._holders is not None:
            self._holders.finished(request.request_id)
        if tracked is None:
            return False, None
        if self._saves is not None:
            self._saves.close(tracked)
        # A load gives back what it has pinned; the lease also covers shorter tails, and what vLLM had itself.
        leased = tracked.hit is not MISS or tracked.may_hold_lease or tracked.loaded_tokens
        if leased and not under_way:
            self._drop(tracked.id)
        if tracked.load is not None:
            self._loading.remove(tracked)
            self._promised.pop(tracked.id, None)
        told = self._handoffs.response(tracked.summary(), self._handoffs.finished(tracked, tables))
        # vLLM takes one sign alone that frees a request: where another connector loads it, that one gives it.
        reads = tracked.reads_tables and not tracked.arriving
        stays = reads and self._saves is not None and self._saves.reading(tracked.id)
        if stays:
            self._leaving.append(tracked.id)
            self._held.add(tracked.id)
        if tracked.arriving:
            self._aborted.append(tracked.id)
        return stays, told

    @guarded(lambda: False)
    def reset(self) -> bool:
        """The weights are being replaced under the same name: nothing computed with the old ones is loaded again.

        vLLM calls this when it pauses, before the new weights come. From here on all keys are others, so that no
        server, tier or node can answer with what was stored before; that needs no message. The server is told so that
        it drops what is under way, the workers with the next plan.
        """
        if self.spec is None or self._control is None or self._lookups is None or self._saves is None:
            self._replaced_early = True  # the digest that the workers will tell is that of the old weights
            return True
        emptied = self._look_at_own_cache()  # vLLM empties it right before, unless any request has a block
        running = bool(self._held) or any(t.request.num_computed_tokens > 0 for t in self._tracked.values())
        self._replace(in_use=not emptied if self.own_cache.is_seen else running)
        try:
            return self._quiesce(self._control)
        except LayerflowError as error:  # without a server the workers have cut off what they had under way
            log.warning("reset_not_told", error=str(error))
        return True

    def _replace(self, in_use: bool) -> None:
        self._keys.replaced(in_use)
        self._replaced = True
        for tracked in self._tracked.values():
            self._end(tracked)
        if self.events is not None and self.spec is not None:
            self.events.replaced(self.spec)

    def _found_replaced(self, steps: dict[int, str]) -> None:
        """Workers compute with other weights than the keys say, and nobody has called :meth:`reset`.

        They load and save nothing by keys of before any more. Which requests have computed with which weights is not
        known: those that run now are not saved, and neither is what vLLM's own cache finds, unless that was emptied
        before the first step with the new weights.

        :param steps: see :attr:`WorkerReport.changed`.
        """
        emptied = all(self.own_cache.was_empty_at(step) for step in steps)
        log.warning("weights_changed", seen=sorted(set(steps.values())), own_cache_emptied=emptied)
        if self.spec is None or self._control is None:
            self._replaced_early = True
            return
        self._replace(in_use=not emptied)
        try:
            self._control.reset(TELL_S)
        except LayerflowError as error:
            log.warning("reset_not_told", error=str(error))

    def _quiesce(self, control: Control) -> bool:
        """Tell the server, and wait until no worker touches its engine's memory, which vLLM may unmap next.

        False: some still do. Workers report to this side with steps only, and none follows: the server is asked. Saves
        that were to begin a moment behind the last step have begun, and are cut off as well, when it says so twice.
        """
        told = control.reset(TELL_S)
        if self._saves is None or not self._saves.any_reading:
            return True
        until, idle_answers = time.monotonic() + QUIET_S, 0
        while time.monotonic() < until:
            idle_answers = 0 if told["steps"] else idle_answers + 1
            if idle_answers > 1:
                return True
            time.sleep(QUIET_LOOK_S)
            told = control.reset(TELL_S)
        log.warning("reset_while_saving", steps=told["steps"], waited_s=QUIET_S)
        return False

    def _end(self, tracked: RequestState) -> None:
        """Nothing of the request is loaded or saved any more, unless it starts anew."""
        self._handoffs.outdated(tracked)
        if self._saves is not None:
            self._saves.close(tracked)
        if tracked.load is not None:
            return  # the next plan loads it, as vLLM was told
        if tracked.may_hold_lease:
            self._drop(tracked.id)
        tracked.outdate()

    def _drop(self, *requests: str) -> None:
        for request in requests:
            if self._lookups is not None:
                self._lookups.drop_lease(request)

    def _is_current(self, tracked: RequestState, num_computed: int) -> bool:
        """May the request, which starts now, load and save? What it takes from vLLM's own cache must be current too."""
        assert self._saves is not None
        if self._keys.renamed():
            for other in self._tracked.values():
                self._end(other)
            if self.events is not None and self.spec is not None:
                self.events.replaced(self.spec)
        if num_computed and self._keys.are_mixed(tracked.request):
            self._end(tracked)
            return False
        try:
            if tracked.outdated:
                tracked.renew(self._keys.chain(tracked.request))
                self._saves.open(tracked)
            else:
                self._keys.read_adapter(tracked.request)
        except LayerflowError as error:
            self._unknown(tracked.request, error)
            return False
        return True

    def _unknown(self, request: Any, error: LayerflowError) -> None:
        """The request has no keys; where its adapter is to blame, others of that adapter have none any more."""
        log.warning("request_not_cached", request=ascii(request.request_id)[1:-1][:200], error=str(error))
        for tracked in self._tracked.values():
            if self._keys.lost(tracked.request):
                tracked.may_save = False
                self._end(tracked)

    def hook_failed(self, hook: str, subject: Any) -> None:
        """See :class:`..guard.Side`."""
        name = getattr(subject, "request_id", "")
        if self._unmet is not None:
            self._unmet.pop(name, None)
        tracked = self._tracked.get(name)
        if tracked is not None:
            self._forsake(tracked)
        if hook == "_plan":
            self._loading.clear()
            self._unplanned = True

    def _forsake(self, tracked: RequestState) -> None:
        """The request is computed without layerflow from here on: what it has open ends, as far as that can be done."""
        del self._tracked[tracked.id]
        if tracked in self._loading:
            self._loading.remove(tracked)
        ends: list[Callable[[], object]] = [
            functools.partial(self._handoffs.give_up, tracked, "connector has failed on this request"),
            functools.partial(self._handoffs.finished, tracked, tracked.tables),
            functools.partial(self._drop, tracked.id),
        ]
        if self._saves is not None:
            ends.append(functools.partial(self._saves.close, tracked))
        for end in ends:
            attempt(end, "request_finished")

    def _unkept(self, plan: StepPlan) -> dict[str, UnkeptLoad]:
        """Loads that vLLM was promised, and that no plan has; the step computes on those of running requests."""
        if not self._promised:  # nearly always
            return {}
        assert self.spec is not None and self._saves is not None  # else nothing is promised
        promised, self._promised = self._promised, {}
        for name, promise in promised.items():
            if not promise.background:
                self.step_loads.planned(self._saves.number(plan), name, promise.start, promise.tables)
        size = self.spec.groups[0].block_size
        return {name: promise.unkept(size) for name, promise in promised.items()}

    def _await_verdict(self, plan: StepPlan, output: Any) -> None:
        """Where the step may compute on a load that fails, or that has failed already, its saves wait."""
        if self._saves is None:
            return
        unkept = any(not load.background for load in plan.unkept.values())
        # Another connector's failures are not told to these workers; that one loads in a step is, from vLLM 0.29 on.
        told = getattr(output, "has_sync_kv_loads", None) if self._tells_loads else None
        loads = bool(plan.loads or plan.tails or unkept or (self._shares_steps if told is None else told))
        plan.depends_on_load = self._verdicts.concerns(loads=loads, saves=bool(plan.saves))
        if plan.depends_on_load:
            self._verdicts.planned(self._saves.number(plan), loads=loads, saves=bool(plan.saves))

    def close(self) -> None:
        """Hang up."""
        self._keys.close()
        self._handoffs.close()
        if self._lookups is not None:
            self._lookups.close()
        if self._control is not None:
            self._control.close()
        if self.events is not None:
            self.events.close()

    def await_weights(self) -> None:
        """Some worker's weights have no digest yet: requests run without being cached until all have told theirs."""
        self._awaits_weights = True
        if self._unmet:
            self._unmet.clear()

    def _met(self, layouts: Sequence[WorkerLayout]) -> None:
        """Layouts that came with a step's output: behind another connector's handshake there is no earlier way."""
        named = [layout for layout in layouts if layout.spec]
        if len(named) < len(layouts):
            self.await_weights()
        self._layouts += named
        if self._layouts and len(self._layouts) == self._layouts[0].model_spec.shard.workers:
            self.meet_workers(self._layouts, DEFAULT_LOOKUP_TIMEOUT_S)
        elif self._unmet:
            reason = "the workers have not told their cache's layout; these requests are not cached"
            log.warning("layouts_missing", known=len(self._layouts), requests=len(self._unmet), reason=reason)
            self._unmet.clear()

    def _load_failed(self, request: str, share: float) -> None:
        """A load has failed, of so large a share of its blocks: save what is computed instead; load the rest again?"""
        tracked = self._tracked.get(request)
        if tracked is None or self._search is None or self._saves is None:
            return
        self._search.load_failed(tracked, share)
        self._saves.again([tracked])

    def _load(self, tracked: RequestState, plan: StepPlan, tokens: int) -> None:
        assert self.spec is not None and self._saves is not None and self._search is not None
        self._search.take(tracked)
        if tracked.load is not None:
            tracked.drafted &= loads_drafts(self.spec, tracked.hit, tracked.load[1])
        tracked.loaded_tokens += plan_load(
            self.spec,
            tracked,
            self._saves.tables(tracked.tables),
            tokens,
            plan=plan,
            early=self.step_loads.early_groups,
        )
        if tracked.background:
            plan.timeouts |= self._handoffs.timeout_of(tracked)
        else:
            assert tracked.load is not None
            self.step_loads.planned(self._saves.number(plan), tracked.id, tracked.load[0], tracked.tables)
        tracked.load, tracked.hit, tracked.inquiry = None, MISS, None
