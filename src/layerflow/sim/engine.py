"""A model of a serving engine: continuous batching with chunked prefill, over a KV cache of its own.

A step takes one token of each request that decodes, then as many of prompts as its budget allows, the oldest first. A
request is looked up when it is its turn. What it hits is loaded in its first step, layer by layer, or in bulk before.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layerflow.config.settings import TransferSettings
from layerflow.flow.cost import Mode, ModeInputs, attention_pairs, choose
from layerflow.keys import object_keys
from layerflow.objects import object_bytes
from layerflow.pool.base import NewObject
from layerflow.sim.clock import VirtualClock
from layerflow.sim.forward import ForwardPass
from layerflow.sim.machine import Machine
from layerflow.sim.server import ROOT, Failed, SimulatedServer, WantedLoad, blocks_of
from layerflow.sim.trace import TracedRequest
from layerflow.sim.worker import SimulatedLoads, SimulatedWorker


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request, and what became of it.

    :ivar computed: tokens of which the engine has the KV.
    :ivar local: tokens that its own cache had. :ivar hit: tokens that it loads from the pool, those before included.
    :ivar hit_at_all: tokens that the pool had, loaded or not.
    :ivar saved: full chunks that need not be stored any more.
    :ivar exposed_s: how long its steps waited for loads.
    :ivar first_token_at: seconds, as :attr:`ended_at`; negative = not yet.
    """

    request: TracedRequest
    computed: int = 0
    local: int = 0
    hit: int = 0
    hit_at_all: int = 0
    saved: int = 0
    generated: int = 0
    exposed_s: float = 0.0
    first_token_at: float = -1.0
    ended_at: float = -1.0
    recomputes: bool = False
    load_failed: bool = False

    @property
    def prefills(self) -> bool:
        """Is some of its prompt left to compute?"""
        return self.computed < self.request.tokens

    @property
    def name(self) -> str:
        """The request's, in steps."""
        return str(self.request.number)


