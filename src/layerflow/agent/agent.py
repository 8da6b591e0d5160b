"""The agent: a library inside the engine's process, and the only writer of engine memory."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import msgspec
import numpy as np
import structlog
import torch
import zmq

from layerflow.agent.control import DEFAULT_LOOKUP_TIMEOUT_S, Control
from layerflow.agent.costs import LoadPolicy
from layerflow.agent.descriptors import PartDescriptor
from layerflow.agent.dispatcher import Dispatcher
from layerflow.agent.link import Link
from layerflow.agent.step.step import NoStep, Step
from layerflow.agent.steps import Steps, check_timeout, outdated
from layerflow.agent.values import MISS, AgentCounters, AgentStatistics, Ended, Follow, Hit, Measured, StepRequest
from layerflow.content import renewed_content
from layerflow.device import device_for
from layerflow.device.base import DeviceEvent
from layerflow.device.captures import CaptureGate
from layerflow.errors import ConfigError, LayerflowError, SessionError, SpecError
from layerflow.flow.cost import ComputeCost, LinkCost, Mode
from layerflow.keys import Chain, HashedChain, Media, root_digest
from layerflow.observe.trace import StepTrace
from layerflow.ops.paged import PagedMemory
from layerflow.spec import ModelSpec
from layerflow.wire.messages import Terms

DEFAULT_ATTACH_TIMEOUT_S = 5.0
MOST_UNASKED_S = 600.0
"""Upper bound, in seconds, for waiting on another engine's saves when the caller passed no `Follow`."""
REPLACED = "the engine's weights were replaced"

log = structlog.get_logger("layerflow.agent")


