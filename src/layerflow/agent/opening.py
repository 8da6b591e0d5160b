"""Opening a step: it gets a number and its deadlines, the lanes' books know it, the server hears of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from layerflow.agent.costs import work_of
from layerflow.agent.descriptors import PartDescriptor, check_blocks, describe_loads, describe_saves, without_tails
from layerflow.agent.dispatcher import Dispatcher
from layerflow.agent.hit_plan import PlansInHand
from layerflow.agent.link import Attachment, Link
from layerflow.agent.open_steps import OpenSteps
from layerflow.agent.step.step import NO_STEP, NoStep, Step
from layerflow.agent.values import StepRequest
from layerflow.device.base import Device, DeviceEvent
from layerflow.errors import ProtocolError, SpecError
from layerflow.keys import Chain
from layerflow.ops.paged import PagedMemory
from layerflow.spec import ModelSpec
from layerflow.system.numbers import ascending
from layerflow.wire.messages import OpenStep

MAX_TIMEOUT_S = 86_400.0


class StepOpener:
    """Called on the engine's thread."""

    def __init__(
        self,
        memory: PagedMemory,
        device: Device,
        dispatcher: Dispatcher,
        open_steps: OpenSteps,
        link: Link,
        plans: PlansInHand,
    ) -> None:
        self._memory = memory
        self._device = device
        self._dispatcher = dispatcher
        self._open_steps = open_steps
        self._link = link
        self._plans = plans
        self._groups = [group for group, _ in memory.spec.layer_places()]
        self._block_bytes = [group.bytes_per_block for group in memory.spec.groups]
        self._numbers = ascending()

    def open_requests(
        self, spec: ModelSpec, requests: Sequence[StepRequest], timeout_s: float | None, after: DeviceEvent | None
    ) -> Step | NoStep:
        """See :meth:`layerflow.agent.Agent.open_step`.

        :param spec: as it is now: a chain of other weights loads and saves nothing.
        """
        dispatcher = self._dispatcher
        terms = dispatcher.attachment.terms if dispatcher.attachment is not None else None
        for request in requests:
            if request.load[0] < request.load[1] and outdated(request.chain, spec):
                raise SpecError(
                    f"request {request.request!r} loads tokens {request.load} with a chain of the weights before the "
                    "last reset; make a new chain, look it up, and compute what that does not hit"
                )
        requests = [self._with_plan(request) for request in requests if not outdated(request.chain, spec)]
        loads = describe_loads(spec, requests)
        if timeout_s is None:
            timeout_s = _patience(requests)
        saving = terms is not None and not dispatcher.silent
        saves = describe_saves(spec, requests, terms.save_partial) if saving and terms is not None else []
        return self.open(loads, saves, work_of(requests), timeout_s, after)

    def _with_plan(self, request: StepRequest) -> StepRequest:
        """The request; without its hit's plan where that was given up, or used here before."""
        plan = request.hit.plan
        if plan is None or request.load[0] >= request.load[1]:
            return request
        if self._plans.use(plan, request.request, id(self)):
            return request
        return replace(request, hit=replace(request.hit, plan=None))

    def open(
        self,
        loads: Sequence[PartDescriptor],
        saves: Sequence[PartDescriptor],
        work: tuple[int, int] | None,
        timeout_s: float | None,
        after: DeviceEvent | None = None,
    ) -> Step | NoStep:
        """See :meth:`layerflow.agent.Agent.open_descriptors`."""
        check_timeout(timeout_s)
        dispatcher = self._dispatcher
        terms = dispatcher.attachment.terms if dispatcher.attachment is not None else None
        if terms is None or dispatcher.silent:
            saves = []
        elif not terms.save_partial:
            saves = without_tails(saves)
        if not loads and not saves:
            return NO_STEP
        check_blocks([*loads, *saves], self._memory.num_blocks)
        # Right before the first byte: what has moved since is loaded as the server plans it.
        placed = dispatcher.planned.place(loads)
        if placed is not None:
            current = dispatcher.attachment
            terms = dispatcher.terms
            if current is None or current.incarnation != placed.arena.incarnation:
                saves = []
        now = time.monotonic()
        loading_s = timeout_s if timeout_s is not None else terms.step_timeout_ms / 1e3 if terms is not None else 0.0
        saving_s = terms.save_timeout_ms / 1e3 if terms is not None else 0.0
        step = Step(
            next(self._numbers),
            groups=self._groups,
            block_bytes=self._block_bytes,
            loads=list(loads),
            saves=list(saves),
            deadline=now + loading_s,
            save_deadline=now + max(loading_s, saving_s),
            device=self._device,
            after=after,
            attend=dispatcher.ends.attend,
            on_fenced=dispatcher.ends.fenced,
            on_closed=dispatcher.ends.closed,
        )
        step.work = work
        step.on_wait = dispatcher.ends.wake_loads
        planned = dispatcher.planned.bind(step, placed) if placed is not None else None
        unsayable = ""
        with self._open_steps.lock:
            # Under the lock that losing the server takes: the step is told of that one way or the other, and the
            # message goes to the server that the step was opened with.
            attachment = dispatcher.attachment
            if attachment is not None and attachment.direct:
                step.bypass()
            self._open_steps.add(step)
            begun = planned is not None and placed is not None and dispatcher.planned.begin(planned, placed)
            known = attachment is not None and (placed is None or attachment.incarnation == placed.arena.incarnation)
            if attachment is not None and known and not attachment.direct:
                messages = ([part.load_message() for part in loads], [part.save_message() for part in saves])
                try:
                    self._link.send(OpenStep(step.number, step.deadline, step.save_deadline, *messages, begun))
                except ProtocolError as error:
                    unsayable = str(error)
        if unsayable:
            dispatcher.ends.cut(step, unsayable)
        if planned is not None and not begun:
            dispatcher.ends.cut(step, "the arena of its plan was let go")
        elif begun and not known:
            dispatcher.planned.orphan(step, "its server is gone")
        elif attachment is None:
            dispatcher.ends.cut(step, "no server is attached")
        elif attachment.direct:
            self._open_direct(step, attachment)
        return step

    def _open_direct(self, step: Step, attachment: Attachment) -> None:
        """Past the arena the server hears of a step once it is known what of its objects the pool has."""
        bypass = self._dispatcher.bypass
        if bypass.stuck:
            self._dispatcher.ends.cut(step, "the pool does not answer")
        else:
            bypass.open(step, lambda step, message: self._announce(step, message, attachment))

    def _announce(self, step: Step, message: OpenStep, attachment: Attachment) -> bool:
        """Tell the server of a step, unless the step is over or that server gone."""
        with self._open_steps.lock:  # as in `open`
            if self._open_steps.get(step.number) is not step or self._dispatcher.attachment is not attachment:
                return False
            self._link.send(message)
            step.announced = True
            return True


def check_timeout(timeout_s: float | None) -> None:
    """:raises SpecError: negative, or more than a day."""
    if timeout_s is not None and not 0 <= timeout_s <= MAX_TIMEOUT_S:
        raise SpecError(f"timeout_s {timeout_s}: must be 0 to {MAX_TIMEOUT_S:.0f} seconds")


def outdated(chain: Chain, spec: ModelSpec) -> bool:
    """Was it made by this engine, before the weights were replaced?"""
    return bool(chain.model) and chain.model != spec.fingerprint


def _patience(requests: Sequence[StepRequest]) -> float | None:
    """How long a step may wait for what others are still storing; None = it loads nothing such."""
    until = [request.hit.until for request in requests if request.load[0] < request.load[1] and request.hit.following]
    return max(0.0, min(until) - time.monotonic()) if until else None
