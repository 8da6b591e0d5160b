"""What the scheduler's side tells every worker about one step, and what the workers tell it back."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from layerflow.agent.descriptors import PartDescriptor
from layerflow.flow.cost import ComputeCost, LinkCost
from layerflow.spec import GroupSpec, ModelSpec

# The saves of one step, as its plan carries them.


Tables = Sequence[Sequence[int]]
"""Block ids of a request, per layerflow group."""


class LazySaves:
    """Outlined when the parts are first asked for: behind a short forward pass, and not while it is scheduled.

    Pickled, they are outlined: a worker in another process gets them as they would be here.

    :param requests: whose saves these are.
    :param tables: their block tables, which nobody changes any more.
    :param outline: makes the parts.
    """

    __slots__ = ("_outline", "_parts", "_tables", "requests")

    def __init__(
        self,
        requests: Sequence[str] = (),
        tables: Sequence[Tables] = (),
        outline: Callable[[], Sequence[PartDescriptor]] = tuple,
    ) -> None:
        self.requests = tuple(requests)
        self._tables = tuple(tables)
        self._outline = outline
        self._parts: Sequence[PartDescriptor] | None = None

    def __bool__(self) -> bool:
        return bool(self.requests)

    def __reduce__(self) -> tuple[Any, ...]:
        return _outlined, (list(self.parts),)

    @property
    def parts(self) -> Sequence[PartDescriptor]:
        """What is saved of each request and group.

        :raises SpecError: see :func:`layerflow.agent.descriptors.describe_saves`.
        """
        if self._parts is None:
            self._parts = self._outline()
        return self._parts

    def read_any(self, blocks: Sequence[Sequence[int]]) -> bool:
        """May one of these blocks, given per group, be read by these saves?"""
        wanted = [set(ids) for ids in blocks]
        return any(
            not ids.isdisjoint(table)
            for tables in self._tables
            for ids, table in zip(wanted, tables, strict=False)  # of the last groups there may be nothing to save
            if ids
        )


NO_SAVES = LazySaves()


def _outlined(parts: Sequence[PartDescriptor]) -> LazySaves:
    tables = [[[]] * part.group + [part.table.tolist()] for part in parts]
    return LazySaves(tuple({part.request: None for part in parts}), tables, lambda: parts)


# Which steps' saves may be published: those whose forward pass surely computed on loaded bytes that had arrived.
#
# A load of the running step can fail after vLLM has scheduled the next step already (asynchronous scheduling), on
# another rank (whose garbage reaches this rank's later layers through tensor parallelism), or in another connector of a
# MultiConnector. In each case this worker computes and saves garbage without knowing. Only the scheduler learns of
# every failure, with the step's output, and takes the computed tokens back before it plans again. So where a plan may
# compute on garbage it is said to depend on a load, and workers hold its saves back until a later plan brings the
# scheduler's verdict.


LOST_AFTER = 64
"""Numbered plans: the output of one whose step ran so many plans before another has not come and never will."""

Verdict = tuple[int, bool]
"""A plan's number, and whether its saves may be published."""


class RanPlans:
    """Which plans that depend on a load every rank has run.

    Ranks tell it in any order, and one that fails in its step never does.
    """

    def __init__(self) -> None:
        self._ranks: Counter[int] = Counter()  #: by plan, while some rank has not told

    def record(self, ran: Mapping[int, int], *, of: int) -> set[int]:
        """Some ranks have run these plans; which of them every rank has.

        :param ran: by plan: how many ranks tell it.
        :param of: all ranks.
        """
        if not ran:  # nearly always
            return set()
        self._ranks.update(ran)
        every = {number for number in ran if self._ranks[number] >= of}
        lost = max(ran) - LOST_AFTER
        for number in [number for number in self._ranks if number in every or number < lost]:
            del self._ranks[number]
        return every


class SaveApprovals:
    """The scheduler's side; plans come in order, and so do the outputs of their steps."""

    def __init__(self) -> None:
        self._running: list[int] = []  #: plans that load in their step and whose output has not come
        self._undecided: list[int] = []  #: plans without a verdict
        self._unsent: list[Verdict] = []

    def concerns(self, *, loads: bool, saves: bool) -> bool:
        """Does a plan depend on a load that may fail?

        :param loads: some connector loads in this plan's own step.
        :param saves: the plan saves something.
        """
        return loads or (saves and bool(self._running))

    def planned(self, number: int, *, loads: bool, saves: bool) -> None:
        """A plan that depends on a load; parameters as of :meth:`concerns`."""
        if loads:
            self._running.append(number)
        if saves:
            self._undecided.append(number)

    def record_output(self, ran: Collection[int], *, failed: bool) -> None:
        """The output of a step has come.

        :param ran: numbers of such plans that every rank has run by now. Far earlier ones that were not have failed.
        :param failed: a load of a running step has failed: everything planned until now may build on it.
        """
        lost = max(ran, default=0) - LOST_AFTER
        failed |= any(number < lost for number in self._running)
        self._running = [number for number in self._running if number not in ran and number >= lost]
        if failed:
            decided = self._undecided
        else:
            decided = [number for number in self._undecided if not self._running or number < self._running[0]]
        self._unsent += [(number, not failed) for number in decided]
        self._undecided = self._undecided[len(decided) :]

    def take(self) -> tuple[Verdict, ...]:
        """Verdicts since the last call, for the next plan."""
        if not self._unsent:  # nearly always
            return ()
        taken, self._unsent = tuple(self._unsent), []
        return taken


