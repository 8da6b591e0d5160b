"""The worker's side: the agent in vLLM's hooks.

One step of vLLM is up to two steps of the agent: one for the blocks that must be there before the forward pass,
one for everything else. Loads in the background are steps of their own and outlive vLLM's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import structlog

from layerflow.agent import Agent, LoadResult, NoStep, Step
from layerflow.agent.agent import REPLACED
from layerflow.agent.descriptors import PartDescriptor
from layerflow.agent.lanes.save import FAST_LAYER_S
from layerflow.connectors.common.guard import guarded, nothing, tell
from layerflow.connectors.common.loaded import LoadedWeights
from layerflow.connectors.vllm.layout import Layout
from layerflow.connectors.vllm.plan import StepPlan, Verdict, WorkerLayout, WorkerReport, requests_of
from layerflow.connectors.vllm.worker.deferred import Deferred
from layerflow.connectors.vllm.worker.figures import StepCounters
from layerflow.connectors.vllm.worker.hooks import LayerHooks
from layerflow.connectors.vllm.worker.order import LoadOrder, RunnerOrder
from layerflow.connectors.vllm.worker.outcome import FailedLoads, LandingLoads, all_failed
from layerflow.connectors.vllm.worker.stats import TransferStats
from layerflow.device.base import DeviceEvent
from layerflow.errors import Unsupported

RECLAIM_S = 0.2
"""How long saves that still read recycled blocks may go on before they are given up."""

SETTLE_S = 5e-3
"""How long into the step behind a short forward pass its saves begin: the engine is still answering."""

BEGIN_S = 1e-3
"""How long the forward pass may be held up for its loads to begin; the first layer would wait for them anyway."""

IDLE_WAIT_S = 1e-3
"""How long a pass without a forward waits for background loads: it has nothing else to do."""

NOT_ASKED = "vLLM has computed its layers without asking for their loaded blocks"
BROKEN_HOOK = "the connector has failed in a hook of its step"
NOT_OPENED = "vLLM has not run the step that was to load it"
UNMAPPED = "vLLM has unmapped its KV cache (sleep)"
TWICE = "a layer was computed twice in one forward pass, and this may have been read in between"
CHANGED = "the weights were replaced without a reset, and its keys are those of the old ones"
SKIPPED = "layers that usually call their hooks were not computed"

log = structlog.get_logger("layerflow.vllm")


def _no_transfers() -> tuple[set[str], set[str], set[str]]:
    """Nothing is told to have ended; what has ended is told with the next step."""
    return set(), set(), set()


def _no_blocks() -> set[int]:
    """The same of blocks."""
    return set()


def _no_stats() -> TransferStats | None:
    """The same of figures."""
    return None


def _no_report() -> WorkerReport | None:
    """The same of all else."""
    return None


class WorkerSide:
    """One per worker.

    :param early: loads may begin before vLLM has prepared the step: nothing that it does then touches the blocks.
    :param in_flight: on a device; see :class:`.order.LoadOrder`.
    :param taken_back: vLLM's scheduler is told which requests' loads have failed in a running step, not which blocks.
    :param splits: vLLM may compute a pass in micro-batches, each layer once for each of them.
    :param weights: what this worker computes with; None = nobody writes to it.
    :param siblings: as of :class:`..plan.WorkerLayout`.
    """

    def __init__(
        self,
        agent: Agent,
        layout: Layout,
        endpoint: str,
        *,
        several_groups: bool,
        early: bool,
        in_flight: int | None = None,
        taken_back: bool = False,
        splits: bool = False,
        weights: LoadedWeights | None = None,
        siblings: tuple[str, ...] | None = None,
    ) -> None:
        self._agent = agent
        self._measured = agent.measured
        self._layout = layout
        self._endpoint = endpoint
        self._siblings = siblings
        self._early = early
        self._order = LoadOrder(agent.record, in_flight)
        self._runner = RunnerOrder()
        self._hooks = LayerHooks(layout)
        self._hooks_told = False
        self._saves_at_end = splits
        self._weights = weights or LoadedWeights(())
        self._keys_outdated = False  # plans go on to come with keys of old weights, until one says that it knows
        self._changed: dict[int, str] = {}  # to be told
        # The plan that arrived last, and how far its step has come.
        self._plan: StepPlan | None = None
        self._opened: StepPlan | None = None
        self._bound = False
        self._in_pass = False
        self._has_run = False
        self._loads_judged = True
        self._all_awaited = False
        self._tails_awaited = False
        self._late = False
        self._layer = ""
        self._put_off: StepPlan | None = None
        self._computed_at: DeviceEvent | None = None
        self._step: Step | NoStep | None = None
        self._drafts: Step | NoStep | None = None  # what it saves of a draft model
        self._drafts_tried = False  # some pass has run in which they could have been saved
        self._tails: Step | NoStep | None = None
        self._background: dict[str, Step | NoStep] = {}
        self._unopened: dict[str, list[PartDescriptor]] = {}
        self._arrived: set[str] = set()  # requests whose background loads have ended, or never begin: to be told
        self._outdated: dict[str, str] = {}  # background loads whose bytes are of no use, and why
        self._cancelled: set[str] = set()  # their requests are over
        self._leaving: set[str] = set()
        self._failures = FailedLoads(several_groups=several_groups, taken_back=taken_back)
        self._ran: set[int] = set()
        self._landing = LandingLoads()
        self._held: dict[int, list[Step]] = {}
        self._met = False
        self._loads_of: dict[int, tuple[str, ...]] = {}
        self._overlaps: dict[str, tuple[float, float]] = {}
        self._saving: dict[str, int] = {}
        self._unopened_saves: dict[int, StepPlan] = {}
        self._counters = StepCounters()
        self._unmapped = False
        self._deferred = Deferred(SETTLE_S)  # last: its thread ends with close() only

    @property
    def greeting(self) -> WorkerLayout:
        """For the scheduler's side."""
        spec = msgspec.msgpack.encode(self._layout.spec)
        return WorkerLayout(spec, self._layout.vllm_groups, self._endpoint, self._siblings)

    # -- before the forward pass --------------------------------------------------------------------

    @guarded(nothing)
    def prepare(self, plan: StepPlan, *, inside: bool = False) -> None:
        """A plan has arrived: blocks that its step overwrites must be nobody's source any more.

        :param inside: a forward context is set; see :class:`.order.RunnerOrder`.
        """
        if self._unmapped:
            raise Unsupported(UNMAPPED)
        self._runner.arrived(inside=inside)
        if not self._runner.asks_first:
            self._give_up(plan.prepared)
        self._finish_last()
        if plan.replaced:
            self._cancel_all(REPLACED)
            self._weights.accept()
            self._keys_outdated = False
        elif plan.moves and not self._keys_outdated and (change := self._weights.change()):
            self._keys_outdated = True
            self._changed[plan.step] = change
            self._cancel_all(CHANGED)
        if self._put_off is not None:
            self._submit_put_off(self._put_off)
        self._plan, self._late, self._layer = plan, False, ""
        self._bound = self._in_pass = self._has_run = self._all_awaited = self._tails_awaited = False
        self._loads_judged, self._unopened = not (plan.loads or plan.tails), dict(plan.background)
        self._hooks.begin()
        self._order.begin(plan)
        if plan.empty:
            return
        self._judge(plan.verdicts)
        if any(plan.fresh):
            if any(unopened.saves.read_any(plan.fresh) for unopened in list(self._unopened_saves.values())):
                self._deferred.flush()
            cut = self._agent.reclaim(plan.fresh, RECLAIM_S)
            self._counters.add("revoked_saves", cut)
        if self._keys_outdated:
            self._saving.update(dict.fromkeys(plan.saves.requests, plan.number))  # told to have ended, like others
            return self._refuse(plan, CHANGED)
        self._late = self._may_be_late(plan)
        if not self._late and (self._early or not (plan.loads or plan.tails) or self._order.is_known(plan)):
            self._open(plan)

    @guarded(bool)
    def begin(self, plan: StepPlan, *, inside: bool = True) -> bool:
        """The step is prepared; False if its layers need not call their hooks.

        :param inside: as of :meth:`prepare`.
        """
        if self._plan is not plan:
            self.prepare(plan, inside=True)  # nothing was asked before the step was prepared
        self._runner.bound(inside=inside)
        self._in_pass = True
        if plan.empty:
            self._bound = True
            return self._hooks.unseen
        if self._opened is not plan and not (plan.idle or self._late):
            self._open(plan)
        if self._step is not None and self._early:
            self._step.begin_loads(BEGIN_S)
        self._bind(plan)
        return not (plan.idle or self._late) or self._hooks.unseen

    def _bind(self, plan: StepPlan) -> None:
        """What the plan asks for beside its forward pass."""
        if not self._bound:
            self._answer(plan)
        for request in plan.aborted:
            self._agent.abort(request)
            if request in self._background:  # else its load has ended, and was told
                self._cancelled.add(request)
        for request, parts in list(self._unopened.items()):
            timeout_s, after = plan.timeouts.get(request), self._order.after(plan)
            step = self._agent.open_descriptors(parts, [], timeout_s=timeout_s, after=after)
            step.want_all()
            self._background[request] = self._remember(step, (request,))
            del self._unopened[request]
            self._counters.add("background_loads", 1)

    def _answer(self, plan: StepPlan) -> None:
        """What vLLM is to hear of the step, whatever becomes of it."""
        self._bound = True
        if plan.depends_on_load:
            self._ran.add(plan.number)
        self._leaving.update(plan.leaving)
        self._failures.restarts = plan.restarts
        for request, load in plan.unkept.items():
            self._failures.unkept(request, load)
            if load.background:
                self._arrived.add(request)

    def hook_failed(self, hook: str, subject: Any) -> None:
        """See :class:`..guard.Side`: the step's loads have failed, and it saves nothing."""
        if isinstance(subject, StepPlan) and subject is not self._plan:
            self._plan, self._unopened = subject, dict(subject.background)
            self._bound, self._loads_judged = False, not (subject.loads or subject.tails)
        plan = self._plan
        if plan is None:
            return
        if not self._bound:
            self._answer(plan)
        for step in (self._step, self._tails, self._drafts):
            if isinstance(step, Step):
                step.cancel_saves(BROKEN_HOOK)
        self._refuse(plan, BROKEN_HOOK)
        if hook == "prepare":  # no save may go on to read what vLLM overwrites, nor wait for a verdict that was lost
            self._cancel_all(BROKEN_HOOK)
            self._held.clear()

    def _refuse(self, plan: StepPlan, reason: str) -> None:
        """What of the plan is not open by now is not opened any more: its loads are reported here."""
        self._late = False
        self._opened = plan
        self._failures.restarts = plan.restarts
        self._saving.update(dict.fromkeys(plan.saves.requests, plan.number))
        unopened, self._unopened = self._unopened, {}
        for request, parts in unopened.items():
            self._arrived.add(request)
            self._report(parts, all_failed(parts, reason), None, background=True)
        if not self._loads_judged:
            self._loads_judged = True
            self._fail(plan.tails, reason, self._tails)
            self._fail(plan.loads, reason, self._step)

    @guarded(nothing)
    def wait_tails(self) -> None:
        """Wait for blocks that the forward pass writes to, or reads before their layer asks for them."""
        if self._tails is not None:
            self._tails_awaited = not self._hooks.asked
            self._check(self._tails, self._tails.wait_all())

    @guarded(nothing)
    def wait_unasked(self, metadata: Any) -> None:
        """Before a forward pass of vLLM-Ascend: wait for all layers where its latent attention waits for none.

        That skips the hook in a pass without prefills, and a hit of all but a few tokens counts as no prefill.

        :param metadata: of the pass's attention; usually by layer.
        """
        layers = metadata.values() if isinstance(metadata, dict) else [metadata]
        if any(getattr(layer, "num_prefills", None) == 0 for layer in layers):
            self.wait_whole()

    @guarded(nothing)
    def wait_whole(self) -> None:
        """Wait for all layers before the forward pass: no layer of it may ask, as in a replay of one whole graph."""
        if self._step is not None:
            self._all_awaited = not self._hooks.asked
            self._check(self._step, self._step.wait_all())

    @guarded(nothing)
    def wait_layer(self, name: str) -> None:
        """Before the layer's attention."""
        number = self._layout.numbers.get(name)
        self._layer = name
        if number is None or not self._in_pass:  # a hook outside of the pass is not of the step that is open
            return
        if not self._hooks.ask(number):
            self._called_twice(name)
        if self._step is not None:
            outcome = self._step.wait_layer(number)
            if not outcome.ready:
                self._check(self._step, outcome)

    @guarded(nothing)
    def layer_written(self, name: str) -> None:
        """The new keys and values of a layer are written, "" = of the one last waited for; its attention comes."""
        number = self._layout.numbers.get(name or self._layer)
        if number is not None and self._in_pass:
            self._computed(number, name or self._layer, once=self._hooks.write(number))

    @guarded(nothing)
    def layer_done(self, name: str) -> None:
        """Report a layer as computed: its KV is written, and its attention is over."""
        number = self._layout.numbers.get(name)
        if number is not None and self._in_pass:
            self._computed(number, name, once=self._hooks.save(number))

    # -- after it -----------------------------------------------------------------------------------

    @guarded(nothing)
    def end(self) -> None:
        """The forward pass has ended: layers without hooks are done now."""
        crashed = sys.exc_info()[0] is not None  # vLLM calls this on its way out too
        self._has_run |= not crashed
        self._doubt_reads()
        self._end_pass(crashed=crashed)

    def _end_pass(self, *, crashed: bool) -> None:
        learns, self._in_pass = self._in_pass and not crashed, False
        if learns and self._hooks.end():
            self._hooks_told = False
        if self._step is None and self._tails is None and not self._late and self._loads_judged:  # most steps
            return
        plan, late, self._late = self._plan, self._late, False
        if plan is not None and late and not crashed:
            self._saving.update(dict.fromkeys(plan.saves.requests, plan.number))
            self._computed_at = self._agent.record()  # here: only this thread's stream is the one that computes
            self._unopened_saves[plan.number] = self._put_off = plan
        if not crashed:
            self._judge_loads()
        step, self._step = self._step, None
        drafts, self._drafts = self._drafts, None
        tails, self._tails = self._tails, None
        if tails is not None:
            tails.close()
        ok = False if crashed or self._failures.in_step else None
        if drafts is not None:
            self._drafts_tried = self._drafts_tried or not crashed
            drafted = ok is None and self._has_drafted(step)
            if drafted:
                self._mark_done(drafts)
            drafts.close(None if drafted else False)
        if step is None:
            return
        if not crashed:
            self._wait_drafts(step)
            if self._hooks.skipped and isinstance(step, Step):
                step.cancel_saves(SKIPPED)
            self._mark_done(step)
        step.close(ok)

    @guarded(_no_transfers)
    def transfers(self, *, forward: bool) -> tuple[set[str], set[str], set[str]]:
        """Requests whose saves have ended, whose background loads have, and those of them that failed.

        :param forward: the pass computed something.
        """
        if sys.exc_info()[0] is None:
            # Where vLLM ends the pass of its model here and that of its draft model later, nothing is told behind this.
            self._has_run = True
            self._judge_loads()
        self._weights.rest()
        self._doubt_reads()
        if not (self._background or self._leaving or self._arrived):  # most steps
            return set(), set(), set()
        if self._background and not forward:
            next(iter(self._background.values())).wait_loaded(IDLE_WAIT_S)
        for request, step in list(self._background.items()):
            if request in self._cancelled:
                step.close()
                if self._agent.busy(request):
                    continue
                self._cancelled.discard(request)
                del self._background[request]
                self._arrived.add(request)
            elif self._has_loaded(request, step):
                del self._background[request]
                self._outdated.pop(request, None)
                self._arrived.add(request)
        sent = {request for request in self._leaving if not self._saving_for(request)}
        self._leaving -= sent
        arrived, self._arrived = self._arrived, set()
        return sent, arrived, self._failures.take_waiting() & arrived

    @guarded(_no_blocks)
    def failed_blocks(self) -> set[int]:
        """Block ids that hold no valid bytes, since the last call."""
        self._take_landed()
        return self._failures.take_blocks()

    @guarded(_no_stats)
    def stats(self) -> TransferStats | None:
        """What was moved since the last call; None = nothing, or it can wait for the next step."""
        if self._in_haste:
            return None
        self._poll_agent()
        taken = self._counters.take()
        return TransferStats(data=taken) if taken else None

    @guarded(_no_report)
    def report(self) -> WorkerReport | None:
        """For the scheduler's side; None = nothing new, or it can wait for the next step."""
        layouts = () if self._met else (self.greeting,)
        self._met = True
        told, self._hooks_told = self._hooks_told, True
        asking = {} if told else {self._rank: self._hooks.asking}
        self._take_landed()
        ran = {number: 1 for number in self._ran if not self._landing.waits(number)}
        if self._in_haste and not (self._failures.shares or ran or layouts or asking or self._changed):
            return None
        drained = {request: 1 for request in self._saving.items() if not self._is_busy(request[0])}
        changed, self._changed = self._changed, {}
        if not (self._overlaps or drained or self._failures.shares or ran or layouts or asking or changed):
            return None
        for request, _ in drained:
            del self._saving[request]
        overlaps, self._overlaps = self._overlaps, {}
        self._ran -= ran.keys()
        return WorkerReport(
            overlaps=overlaps,
            drained=drained,
            costs=self._agent.costs,
            failed=self._failures.take_shares(),
            lost=self._failures.take_lost(),
            ran=ran,
            layouts=layouts,
            asking=asking,
            changed=changed,
        )

    def let_go(self) -> None:
        """The engine's cache is about to be unmapped: when this returns nothing reads or writes it any more.

        Until :meth:`take_up` a step's loads fail, and it saves nothing. Called again it does nothing.
        """
        self._unmapped = True
        self._cancel_all(UNMAPPED)

    def take_up(self) -> None:
        """The engine's cache is mapped again, at the same addresses. Called again it does nothing."""
        self._unmapped = False

    def close(self) -> None:
        """Cut off what is open and hang up."""
        if self._put_off is not None:
            self._submit_put_off(self._put_off)
        self._deferred.close()
        self._agent.close()

    # -- inside -------------------------------------------------------------------------------------

    @property
    def _in_haste(self) -> bool:
        """Whether saves are deferred behind a short forward pass. Reports may wait: vLLM always runs another step."""
        return self._put_off is not None

    def _judge(self, verdicts: Sequence[Verdict]) -> None:
        """Publish what is held back, or give it up. Before blocks are reclaimed, which cuts steps that are held."""
        for number, sound in verdicts:
            for step in self._held.pop(number, ()):
                self._agent.release_saves(step, sound=sound)

    def _cancel_all(self, reason: str) -> None:
        """What was planned before is neither loaded nor saved any more, nor is anything published of it."""
        self._put_off = None
        self._unopened_saves.clear()
        self._deferred.flush()  # one of them may be opened just now: it is cut off with the rest
        self._outdated = dict.fromkeys(self._background, reason)  # what has come of these is of no use either
        self._counters.add("revoked_saves", self._agent.revoke(reason))

    def _submit_put_off(self, plan: StepPlan) -> None:
        """The saves of the short pass before this step: its answer has left."""
        self._put_off = None
        self._deferred.put(functools.partial(self._save_late, plan, self._computed_at))

    def _may_be_late(self, plan: StepPlan) -> bool:
        """May the step's saves begin behind it, without hooks in it? A draft model's hooks show whether it computes."""
        waits = plan.depends_on_load or plan.awaited or self._hooks.drafts
        return bool(plan.saves) and not waits and self._is_short(plan)

    def _is_short(self, plan: StepPlan) -> bool:
        """Is the forward pass so short that its saves had better begin behind it, without hooks and messages in it?"""
        compute = self._agent.costs[1]
        return compute is not None and plan.work is not None and compute.layer_seconds(*plan.work) < FAST_LAYER_S

    def _open(self, plan: StepPlan) -> None:
        self._opened = plan
        self._counters.add("step_loads", len({part.request for part in (*plan.loads, *plan.tails)}))
        after = self._order.after(plan)
        if plan.tails:
            tails = self._agent.open_descriptors(plan.tails, [], after=after)
            self._tails = self._remember(tails, requests_of(plan.tails))
            self._landing.opened(plan.number, tails)
        if plan.loads or plan.saves:
            saves, drafts = self._divided(plan.saves.parts)
            opened = self._agent.open_descriptors(plan.loads, saves, work=plan.work, after=after)
            self._step = self._remember(opened, requests_of(plan.loads))
            # One that was not seen to write all of its layers may never be: room for it would be given up again.
            drafts_known = self._hooks.ever_drafted or not self._drafts_tried
            self._drafts = self._agent.open_descriptors([], drafts) if drafts and drafts_known else None
            self._landing.opened(plan.number, opened)
            self._saving.update(dict.fromkeys(plan.saves.requests, plan.number))
            for step in (self._step, self._drafts):
                if isinstance(step, Step) and step.saves:
                    self._prepare_saves(plan, step)

    def _prepare_saves(self, plan: StepPlan, step: Step) -> None:
        # A layer that is computed twice in a pass is found out at its second call at the earliest.
        step.publish_when_closed()
        if plan.depends_on_load:
            step.hold_saves()
            self._held.setdefault(plan.number, []).append(step)

    def _divided(self, saves: Sequence[PartDescriptor]) -> tuple[list[PartDescriptor], list[PartDescriptor]]:
        """What is saved of the model and of its draft model."""
        names = self._layout.spec.shard.drafts
        parts: tuple[list[PartDescriptor], list[PartDescriptor]] = ([], [])
        for part in saves:
            parts[bool(names and names[part.group])].append(part)
        return parts

    # -- what vLLM was seen to do -------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        shard = self._layout.spec.shard
        return shard.pp_rank * shard.tp_size + shard.tp_rank

    def _computed(self, number: int, name: str, *, once: bool) -> None:
        if not once:
            self._called_twice(name)
        step = self._step
        at_end = self._saves_at_end or number in self._hooks.drafts
        if isinstance(step, Step) and not at_end and not step.is_done(number):
            step.layer_done(number)

    def _called_twice(self, name: str) -> None:
        """The layer goes on writing although its saves may have begun: from now on all begin behind the pass."""
        if self._saves_at_end:
            return
        self._saves_at_end = True
        log.warning("layer_computed_twice", layer=name, outcome="saves begin behind the forward pass from now on")
        if isinstance(self._step, Step):
            self._step.cancel_saves(TWICE)

    def _finish_last(self) -> None:
        """Close what the plan before has left: vLLM does not end every step, nor run every one that it has planned."""
        plan = self._plan
        if plan is None or (self._bound and not self._in_pass and self._loads_judged):
            return
        if not self._bound:
            self._bind(plan)
        if self._in_pass or self._step is not None or self._tails is not None or not self._loads_judged:
            self._judge_loads()
            self._end_pass(crashed=not self._has_run)

    def _judge_loads(self) -> None:
        """The model has computed: what the step has loaded and no layer has waited for in time has failed."""
        if self._loads_judged or self._plan is None:
            return
        self._loads_judged = True
        plan = self._plan
        if self._opened is not plan:
            self._fail([*plan.loads, *plan.tails], NOT_OPENED)
            return
        if plan.tails and not self._tails_awaited:
            self._fail(plan.tails, NOT_ASKED, self._tails)
        if not self._all_awaited:
            groups = self._layout.spec.groups
            names = self._layout.spec.shard.drafts
            unasked = {
                group
                for group in {part.group for part in plan.loads}
                if not (names and names[group]) and not self._hooks.asked.issuperset(groups[group].layers)
            }
            if unasked:
                self._fail([part for part in plan.loads if part.group in unasked], NOT_ASKED, self._step)

    def _fail(self, parts: Sequence[PartDescriptor], reason: str, step: Step | NoStep | None = None) -> None:
        """The pass has computed on blocks that may have held nothing."""
        if isinstance(step, Step):
            step.fence(reason)
            for layer in range(step.num_layers):  # what is enqueued already lands before vLLM writes these blocks again
                step.order(layer)
        self._report(parts, all_failed(parts, reason), step, background=False)

    def _wait_drafts(self, step: Step | NoStep) -> None:
        """Loads of a draft model that vLLM has left out land before its blocks are used again."""
        if isinstance(step, Step) and step.loads:
            for layer in self._hooks.drafts - self._hooks.asked:
                self._landing.reported(step, step.wait_layer(layer))  # nobody has computed on what has failed of these

    def _has_drafted(self, step: Step | NoStep | None) -> bool:
        """Has the draft model computed its layers on what the step has loaded of them?

        vLLM may leave it out of a pass: what it was not seen to compute is not there. And a cache that asks for nothing
        is only known to have its loads where they came before the pass.
        """
        if not self._hooks.drafted:
            return False
        groups = self._layout.spec.groups
        loaded = {layer for part in _loads(step) for layer in groups[part.group].layers}
        return self._all_awaited or self._hooks.asked.issuperset(loaded & self._hooks.drafts)

    def _doubt_reads(self) -> None:
        """VLLM may prepare its next step now, without asking."""
        if not self._runner.asks_first:
            self._agent.doubt_reads()

    def _give_up(self, blocks: Sequence[int]) -> None:
        """VLLM has overwritten these blocks before it asked: saves that may have read them since are not published."""
        per_group = (tuple(blocks),) * len(self._layout.spec.groups)
        if blocks:
            spoilt = [plan for plan in list(self._unopened_saves.values()) if plan.saves.read_any(per_group)]
            for plan in spoilt:
                self._unopened_saves.pop(plan.number, None)
                if self._put_off is plan:
                    self._put_off = None
            if spoilt:
                self._deferred.flush()  # one of them may be opened just now
            self._counters.add("revoked_saves", len(spoilt))
        self._counters.add("revoked_saves", self._agent.overwritten(per_group))

    def _has_loaded(self, request: str, step: Step | NoStep) -> bool:
        """Has this load in the background ended? What came of it is told."""
        try:
            if not step.wait_loaded(0.0):
                return False
            outcome = self._outdated_or(request, step, step.wait_all())
        except Exception as error:  # noqa: BLE001 - told: it costs its request only
            tell("get_finished", None, error)
            outcome = all_failed(_loads(step), BROKEN_HOOK)
            if isinstance(step, Step):
                step.fence(BROKEN_HOOK)
        self._check(step, outcome, background=True)
        step.close()
        return True

    def _saving_for(self, request: str) -> bool:
        """May a save still read the request's blocks?"""
        return self._owes(request) or self._agent.saving(request)

    def _is_busy(self, request: str) -> bool:
        return self._owes(request) or self._agent.busy(request)

    def _owes(self, request: str) -> bool:
        """Is a save of the request yet to be opened?"""
        return any(request in plan.saves.requests for plan in list(self._unopened_saves.values()))

    def _remember(self, step: Step | NoStep, loading: tuple[str, ...]) -> Step | NoStep:
        if loading and isinstance(step, Step):
            self._loads_of[step.number] = loading
        return step

    def _save_late(self, plan: StepPlan, computed: DeviceEvent | None) -> None:
        """On the deferred thread, or where the engine's is about to reuse blocks."""
        if plan.number not in self._unopened_saves:  # given up since
            return
        try:
            step = self._agent.open_descriptors([], plan.saves.parts)
            self._mark_done(step, computed)
            step.close()
        finally:
            # Last: from here on the agent knows of these saves, or there are none and their blocks may go.
            self._unopened_saves.pop(plan.number, None)

    def _mark_done(self, step: Step | NoStep, event: DeviceEvent | None = None) -> None:
        if isinstance(step, Step):
            for number in range(self._layout.spec.num_layers):
                if not step.is_done(number):
                    step.layer_done(number, event)

    def _outdated_or(self, request: str, step: Step | NoStep, outcome: LoadResult) -> LoadResult:
        reason = self._outdated.get(request)
        return all_failed(_loads(step), reason) if reason else outcome

    def _check(self, step: Step | NoStep, outcome: LoadResult, *, background: bool = False) -> None:
        if not outcome.ready and isinstance(step, Step):
            self._report(step.loads, outcome, step, background=background)

    def _report(
        self, parts: Sequence[PartDescriptor], outcome: LoadResult, step: Step | NoStep | None, *, background: bool
    ) -> None:
        """A failed load: tell vLLM what to compute, and publish nothing that was computed from it."""
        self._failures.add(parts, outcome, background=background)
        if isinstance(step, Step) and not background:
            self._landing.reported(step, outcome)
        self._counters.add("failed_loads", len({failed.request for failed in outcome.failed}))
        # Other requests of the step may share these blocks, so nothing of the step is published.
        for mine in (self._step, self._tails, self._drafts):
            if isinstance(mine, Step):
                mine.cancel_saves("a load of the step has failed")

    def _take_landed(self) -> None:
        """Loads that have failed behind the waits of a step that is over."""
        for step, outcome in self._landing.take() if self._landing else ():
            self._failures.add(step.loads, outcome, background=False)
            self._counters.add("failed_loads", len({failed.request for failed in outcome.failed}))

    def _poll_agent(self) -> None:
        ended = self._agent.poll()
        if ended.failed_saves:
            self._counters.add("shed_saves", len(ended.shed))
            self._counters.add("failed_saves", len(ended.failed_saves) - len(ended.shed))
        while self._measured:
            step, load, save = self._measured.popleft()
            self._counters.moved(load, save)
            for request in self._loads_of.pop(step, ()):
                hidden, whole = self._overlaps.get(request, (0.0, 0.0))
                self._overlaps[request] = (hidden + load.hidden_ms / 1e3, whole + load.transfer_ms / 1e3)


def _loads(step: Step | NoStep | None) -> Sequence[PartDescriptor]:
    return step.loads if isinstance(step, Step) else ()
