"""``LayerflowConnector``: vLLM's hooks, each handed to the scheduler's or the worker's side.

To follow a request: ``on_new_request`` and ``get_num_new_matched_tokens`` look it up, ``update_state_after_alloc``
accepts the hit, ``build_connector_meta`` outlines what the step moves (all :mod:`.scheduler`); in every worker
``handle_preemptions`` and ``bind_connector_metadata`` open the agent's steps, ``wait_for_layer_load`` and
``save_kv_layer`` gate each layer, ``wait_for_save`` closes, ``get_finished`` reports (all :mod:`.worker`).
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import structlog
import vllm
from torch import nn
from vllm import config as vllm_configs
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.forward_context import is_forward_context_available

from layerflow.agent import Agent
from layerflow.config.settings import Settings
from layerflow.connectors.common.computation import model_of
from layerflow.connectors.common.guard import tell
from layerflow.connectors.common.interface import check_call
from layerflow.connectors.common.loaded import LoadedWeights
from layerflow.connectors.common.weights import START_WAIT_S, WeightsReading
from layerflow.connectors.vllm.context import sizes_of
from layerflow.connectors.vllm.identity.adapters import Adapters
from layerflow.connectors.vllm.identity.identity import RequestKeys
from layerflow.connectors.vllm.layout import Layout, layer_specs, layout_of, wanted_layout
from layerflow.connectors.vllm.options import Options, allows_unknown, parse_options
from layerflow.connectors.vllm.pd.options import check_policy
from layerflow.connectors.vllm.pd.side import HandoffSide
from layerflow.connectors.vllm.plan import NOT_NAMED, StepPlan, WorkerLayout, WorkerReport
from layerflow.connectors.vllm.reuse import obstacle
from layerflow.connectors.vllm.scheduler import recovery
from layerflow.connectors.vllm.scheduler.events import PoolEvents
from layerflow.connectors.vllm.scheduler.scheduler import SchedulerSide
from layerflow.connectors.vllm.versions import check_version, release
from layerflow.connectors.vllm.worker.hook_times import ENVIRONMENT, HookTimes
from layerflow.connectors.vllm.worker.hooks import forward_pass
from layerflow.connectors.vllm.worker.order import steps_in_flight
from layerflow.connectors.vllm.worker.stats import TransferMetrics, TransferStats
from layerflow.connectors.vllm.worker.worker import WorkerSide
from layerflow.errors import Unsupported
from layerflow.kinds import KINDS
from layerflow.server import EmbeddedServer

# Without an endpoint: a server on a thread of the first worker's process, reachable for the engine's others.


def embedded_endpoint(engine_id: str) -> str:
    """Where an engine's embedded server listens; all its processes compute the same."""
    folder = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"  # noqa: S108  the folder below it is private
    return f"ipc://{folder}/layerflow-{os.getuid()}/vllm-{engine_id[-40:]}"


def embed(options: Options, engine_id: str) -> EmbeddedServer:
    """Start it.

    :raises LayerflowError: its settings are wrong, or its endpoint is taken.
    """
    return EmbeddedServer(Settings.load(None, options.server), endpoint=embedded_endpoint(engine_id))


_SCHEDULER_HOOKS = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    "update_connector_output", "request_finished_all_groups",
)  # fmt: skip
_WORKER_HOOKS = (
    "handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_layer_load", "save_kv_layer",
    "wait_for_save", "get_finished", "get_transfer_results", "get_block_ids_with_load_errors",
    "get_kv_connector_stats", "build_connector_worker_meta", "clear_connector_metadata",
)  # fmt: skip

# vLLM 0.27 has neither: failures of background loads are told by their blocks there.
_TransferResults = getattr(base, "KVConnectorTransferResults", None)


SHORTENS_LATE = {
    "MooncakeLayerwiseConnector": None, "MooncakeConnector": (0, 30),
    "NixlConnector": (0, 30), "NixlPullConnector": (0, 30), "NixlPushConnector": (0, 30),
}  # fmt: skip
"""Connectors that take the last token off prompts of models with recurrent state when vLLM asks them for a hit, and
it asks those before them first; the vLLM from which on they do it when a prompt arrives."""