class UnkeptLoad(NamedTuple):
    """A load that vLLM was promised, and that could not be planned.

    :param background: its request waits for it.
    :param blocks: ids in vLLM's first cache group that hold nothing of it.
    """

    background: bool
    blocks: tuple[int, ...]


class Promise(NamedTuple):
    """A load that vLLM was promised: `tokens` of a request behind its first `start`, into these block tables."""

    tables: tuple[list[int], ...]
    start: int
    tokens: int
    background: bool

    def unkept(self, block_size: int) -> UnkeptLoad:
        """Return this load as one that is not to be kept.

        :param block_size: tokens, of the first cache group.
        """
        first, last = self.start // block_size, -(-(self.start + self.tokens) // block_size)
        return UnkeptLoad(self.background, tuple(self.tables[0][first:last]))


class Asking(enum.IntEnum):
    """When the layers of a group ask for their loaded blocks, as one worker has seen it.

    :cvar UNSEEN: not known, or some of its layers never do: loaded before the request is scheduled.
    :cvar BEFORE: they never do, but another cache of the same layers of the model does, too late for this one (an
        indexer reads its keys before the attention begins): in place before the forward pass.
    :cvar BY_LAYER: each before its attention.
    """

    UNSEEN = 0
    BEFORE = 1
    BY_LAYER = 2


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]
    """One step's transfers; the same for all ranks: outlines name chunks, not shards.

    :param step: of this plan among those that compute; one that does not has the next one's.
    :param number: of this plan among those that save something or depend on a load; else 0.
    :param loads: hits of requests that run in this step, waited for layer by layer.
    :param tails: blocks of these hits that the step also writes to: vLLM writes a layer's new keys and values
        before it asks for the layer's loaded ones, so these must be there before the forward pass.
    :param background: hits whose requests wait until everything is loaded, by request.
    :param timeouts: how long such a load may take, seconds, where that is not the server's setting.
    :param restarts: a load in the background that fails starts its request over, as with several cache groups.
    :param rewritten: vLLM writes to blocks of these loads while it prepares the step; they come after that.
    :param aborted: finished requests whose load in the background is cut off.
    :param awaited: another engine waits for what this step saves.
    :param saves: what the step computes.
    :param fresh: newly allocated block ids, per layerflow group: about to be overwritten.
    :param prepared: of these, what vLLM overwrites already while it prepares the step: zeroes, copies into, moves
        recurrent state to.
    :param leaving: finished requests whose blocks stay until their saves have ended.
    :param replaced: the weights were replaced since the plan before: what older plans have under way is cut off.
    :param work: new tokens and their context, see :func:`layerflow.agent.costs.work_of`.
    :param depends_on_load: the forward pass may compute on a load that has failed: the saves wait for a verdict.
    :param unkept: loads that vLLM was promised, by request, and that this plan has not: they have failed.
    :param verdicts: on earlier plans that depended on a load; see :class:`SaveApprovals`.
    """

    step: int = 0
    number: int = 0
    loads: list[PartDescriptor] = field(default_factory=list)
    tails: list[PartDescriptor] = field(default_factory=list)
    background: dict[str, list[PartDescriptor]] = field(default_factory=dict)
    timeouts: dict[str, float] = field(default_factory=dict)
    restarts: bool = False
    rewritten: bool = False
    aborted: tuple[str, ...] = ()
    awaited: bool = False
    saves: LazySaves = NO_SAVES
    fresh: tuple[tuple[int, ...], ...] = ()
    prepared: tuple[int, ...] = ()
    leaving: tuple[str, ...] = ()
    replaced: bool = False
    work: tuple[int, int] | None = None
    depends_on_load: bool = False
    verdicts: tuple[Verdict, ...] = ()
    unkept: dict[str, UnkeptLoad] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """The step does not concern the workers at all: most steps that only decode."""
        told = self.depends_on_load or self.verdicts or self.replaced or self.unkept
        return not (self.fresh or self.moves or self.leaving or self.aborted or told)

    @property
    def moves(self) -> bool:
        """Something is loaded or saved, in this step or behind it."""
        return bool(self.saves or self.loads_something)

    @property
    def loads_something(self) -> bool:
        """In this step or behind it."""
        return bool(self.loads or self.tails or self.background)

    @property
    def idle(self) -> bool:
        """Nothing moves in this step; vLLM then skips its per-layer hooks."""
        return not (self.loads or self.tails or self.saves)


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What a worker has learnt since its last step.

    :param overlaps: of requests whose loads have ended: hidden and whole transfer time, seconds.
    :param drained: (request, number of the last plan that saved for it) of saves that have ended, with how many
        ranks say so.
    :param costs: the worker's link and compute, as far as measured.
    :param failed: requests of which a load has failed, with the largest share of their blocks that has, over all ranks.
    :param lost: requests of which a load of the running step has failed; of models with several cache groups.
    :param ran: numbers of the plans that depend on a load and that were run, with how many ranks say so.
    :param layouts: of the workers, by rank, with what they tell first.
    :param asking: by rank, per layerflow group; told when a rank has seen more than before.
    :param changed: steps before which some rank has seen that its weights were replaced without a reset, and how.
    """

    overlaps: dict[str, tuple[float, float]] = field(default_factory=dict)
    drained: dict[tuple[str, int], int] = field(default_factory=dict)
    costs: tuple[LinkCost | None, ComputeCost | None] | None = None
    failed: dict[str, float] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    ran: dict[int, int] = field(default_factory=dict)
    layouts: tuple[WorkerLayout, ...] = ()
    asking: dict[int, tuple[Asking, ...]] = field(default_factory=dict)
    changed: dict[int, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Sum up the figures of all ranks of one step: times add up, the slowest rank's costs count."""
        assert isinstance(other, WorkerReport)
        overlaps = dict(self.overlaps)
        for request, (hidden, whole) in other.overlaps.items():
            mine = overlaps.get(request, (0.0, 0.0))
            overlaps[request] = (mine[0] + hidden, mine[1] + whole)
        drained = dict(Counter(self.drained) + Counter(other.drained))
        ran = dict(Counter(self.ran) + Counter(other.ran))
        failed = {
            request: max(self.failed.get(request, 0.0), other.failed.get(request, 0.0))
            for request in self.failed | other.failed
        }
        return WorkerReport(
            overlaps=overlaps,
            drained=drained,
            costs=_slower(self.costs, other.costs),
            failed=failed,
            lost=self.lost | other.lost,
            ran=ran,
            layouts=self.layouts + other.layouts,
            asking=self.asking | other.asking,
            changed=self.changed | other.changed,
        )