class Agent:
    """Attaches one engine worker to a layerflow server, and attaches again whenever the server was away.

    :param endpoint: ``ipc://`` of a server on this machine, or an :class:`~layerflow.server.EmbeddedServer`'s
        ``inproc://`` with its `context`.
    :param spec: what this worker caches.
    :param tensors: per layer and plane: the paged tensor, shape ``(num_blocks, block_size, *plane.shape)``
        (recurrent state: ``(num_blocks, 1, *plane.shape)``), any strides, all on one device.
    :param engine_id: shared by all ranks and the scheduler of one serving engine, and by no other engine.
    :param name: what the engine is called in status, logs and metrics, best the same after a restart; "" = `engine_id`.
    :param wait_s: how long to wait for the first attachment; without one the agent still works, every
        lookup misses until a server appears.
    :raises SpecError: the tensors do not fit the spec.
    :raises ConfigError: the endpoint is on another machine.
    """

    def __init__(
        self,
        endpoint: str,
        spec: ModelSpec,
        tensors: Mapping[int, Mapping[str, torch.Tensor]],
        engine_id: str = "engine",
        *,
        name: str = "",
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        wait_s: float = DEFAULT_ATTACH_TIMEOUT_S,
        lookup_timeout_s: float = DEFAULT_LOOKUP_TIMEOUT_S,
    ) -> None:
        if endpoint.startswith("tcp://"):
            raise ConfigError(f"{endpoint}: an engine worker must run on the server's machine; use its ipc:// endpoint")
        self.spec = spec
        self.memory = PagedMemory(spec, tensors)
        self.device = device_for(self.memory.device)
        self._gate = CaptureGate(self.device.capturing)
        self._pid = os.getpid()
        self._counters = AgentCounters()
        context = context or zmq.Context.instance()
        self._control = Control(
            endpoint, engine_id, spec, name=name, context=context, lookup_timeout_s=lookup_timeout_s
        )
        self._link = Link(context, endpoint, engine_id, spec, name)
        self._policy = LoadPolicy(spec)
        self._steps = Steps(
            self.memory,
            self.device,
            link=self._link,
            plans=self._control.plans,
            policy=self._policy,
            counters=self._counters,
        )
        self._dispatcher = Dispatcher(
            self._steps,
            memory=self.memory,
            device=self.device,
            control=self._control,
            link=self._link,
            counters=self._counters,
            gate=self._gate,
        )
        try:
            self._link.start(self._dispatcher)
            if wait_s > 0 and not self._link.ready.wait(wait_s):
                log.warning("agent_not_attached", endpoint=endpoint, waited_s=wait_s)
        except BaseException:  # nobody has the agent, whose threads and mappings end with close() only
            self.close()
            raise

    # -- the engine -------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Is there a server now?"""
        return self._steps.attachment is not None

    @property
    def direct(self) -> bool:
        """Do bytes move straight between device memory and the pool behind the server's arena now?"""
        attachment = self._steps.attachment
        return attachment is not None and attachment.direct

    @property
    def terms(self) -> Terms | None:
        """The server's current terms; None while it is away."""
        attachment = self._steps.attachment
        return attachment.terms if attachment is not None else None

    @property
    def traces(self) -> deque[StepTrace]:
        """The last finished steps, oldest first."""
        self._steps.measure()
        return self._steps.measures.traces

    @property
    def measured(self) -> deque[Measured]:
        """The figures of the last finished steps, oldest first, a moment after their end; take them from the left."""
        return self._steps.measures.measured

    def wait_attached(self, timeout_s: float) -> bool:
        """Wait for a server; False after `timeout_s`."""
        return self._link.ready.wait(timeout_s)

    def wait_warm(self, timeout_s: float) -> bool:
        """Wait until the arena is pinned for the device, or its pages are mapped; False after `timeout_s`.

        Nothing need wait for it: before, copies are slower.
        """
        if self.direct:
            return True
        access = self._dispatcher.access
        return access is not None and access.wait(timeout_s)

    def chain(
        self, tokens: Sequence[int] | np.ndarray, *, adapter: str = "", salt: str = "", media: Sequence[Media] = ()
    ) -> Chain:
        """A prompt's digests; compute once per request."""
        model = self.spec.fingerprint
        return Chain(root_digest(model, adapter=adapter, salt=salt), tokens, self.spec.chunk_tokens, media, model=model)

    def hashed_chain(self, hashes: Sequence[bytes], *, adapter: str = "", salt: str = "") -> HashedChain:
        """The same from an engine's own page hashes, for engines that hand over no tokens.

        :param hashes: one per leading page of ``spec.chunk_tokens`` tokens; each stands for all tokens before its
            page's end. What is in them need not be said again as `adapter` or `salt`.
        """
        model = self.spec.fingerprint
        return HashedChain(root_digest(model, adapter=adapter, salt=salt), hashes, self.spec.chunk_tokens, model=model)

    def lookup(self, request: str, chain: Chain, follow: Follow | None = None) -> Hit:
        """How much of the prompt can be loaded; leased until loaded or expired.

        A server that is away, silent or slow is a miss.

        :param follow: what is still to be stored may be hit too; see :meth:`layerflow.agent.Control.lookup`.
        """
        self._same_process()
        self._counters.lookups += 1
        if not self.attached or self._steps.silent or outdated(chain, self.spec):
            return MISS
        hit = self._control.lookup(request, chain, follow or self._unasked(chain))
        self._counters.hit_tokens += hit.tokens
        return hit

    @property
    def control(self) -> Control:
        """For hand-offs: a client of the same server, which any thread may use."""
        return self._control

    def advise(self, hit: Hit, prompt_tokens: int) -> Mode:
        """Layer by layer, in bulk, or not at all: how to use a hit under ``transfer.mode``.

        :param prompt_tokens: of the whole prompt.
        """
        terms = self.terms
        self._steps.measure()
        return self._policy.advise(terms.mode if terms is not None else "auto", hit, prompt_tokens)

    @property
    def costs(self) -> tuple[LinkCost | None, ComputeCost | None]:
        """What finished steps have shown of this worker's link and compute."""
        return self._policy.costs

    def open_step(
        self, requests: Sequence[StepRequest], timeout_s: float | None = None, *, after: DeviceEvent | None = None
    ) -> Step | NoStep:
        """A forward pass begins, or is about to: loads start now, saves get their places.

        Returns at once. While the server is away, loads have failed and nothing is saved; nothing is saved
        either while it is silent (stopped, or its machine is).

        :param timeout_s: the step's loads must be in place so soon; None = the server's ``step_timeout_ms``, and with
            hits that follow the earliest of their ``until``.
        :param after: on cuda and npu: an event of :meth:`record` behind the last work that may touch the blocks which
            are loaded: the pass that used them before, their zeroing, copies into them. An engine that enqueues ahead
            of its device tells it, so that loads move beside the pass that is under way; None = loads wait for all that
            the caller's current stream has been given.
        :raises SpecError: a request's load or block table does not fit the spec, or the timeout is none.
        """
        self._same_process()
        return self._steps.open_requests(self.spec, requests, timeout_s, after)

    def open_descriptors(
        self,
        loads: Sequence[PartDescriptor],
        saves: Sequence[PartDescriptor],
        *,
        work: tuple[int, int] | None = None,
        timeout_s: float | None = None,
        after: DeviceEvent | None = None,
    ) -> Step | NoStep:
        """As :meth:`open_step`, for an engine whose scheduler has made the outlines, in whatever process.

        What is not to be saved now is left out: everything while the server is away or silent, partial tails where it
        keeps none.

        :param loads: from :func:`~layerflow.agent.descriptors.describe_loads`.
        :param saves: from :func:`~layerflow.agent.descriptors.describe_saves`.
        :param work: new tokens and their context, see :func:`~layerflow.agent.costs.work_of`; None = not known.
        :raises SpecError: a block that registered memory does not have, or the timeout is none.
        """
        self._same_process()
        return self._steps.open(loads, saves, work, timeout_s, after)

    def record(self) -> DeviceEvent | None:
        """An event behind all that the calling thread has enqueued, for :meth:`open_step` and :meth:`Step.layer_done`.

        None on the cpu.
        """
        return self.device.record() if self.device.kind != "cpu" else None

    def capture(self) -> AbstractContextManager[None]:
        """The engine captures a graph in this context: no server is attached to and no memory pinned meanwhile.

        Entered once none of that is under way. Captures of torch's, be they vLLM's, are seen without it, a moment late.
        """
        return self._gate.capture()

    def abort(self, request: str) -> None:
        """The request is over. :meth:`poll` reports it released once no transfer touches its blocks."""
        self._same_process()
        self._steps.abort(request)

    def release_saves(self, step: Step, *, sound: bool) -> None:
        """Publish the saves that :meth:`Step.hold_saves` holds back, or give them up.

        :param sound: everything that the step's forward pass has read was valid.
        """
        self._steps.release_saves(step, sound=sound)

    def drop_lease(self, request: str) -> None:
        """The request's hit will not be loaded."""
        self._control.drop_lease(request)

    def busy(self, request: str) -> bool:
        """May a transfer still touch this request's blocks?"""
        return self._steps.busy(request)

    def saving(self, request: str) -> bool:
        """May a save still read this request's blocks? Loads do not count."""
        return self._steps.saving(request)

    def reclaim(self, group_blocks: Sequence[Sequence[int] | np.ndarray], timeout_s: float) -> int:
        """Wait until nothing reads or writes these engine blocks, which are about to be overwritten.

        Saves that still read one of them are waited for; those of steps whose forward pass has not ended, or that have
        not ended after `timeout_s`, are cut off: what they had not stored yet is not stored. Call it before the step
        that overwrites is opened. Costs microseconds while nothing is being saved.

        :param group_blocks: per group: engine block ids.
        :param timeout_s: for all of them together.
        :returns: of how many steps the saves were cut off.
        :raises SpecError: not one list per group, or the timeout is none.
        """
        self._same_process()
        check_timeout(timeout_s)
        blocks = self._per_group(group_blocks)
        if not len(self._steps):
            return 0
        return self._steps.reclaim(blocks, timeout_s)

    def doubt_reads(self) -> None:
        """The engine may overwrite blocks from now on, and says which by :meth:`overwritten` afterwards.

        For engines that prepare a step before they tell of it. What saves read until then is stored once that is told.
        """
        self._steps.doubt_reads()

    def overwritten(self, group_blocks: Sequence[Sequence[int] | np.ndarray]) -> int:
        """The engine has overwritten these blocks since :meth:`doubt_reads`: saves that may have read one are given up.

        All else that was read is stored. :meth:`reclaim` is for blocks that are still to be overwritten.

        :param group_blocks: per group: engine block ids.
        :returns: of how many steps the saves were given up.
        :raises SpecError: not one list per group.
        """
        self._same_process()
        return self._steps.overwritten(self._per_group(group_blocks))

    def revoke(self, reason: str) -> int:
        """Cut all open steps off: what they load has failed, what they have not stored is never published.

        When this returns, none of them touches engine memory any more. How many there were.
        """
        self._same_process()
        return self._steps.revoke(reason)

    def reset(self, model_content: str = "") -> ModelSpec:
        """The weights are being replaced: nothing computed with the old ones is ever loaded again by this engine.

        Open steps are revoked, and :attr:`spec` has another content from now on, so that :meth:`chain` makes other
        keys. Chains of before load and save nothing any more. Safe without a server; one that is there is told, so
        that it gives leases back. An engine of several processes calls this in the one that makes the chains and
        :meth:`revoke` in the others.

        :param model_content: the new weights' name, which no others ever have; engines that give the same one share.
            "" = this engine starts anew on its own.
        :returns: :attr:`spec`.
        """
        # First: a step that another thread opens meanwhile has a chain of before, and moves nothing.
        self.spec = msgspec.structs.replace(self.spec, content=renewed_content(self.spec.content, model_content))
        self.revoke(REPLACED)
        try:
            self._control.reset()
        except LayerflowError as error:
            log.info("reset_not_told", error=str(error))
        return self.spec

    def wait_idle(self, request: str, timeout_s: float) -> bool:
        """Wait until no transfer touches this request's blocks; False after `timeout_s`. Its saves leave at once."""
        return self._steps.wait_idle(request, timeout_s)

    def poll(self) -> Ended:
        """What ended since the last call. Never blocks."""
        return self._steps.poll()

    def statistics(self) -> AgentStatistics:
        """A snapshot."""
        counters = self._counters
        return AgentStatistics(
            attached=self.attached,
            attachments=counters.attachments,
            open_steps=len(self._steps),
            loaded_bytes=counters.loaded_bytes,
            saved_bytes=counters.saved_bytes,
            failed_batches=counters.failed_batches,
            fenced_steps=counters.fenced_steps,
            lookups=counters.lookups,
            hit_tokens=counters.hit_tokens,
            copies=self.device.copies.counts,
            pinned_bytes=self._dispatcher.pinned_bytes,
            unheard_releases=self._control.unheard_releases,
        )

    def close(self) -> None:
        """Cut off what is open, stop the threads and hang up; in a forked copy nothing."""
        if os.getpid() != self._pid:
            return
        self._steps.measure()
        self._link.close()
        self._steps.close()
        self._link.release()
        self._control.close()

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unasked(self, chain: Chain) -> Follow | None:
        """Under ``pd.follow = "auto"``: what is being stored may be waited for as long as computing it would take."""
        terms = self.terms
        if terms is None or terms.follow != "auto":
            return None
        seconds = self._policy.compute_seconds(len(chain))
        return Follow(time.monotonic() + min(seconds, MOST_UNASKED_S)) if seconds else None

    def _per_group(self, group_blocks: Sequence[Sequence[int] | np.ndarray]) -> list[np.ndarray]:
        if len(group_blocks) != len(self.spec.groups):
            groups = len(self.spec.groups)
            raise SpecError(f"{len(group_blocks)} lists of blocks that are reclaimed or overwritten; groups: {groups}")
        return [np.asarray(ids, dtype=np.int64) for ids in group_blocks]

    def _same_process(self) -> None:
        """:raises SessionError: this is a forked copy: its threads and its server are its parent's."""
        if os.getpid() != self._pid:
            raise SessionError("this agent belongs to the process that forked this one; make one here")