log = structlog.get_logger("layerflow.vllm")

NAME = "LayerflowConnector"

# A MultiConnector looks its connectors' statistics up by class name.
if NAME not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector(NAME, "layerflow.connectors.vllm", NAME)


class LayerflowConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM creates one per worker and one for its scheduler.

    :raises ConfigError: the extra config; see :class:`.options.Options`.
    :raises Unsupported: a vLLM, a parallelism or a cache that the connector does not know.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        check_version(vllm.__version__, allow_unknown=allows_unknown(transfer.kv_connector_extra_config))
        named = {"vllm_config": vllm_config, "role": role, "kv_cache_config": kv_cache_config}
        check_call(super().__init__, f"vLLM {vllm.__version__}", **named)
        super().__init__(**named)
        self.options = parse_options(
            transfer.kv_connector_extra_config, producer=transfer.is_kv_producer, consumer=transfer.is_kv_consumer
        )
        check_policy(transfer.kv_role, transfer.kv_load_failure_policy)
        self._name = self.options.name or _default_name(vllm_config)
        self._groups = len(kv_cache_config.kv_cache_groups)
        # vLLM itself recovers from such a load with one group, and where no step is planned before that one has ended.
        self._takes_back = (self._groups > 1 or _steps_overlap(vllm_config)) and recovery.is_known(
            vllm.__version__,
            vllm_config.scheduler_config,
            recompute=transfer.kv_load_failure_policy == "recompute",
        )
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._server: EmbeddedServer | None = None
        self._siblings = _siblings(transfer, kv_cache_config)
        self._bound: StepPlan | None = None
        self._forward = False
        self._reading: WeightsReading[Layout] | None = None
        self._named: Layout | None = None
        self._weights: LoadedWeights | None = None
        self._told_of_reading = False
        # In its scheduler's process vLLM has no current configuration: the workers refuse what is no MultiConnector's.
        child = self._siblings is not None or role == KVConnectorRole.SCHEDULER
        self._obstacle = obstacle(vllm_config, layer_specs(kv_cache_config), child=child)
        if self._obstacle:
            log.warning("reuse_off", reason=self._obstacle, effect="this engine loads and saves nothing")
        events = vllm_config.kv_events_config
        tells = (
            events is not None and events.enable_kv_cache_events and events.publisher != "null" and self.options.load
        )
        if role == KVConnectorRole.SCHEDULER:
            context = sizes_of(vllm_config.parallel_config)
            self._scheduler = SchedulerSide(
                self.options,
                transfer.engine_id,
                context.group_tokens(kv_cache_config),
                name=self._name,
                can_fail_in_background=_TransferResults is not None,
                recovers=self._takes_back and recovery.install(LayerflowConnector),
                keeps_reports=not getattr(vllm_config.parallel_config, "enable_fault_tolerance", False),
                # With overlapping steps vLLM may emit tokens of the step behind a failed one: hits need leases there.
                trusts_sight=transfer.kv_load_failure_policy == "recompute" and not _steps_overlap(vllm_config),
                events=PoolEvents(vllm_config, kv_cache_config) if tells else None,
                drains_holders=release(vllm.__version__) >= (0, 31),
                keys=RequestKeys(Adapters(keyed_by_path=release(vllm.__version__) >= (0, 32))),
                reuses=not self._obstacle,
                num_blocks=kv_cache_config.num_blocks,
                tells_loads=vllm_config.device_config.device_type != "npu",  # some of vLLM-Ascend's say "no" always
                handoffs=HandoffSide(
                    self.options.pd,
                    transfer.engine_id,
                    producer=transfer.is_kv_producer,
                    consumer=transfer.is_kv_consumer,
                    block_sizes=tuple(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups),
                    context=context,
                    data_parallel_rank=vllm_config.parallel_config.data_parallel_index,
                    data_parallel_size=vllm_config.parallel_config.data_parallel_size,
                ),
            )
        self._times: HookTimes | None = None
        if os.environ.get(ENVIRONMENT):
            self._times = HookTimes(os.environ[ENVIRONMENT], role.name.lower())
            self._times.watch(self, _SCHEDULER_HOOKS if role == KVConnectorRole.SCHEDULER else _WORKER_HOOKS)

    # -- what vLLM asks about the connector ---------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what was not saved is computed again."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A batch that may be replayed as one whole graph waits for its loads before it, and saves behind it.

        vLLM 0.32 tells whether a pass may be one. On earlier versions layers wait for their blocks in hooks, which do
        not run inside such a graph.
        """
        options = parse_options(extra_config, producer=True, consumer=True)
        return release(vllm.__version__) < (0, 32) and options.load and options.mode != "bulk"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """The cache keeps its addresses while vLLM sleeps, and nothing touches them then."""
        return True

    # -- the scheduler's process ----------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """The workers' layouts. A MultiConnector passes on what any of its connectors has handed out."""
        assert self._scheduler is not None
        layouts = [metadata[rank] for rank in sorted(metadata)]
        self._scheduler.meet_workers([layout for layout in layouts if isinstance(layout, WorkerLayout)])

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """The same, by pipeline and tensor rank."""
        self.set_xfer_handshake_metadata({rank: metadata[place] for rank, place in enumerate(sorted(metadata))})

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The scheduler has its blocks."""
        assert self._scheduler is not None
        speculative = self._vllm_config.speculative_config
        # Some ways to guess begin with a token that is no guess.
        ahead = speculative.num_speculative_tokens + 1 if speculative is not None else 0
        self._scheduler.step_loads.meet_blocks(gpu_block_pool.get_num_free_blocks, ahead)
        self._scheduler.own_cache.meet(lambda: getattr(gpu_block_pool, "cached_block_hash_to_block", None))

    def on_new_request(self, request: Any) -> None:
        """A request has come in."""
        assert self._scheduler is not None
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How much can be loaded."""
        assert self._scheduler is not None
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its blocks."""
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """What the step moves."""
        assert self._scheduler is not None
        return self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers report."""
        assert self._scheduler is not None
        self._scheduler.update_from_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request is over."""
        assert self._scheduler is not None
        return self._scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request is over."""
        assert self._scheduler is not None
        return self._scheduler.finished(request, block_ids)

    def failed_in_step(self, connector_output: Any) -> Any:
        """For :mod:`.recovery`: see :meth:`.loads.StepLoads.failed`."""
        assert self._scheduler is not None
        return self._scheduler.step_loads.failed(connector_output)

    def reset_cache(self) -> bool | None:
        """Forget what is stored."""
        assert self._scheduler is not None
        return self._scheduler.reset()

    # -- the workers' processes -----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The worker's cache exists: attach, as soon as its weights have a name."""
        if self._obstacle:
            return
        layout = layout_of(self._vllm_config, self._kv_cache_config, kv_caches, self.options)
        if self._weights is None:  # from here on: the digest is that of the files, which the weights still are
            self._weights = _loaded_weights(self._vllm_config, layout)
        if self._worker is not None:  # vLLM has made its cache anew
            self._worker.let_go()
            self._worker.close()
            self._worker = None
        first = layout.spec.shard.tp_rank == layout.spec.shard.pp_rank == 0
        if not self.options.endpoint and first and self._server is None:
            self._server = embed(self.options, self._kv_transfer_config.engine_id)
        if self._reading is not None:
            self._reading.close()
            self._reading = None
        if self._named is not None:  # the scheduler's side knows the weights by this name
            return self._attach(layout.named_as(self._named))
        self._reading = WeightsReading(layout.with_content)
        if self._reading.wait(START_WAIT_S):
            self._attach(self._reading.found)
        else:
            effect = "until then this engine loads and saves nothing; the next start finds the digest"
            log.info("weights_digest_pending", model=layout.spec.name, effect=effect)

    def unregister_kv_caches(self) -> None:
        """VLLM is about to unmap its cache (sleep, discard), which keeps its addresses."""
        if self._worker is not None:
            self._worker.let_go()

    def restore_kv_caches(self) -> None:
        """Map the arena again, with other contents: vLLM has forgotten its prefix cache before it slept."""
        if self._worker is not None:
            self._worker.take_up()

    def _attach(self, layout: Layout) -> None:
        self._named = layout
        engine_id = self._kv_transfer_config.engine_id
        endpoint = self.options.endpoint or embedded_endpoint(engine_id)
        # With some caches vLLM zeroes new blocks while it prepares a step, and where steps overlap the one before may
        # still run then.
        zeroes = self._groups > 1 and getattr(self._kv_cache_config, "needs_kv_cache_zeroing", True)
        with contextlib.ExitStack() as begun:
            agent = begun.enter_context(Agent(endpoint, layout.spec, layout.tensors, engine_id, name=self._name))
            self._worker = WorkerSide(
                agent,
                layout,
                endpoint,
                several_groups=self._groups > 1,
                early=not (zeroes or _steps_overlap(self._vllm_config)),
                in_flight=steps_in_flight(
                    self._vllm_config,
                    vllm.__version__,
                    overlap=_steps_overlap(self._vllm_config),
                    consumer=self._kv_transfer_config.is_kv_consumer and self._siblings is None,
                ),
                taken_back=self._takes_back,
                splits=bool(getattr(self._vllm_config.parallel_config, "use_ubatching", False)),
                weights=self._weights,
                siblings=self._siblings,
            )
            begun.pop_all()  # from here on the worker's side closes the agent

    def _attach_late(self) -> None:
        """The digest of the weights is known by now, or will never be."""
        if self._reading is None or not self._reading.wait(0):
            return
        reading, self._reading = self._reading, None
        try:
            self._attach(reading.found)
        except Exception as error:  # noqa: BLE001 - told: it costs reuse, and no engine that answers already
            tell("handle_preemptions", None, error)
            log.warning("reuse_off", reason=str(error), effect="this engine loads and saves nothing")

    def get_handshake_metadata(self) -> Any:
        """For :meth:`set_xfer_handshake_metadata`.

        In a MultiConnector none: it has room for one connector's, which NIXL insists on; the first step's report tells.
        """
        if self._siblings is not None:
            return None
        if self._worker is not None:
            return self._worker.greeting
        return NOT_NAMED if self._reading is not None else None

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """The step is about to be prepared."""
        if self._worker is None:
            self._attach_late()
        if self._worker is not None:
            self._worker.prepare(kv_connector_metadata, inside=is_forward_context_available())

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """The step is prepared."""
        inside = is_forward_context_available()
        hooked = self._worker is not None and self._worker.begin(connector_metadata, inside=inside)
        self._bound = connector_metadata if hooked else None

    def has_connector_metadata(self) -> bool:
        """False spares the step the per-layer hooks."""
        return self._bound is not None

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        self._bound = None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """The forward pass is next, or has been where nothing of the step is loaded."""
        this = forward_pass(forward_context, kwargs)
        self._forward = this.computes
        if self._worker is not None:
            self._worker.wait_tails()
            if this.replayed:
                self._worker.wait_whole()
            if self._vllm_config.device_config.device_type == "npu":
                self._worker.wait_unasked(getattr(forward_context, "attn_metadata", None))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Before a layer's attention."""
        if self._worker is not None:
            self._worker.wait_layer(layer_name)

    def on_kv_cache_written(self, layer_name: str = "") -> None:
        """VLLM-Ascend, between a layer's writes and its attention; its plain attention does not say which layer's."""
        if self._worker is not None:
            self._worker.layer_written(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """After it."""
        if self._worker is not None:
            self._worker.layer_done(layer_name)

    def wait_for_save(self) -> None:
        """The forward pass is over; saves go on."""
        if self._worker is not None:
            self._worker.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose saves, and whose background loads, have ended."""
        if self._worker is None:
            return None, None
        sent, arrived, _ = self._worker.transfers(forward=self._forward)
        return sent, arrived

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The same, with those that failed."""
        assert _TransferResults is not None
        return _TransferResults(*self._worker.transfers(forward=self._forward)) if self._worker else _TransferResults()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to compute again."""
        return self._worker.failed_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> Any:
        """For :meth:`update_connector_output`."""
        if self._worker is not None:
            return self._worker.report()
        if self._obstacle or self._told_of_reading:  # also if its weights will never have a digest: requests would wait
            return None
        self._told_of_reading = True
        return WorkerReport(layouts=(NOT_NAMED,))

    # -- both -----------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> TransferStats | None:
        """What was moved."""
        return self._worker.stats() if self._worker is not None else None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """One that engines of other tensor sizes can read, where the kernels allow it."""
        return wanted_layout(vllm_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        """From what a worker has sent."""
        return TransferStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> TransferMetrics:
        """Counters on vLLM's /metrics."""
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Detach."""
        if self._reading is not None:
            self._reading.close()
        if self._worker is not None:
            self._worker.close()
        if self._weights is not None:
            self._weights.close()
        if self._scheduler is not None:
            self._scheduler.close()
        if self._server is not None:
            self._server.close()
        if self._times is not None:
            self._times.write()


def _default_name(vllm_config: Any) -> str:
    """What an engine is called: the same after a restart, which vLLM's ``engine_id`` is not."""
    model = str(vllm_config.model_config.served_model_name or vllm_config.model_config.model)
    rank = vllm_config.parallel_config.data_parallel_index
    return f"{model.rstrip('/').rpartition('/')[2]}/{socket.gethostname()}/dp{rank}"


def _loaded_weights(vllm_config: Any, layout: Layout) -> LoadedWeights:
    """Return the weights of the model whose caches these are, and of its draft model."""
    context = vllm_config.compilation_config.static_forward_context
    layers = [context[name] for name in layout.numbers if isinstance(context.get(name), nn.Module)]
    balanced = bool(getattr(vllm_config.parallel_config, "enable_eplb", False))
    return LoadedWeights(model_of(layers), balanced=balanced)


def _steps_overlap(vllm_config: Any) -> bool:
    """Is a step planned before the one before it has ended?"""
    return bool(vllm_config.scheduler_config.async_scheduling) or vllm_config.parallel_config.pipeline_parallel_size > 1


def _siblings(transfer: Any, kv_cache_config: Any) -> tuple[str, ...] | None:
    """Return the names of a MultiConnector's other connectors; None where this is the configuration of the only one.

    vLLM's own configuration is current while its workers make them.

    :raises Unsupported: one behind this shortens prompts of which a hit was already told.
    """
    current = getattr(vllm_configs, "get_current_vllm_config_or_none", lambda: None)()
    outer = current.kv_transfer_config if current is not None else None
    if outer is None or outer.kv_connector == transfer.kv_connector:
        return None
    given = (outer.kv_connector_extra_config or {}).get("connectors", ())
    names = [str(each.get("kv_connector")) for each in given]
    own = names.index(transfer.kv_connector) if transfer.kv_connector in names else len(names)
    states = any(type(each).__name__ in KINDS["state"].vllm for each in layer_specs(kv_cache_config))
    for name in names[own + 1 :] if states and outer.is_kv_producer else ():
        early = SHORTENS_LATE.get(name, (0,))
        if early is not None and release(vllm.__version__) >= early:
            continue
        raise Unsupported(
            f"MultiConnector: {name} takes a token off prompts that layerflow before it has found whole: "
            f"name {transfer.kv_connector} behind it"
        )
    return tuple(names[:own] + names[own + 1 :])