class OwnCache:
    """The engine's own KV cache: chunks of running requests, and those of ended ones until their room is needed.

    :param tokens: that it holds; 0 = it is never full, and keeps nothing.
    """

    def __init__(self, tokens: int, chunk_tokens: int) -> None:
        self._tokens, self._chunk = tokens, chunk_tokens
        self._held: Counter[bytes] = Counter()
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._computed: set[bytes] = set()
        self._private = 0

    def hold(self, request: TracedRequest) -> int | None:
        """Take room for a request, until it ends; None: there is none now.

        :returns: how many of its leading tokens are here, one left to compute.
        """
        if not self._tokens:
            return 0
        private = self._own_tokens(request)
        fresh = sum(chunk not in self._held for chunk in request.chunks)
        held = len(self._held) * self._chunk + self._private
        if held + fresh * self._chunk + private > self._tokens and self._held:
            return None
        found = next(
            (at for at, chunk in enumerate(request.chunks) if chunk not in self._computed), len(request.chunks)
        )
        for chunk in request.chunks:
            self._idle.pop(chunk, None)
        self._held.update(request.chunks)
        self._private += private
        while self._idle and (len(self._held) + len(self._idle)) * self._chunk + self._private > self._tokens:
            self._computed.discard(self._idle.popitem(last=False)[0])
        return min(found * self._chunk, (request.tokens - 1) // self._chunk * self._chunk)

    def computed(self, request: TracedRequest, tokens: int) -> None:
        """So many leading tokens of a running request are here now."""
        if self._tokens:
            self._computed.update(request.chunks[: tokens // self._chunk])

    def end(self, request: TracedRequest) -> None:
        """A request has ended: its prompt's chunks stay while there is room."""
        if not self._tokens:
            return
        self._private -= self._own_tokens(request)
        for chunk in reversed(request.chunks):  # the last ones go first
            self._held[chunk] -= 1
            if not self._held[chunk]:
                del self._held[chunk]
                self._idle[chunk] = None

    def _own_tokens(self, request: TracedRequest) -> int:
        return request.tokens - len(request.chunks) * self._chunk + request.output


@dataclass(slots=True, eq=False)
class EngineStep:
    """One step: requests, and how many tokens of each are computed.

    :param forward: its way through the layers.
    """

    work: list[tuple[RunningRequest, int]]
    loading: list[RunningRequest]
    forward: ForwardPass


@dataclass(slots=True, eq=False)
class Decodes:
    """Steps one behind the other in which every request decodes, as long as none ends and none comes.

    :param first_s: how long the first one takes. :param more_s: how much longer each takes than the one before.
    """

    began: float
    first_s: float
    more_s: float
    steps: int

    def end(self, steps: int) -> float:
        """When so many have ended."""
        return self.began + steps * self.first_s + steps * (steps - 1) / 2 * self.more_s

    def under_way(self, now: float) -> int:
        """How many have begun; the last one may have ended just now."""
        steps = max(1, min(self.steps, math.ceil((now - self.began) / self.first_s)))
        while steps > 1 and self.end(steps - 1) >= now:
            steps -= 1
        return steps


class SimulatedEngine:
    """One engine: its queue, its steps, and a worker for each tensor-parallel rank.

    :param machine: whose engine it is. :param transfer: the settings that workers keep to.
    :param workers: of its ranks, in their order.
    :param ended: told of each request that has ended.

    :ivar exposed_s: how long its steps waited for loads, all together.
    """

    def __init__(
        self,
        clock: VirtualClock,
        server: SimulatedServer,
        machine: Machine,
        transfer: TransferSettings,
        *,
        workers: Sequence[SimulatedWorker],
        ended: Callable[[RunningRequest], None],
    ) -> None:
        self.exposed_s = 0.0
        self._clock, self._server, self._machine, self._transfer = clock, server, machine, transfer
        self._spec = spec = workers[0].spec
        self.workers = workers
        self._ended = ended
        self._cache = OwnCache(machine.cache_tokens, spec.chunk_tokens)
        self._waiting: deque[RunningRequest] = deque()
        self._running: list[RunningRequest] = []
        self._in_bulk = 0
        self._pass: EngineStep | None = None
        self._decodes: Decodes | None = None
        self._numbers = 0
        self._chunk = spec.chunk_tokens
        self._bytes_per_token = (
            sum(len(group.layers) * group.bytes_per_block / group.block_size for group in spec.groups) / spec.num_layers
        )

    def submit(self, request: TracedRequest) -> None:
        """A request has come."""
        self._waiting.append(RunningRequest(request))
        self._look_again()

    # Scheduling ----------------------------------------------------------------------------------

    def _look_again(self) -> None:
        """Somebody waits: schedule once the step under way has ended."""
        decodes = self._decodes
        if decodes is None:
            self._step()
        elif (steps := decodes.under_way(self._clock.now)) < decodes.steps:
            decodes.steps = steps
            self._clock.at(decodes.end(steps), lambda: self._decoded(decodes, steps))

    def _step(self) -> None:
        if self._pass is not None or self._decodes is not None:
            return
        if not self._waiting and self._running and not any([each.prefills for each in self._running]):
            self._decode()
            return
        work, loading = self._schedule()
        if not work:
            return
        tokens = sum([n for _, n in work])
        pairs = sum([attention_pairs(n, running.computed) for running, n in work])
        cost = self._machine.compute
        self._numbers += 1
        layers = self._spec.num_layers
        layer_s = cost.fixed + tokens * cost.token + pairs * cost.pair

        def exposed(waited: float) -> None:
            self.exposed_s += waited
            for running in loading:
                running.exposed_s += waited

        def computed() -> None:
            self._clock.at(self._clock.now + self._machine.step_seconds, lambda: self._end(step))

        forward = ForwardPass(self._clock, self._numbers, [layer_s] * layers, exposed=exposed, computed=computed)
        step = self._pass = EngineStep(work, loading, forward)
        self._open(step)
        begin = self._clock.now + (self._machine.loading_seconds if forward.loads else 0.0)
        if forward.opened:
            self._clock.at(begin, forward.begin)
        else:
            self._clock.at(begin + layers * layer_s + self._machine.step_seconds, lambda: self._end(step))

    def _decode(self) -> None:
        """Every request takes a token a step, until the first has all of its tokens."""
        running, machine, cost = self._running, self._machine, self._machine.compute
        count, layers = len(running), self._spec.num_layers
        pairs = sum([attention_pairs(1, each.computed) for each in running])
        first_s = layers * (cost.fixed + count * cost.token + pairs * cost.pair) + machine.step_seconds
        steps = min([each.request.output - each.generated for each in running])
        decodes = self._decodes = Decodes(self._clock.now, first_s, layers * count * cost.pair, steps)
        self._clock.at(decodes.end(steps), lambda: self._decoded(decodes, steps))

    def _decoded(self, decodes: Decodes, steps: int) -> None:
        if self._decodes is not decodes or decodes.steps != steps:
            return  # fewer were made since
        self._decodes = None
        for running in self._running:
            running.computed += steps
            running.generated += steps
        self._end_requests()
        self._step()

    def _schedule(self) -> tuple[list[tuple[RunningRequest, int]], list[RunningRequest]]:
        """What the next step computes, and the requests whose hits it loads."""
        budget = self._machine.max_batched_tokens
        work: list[tuple[RunningRequest, int]] = []
        for running in self._running:
            tokens = min(budget, running.request.tokens - running.computed if running.prefills else 1)
            if tokens:
                work.append((running, tokens))
                budget -= tokens
        loading: list[RunningRequest] = []
        while self._waiting and budget > 0 and len(self._running) + self._in_bulk < self._machine.max_running:
            first = self._waiting[0]
            if not first.recomputes:
                local = self._cache.hold(first.request)
                if local is None:
                    break
                first.local = local
                mode = self._look_up(first)
                if mode is Mode.BULK:
                    self._waiting.popleft()
                    self._load_in_bulk(first)
                    continue
                if mode is Mode.LAYERWISE:
                    loading.append(first)
            self._waiting.popleft()
            self._running.append(first)
            first.computed = max(first.local, first.hit)
            tokens = min(budget, first.request.tokens - first.computed)
            work.append((first, tokens))
            budget -= tokens
        return work, loading

    def _look_up(self, running: RunningRequest) -> Mode:
        """How a request's hit is used; RECOMPUTE where there is none."""
        request, server, spec = running.request, self._server, self._spec
        tokens = server.longest_hit(spec, request.chunks, request.tokens, request.tail)
        running.hit_at_all = tokens
        running.saved = tokens // self._chunk  # what only this engine has is stored
        server.lease(self._lease(running), self._keys(running, 0, tokens))
        mode = self._choose(tokens, request.tokens) if tokens > running.local else Mode.RECOMPUTE
        if mode is Mode.RECOMPUTE:
            server.release(self._lease(running))
        else:
            running.hit = tokens
        return mode

    def _choose(self, hit: int, prompt: int) -> Mode:
        machine, transfer = self._machine, self._transfer
        if transfer.mode != "auto":
            return Mode(transfer.mode)
        return choose(
            ModeInputs(
                hit_tokens=hit,
                new_tokens=prompt - hit,
                layers=self._spec.num_layers,
                bytes_per_token=self._bytes_per_token,
                link=machine.load,
                compute=machine.compute,
                step_seconds=machine.loading_seconds,
                max_transfer_bytes=transfer.byte_cap,
            )
        )

    # Steps ---------------------------------------------------------------------------------------

    def _lease(self, running: RunningRequest) -> tuple[str, int, int]:
        return ("hit", id(self), running.request.number)

    def _digests(self, running: RunningRequest, first: int, hit: int) -> list[bytes]:
        """The chunks of a hit from number `first` on, its tail among them."""
        request, last = running.request, -(-hit // self._chunk)
        return [*request.chunks[first:last], *([request.tail] if last > len(request.chunks) else [])]

    def _keys(self, running: RunningRequest, first: int, hit: int) -> list[bytes]:
        """The objects of a hit, of all groups and workers."""
        shards = [worker.spec.shard for worker in self.workers]
        return object_keys(self._digests(running, first, hit), range(len(self._spec.groups)), shards)

    def _wanted(self, running: RunningRequest, worker: SimulatedWorker) -> list[WantedLoad]:
        """What one worker loads of a request's hit."""
        chunk = self._chunk
        first = running.local // chunk
        digests = self._digests(running, first, running.hit)
        wanted = []
        for group, spec in enumerate(self._spec.groups):
            size = spec.block_size
            keys = object_keys(digests, (group,), (worker.spec.shard,))
            counts = [-(-min(chunk, running.hit - at * chunk) // size) for at in range(first, first + len(digests))]
            wanted.append(WantedLoad(running.name, self._lease(running), group, tuple(keys), sum(counts)))
        return wanted

    def _new_objects(self, running: RunningRequest, tokens: int, worker: SimulatedWorker) -> list[list[NewObject]]:
        """By group, the objects of a request that a step completes which computes so many of its tokens."""
        request, chunk = running.request, self._chunk
        upto = min((running.computed + tokens) // chunk, len(request.chunks))
        chunks = request.chunks[running.saved : upto]
        ends = running.computed + tokens == request.tokens
        tail = request.tail if ends and not self._transfer.discard_partial_chunks else b""
        by_group: list[list[NewObject]] = []
        for group, spec in enumerate(self._spec.groups):
            blocks = len(spec.rules.keep(chunk))
            shard = (worker.spec.shard,)
            objects = [
                NewObject(key, object_bytes(spec, blocks), blocks, chunk)
                for key in object_keys(chunks, (group,), shard)
            ]
            if tail:
                left = request.tokens - len(request.chunks) * chunk
                key, above = object_keys((tail, request.chunks[-1] if request.chunks else ROOT), (group,), shard)
                held = len(spec.rules.keep(left))
                objects.append(NewObject(key, object_bytes(spec, held), held, left, above))
            by_group.append(objects)
        return by_group

    def _open(self, step: EngineStep) -> None:
        """Tell the server of what the step loads and saves, if anything."""
        forward = step.forward
        saving = [(running, tokens) for running, tokens in step.work if running.prefills]
        failed = _marking(step.loading)
        for worker in self.workers:
            saves = [
                (running.name, group, objects)
                for running, tokens in saving
                for group, objects in enumerate(self._new_objects(running, tokens, worker))
                if objects
            ]
            loads = [load for running in step.loading for load in self._wanted(running, worker)]
            there = self._server.open_step(worker, forward.number, loads=loads, saves=saves, failed=failed)
            if there is not None:
                forward.opened.append(worker)
            if there:
                moving = self._load(worker, forward.number, there, self._server.loads_over, forward.look)
                forward.loads.append((worker, moving))
        for running, tokens in saving:
            done = min((running.computed + tokens) // self._chunk, len(running.request.chunks))
            running.saved = max(running.saved, done)
        for running in step.loading:
            self._server.release(self._lease(running))

    def _load(
        self,
        worker: SimulatedWorker,
        step: int,
        loads: Sequence[WantedLoad],
        over: Callable[[SimulatedWorker, SimulatedLoads], None],
        layer_ready: Callable[[], None],
    ) -> SimulatedLoads:
        """Let a worker begin to move what a step loads."""
        deadline = self._server.load_deadline
        return worker.load(
            step, blocks_of(loads), deadline, over=lambda moved: over(worker, moved), layer_ready=layer_ready
        )

    def _end(self, step: EngineStep) -> None:
        now = self._clock.now
        for worker in step.forward.opened:
            self._server.close_step(worker, step.forward.number)
        self._pass = None
        for running, tokens in step.work:
            if running.load_failed:
                running.load_failed, running.recomputes = False, True
                running.hit, running.computed = 0, running.local
                running.saved = 0
                continue
            prefilled = running.prefills
            running.computed += tokens
            if prefilled:
                self._cache.computed(running.request, running.computed)
            if running.prefills:
                continue
            if running.first_token_at < 0:
                running.first_token_at = now
            running.generated += 1
        self._end_requests()
        self._step()

    def _end_requests(self) -> None:
        ended = [running for running in self._running if running.generated >= running.request.output]
        if ended:
            self._running = [running for running in self._running if running.generated < running.request.output]
            for running in ended:
                self._cache.end(running.request)
                running.ended_at = self._clock.now
                self._ended(running)

    # Loads before a request's first step ---------------------------------------------------------

    def _load_in_bulk(self, running: RunningRequest) -> None:
        self._numbers += 1
        self._in_bulk += 1
        number, pending = self._numbers, 1

        def over(worker: SimulatedWorker, loads: SimulatedLoads) -> None:
            self._server.loads_over(worker, loads)
            one_less()

        def one_less() -> None:
            nonlocal pending
            pending -= 1
            if not pending:
                self._loaded(running)

        for worker in self.workers:
            loads, failed = self._wanted(running, worker), _marking([running])
            there = self._server.open_step(worker, number, loads=loads, saves=(), failed=failed)
            if there:
                pending += 1
                self._load(worker, number, there, over, _nothing)
                self._server.close_step(worker, number)
        self._server.release(self._lease(running))
        self._clock.at(self._clock.now, one_less)

    def _loaded(self, running: RunningRequest) -> None:
        self._in_bulk -= 1
        running.recomputes = True  # it is not looked up again
        if running.load_failed:
            running.load_failed, running.hit = False, 0
            running.saved = 0
        self._waiting.appendleft(running)
        self._look_again()


def _nothing() -> None:
    """Nobody waits for a layer of a load before its step."""


def _marking(loading: Sequence[RunningRequest]) -> Failed:
    """Note on each of these requests whose load has failed that it has."""
    names = {running.name: running for running in loading}

    def failed(request: str) -> None:
        names[request].load_failed = True

    return failed