OUTSIDE_STEPS = frozenset((
    "NixlConnector", "NixlPullConnector", "MooncakeConnector",
    "MooncakeConnectorV1", "MooncakeConnectorV2", "MooncakePullConnector", "MooncakeHybridConnector",
))  # fmt: skip
"""Connectors, vLLM's and vLLM-Ascend's, that load in the background alone, and hand out a request's blocks once it has
ended."""


@dataclass(slots=True)
class WorkerLayout(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker's spec, for the scheduler to look up with.

    :param spec: msgpack of :class:`layerflow.spec.ModelSpec`.
    :param vllm_groups: see :class:`.layout.Layout`.
    :param endpoint: where the server listens (the embedded one's is chosen by the worker).
    :param siblings: names of the other connectors of a MultiConnector, of which this is one; None = it is alone. Of
        vLLM's processes only a worker's can tell.
    """

    spec: bytes
    vllm_groups: tuple[int, ...]
    endpoint: str
    siblings: tuple[str, ...] | None = None

    @property
    def shares_steps(self) -> bool:
        """May another connector load in a step, or store what one computes before its output has come?"""
        return not OUTSIDE_STEPS.issuperset(self.siblings or ())

    @property
    def model_spec(self) -> ModelSpec:
        """What this worker caches."""
        return msgspec.msgpack.decode(self.spec, type=ModelSpec)

    @property
    def groups(self) -> dict[int, GroupSpec]:
        """What it caches of each of vLLM's groups."""
        return dict(zip(self.vllm_groups, self.model_spec.groups, strict=True))


NO_REPORT = WorkerReport()

NOT_NAMED = WorkerLayout(b"", (), "")
"""From a worker whose weights have no digest yet: its layout comes with a later step's report."""


def requests_of(parts: Iterable[PartDescriptor]) -> tuple[str, ...]:
    """Whose parts these are, each once."""
    return tuple({part.request: None for part in parts})


Costs = tuple[LinkCost | None, ComputeCost | None]


def _slower(one: Costs | None, other: Costs | None) -> Costs | None:
    if one is None or other is None:
        return one or other
    links = [link for link in (one[0], other[0]) if link is not None]
    return min(links, key=lambda link: link.bandwidth, default=None), one[1] or other[1]
