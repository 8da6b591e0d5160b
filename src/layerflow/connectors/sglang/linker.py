"""``LayerflowLinker``: SGLang's external cache linker, each call handed to loads or saves.

To follow a request: SGLang matches it (:meth:`LayerflowLinker.lookup`), admits it and gives it slots of its own
(``load``), makes a batch (``start_layer_wise_loading``), and its pools wait for each layer as attention reads it
(:class:`LayerWaits`). After the pass ``finish_layer_wise_loading`` says whether all of it was in place. What has been
computed comes by ``offload``, node by node, and is told by ``num_completed_offloads``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import sglang
import structlog
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_lora, get_parallel

from layerflow.agent import Agent
from layerflow.connectors.common.guard import attempt, guarded
from layerflow.connectors.common.loaded import LoadedWeights
from layerflow.connectors.common.weights import START_WAIT_S, Weights, WeightsReading
from layerflow.connectors.sglang.breaker import Breaker
from layerflow.connectors.sglang.identity import arithmetic_of, loaded_modules, reading_of
from layerflow.connectors.sglang.layout import KV, MAMBA, SWA, layout_of
from layerflow.connectors.sglang.loads import Loads
from layerflow.connectors.sglang.options import parse_options
from layerflow.connectors.sglang.saves import Saves
from layerflow.connectors.sglang.versions import check_version
from layerflow.errors import Unsupported
from layerflow.spec import Shard

ATTACH_WAIT_S = 2.0
"""How long a start waits for a server. Later, the engine attaches when one comes."""

PAGE_ADVICE = 64

log = structlog.get_logger("layerflow.sglang")


class LayerWaits:
    """What SGLang's pools call before they read a layer: its ``layer_done_counter``.

    :param num_layers: SGLang's count of the model's layers.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.consumer_index = -1
        self.loads: Loads | None = None

    def set_consumer(self, index: int) -> None:
        """The batch of this number runs next; -1 = one that loads nothing."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Return once the layer is in place, has failed, or its batch's deadline has passed. Never raises."""
        if self.consumer_index >= 0 and self.loads is not None:
            self.loads.wait(self.consumer_index, layer)


def _no() -> bool:
    """What most calls answer where they raise."""
    return False


def _nothing() -> list[int]:
    """No page can be loaded."""
    return []


class _Attached:
    """The agent, once the weights' content is known, and what works with it."""

    def __init__(self, agent: Agent, loads: Loads, saves: Saves) -> None:
        self.agent, self.loads, self.saves = agent, loads, saves


class LayerflowLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """SGLang makes one in each scheduler process.

    :raises ConfigError: ``linker_extra_config``; see :class:`.options.Options`.
    :raises Unsupported: an SGLang, a parallelism or a cache that is not known here.
    """

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: Any, forward_stream: Any = None
    ) -> None:
        self.options = parse_options(extra_config)
        check_version(sglang.__version__, allow_unknown=self.options.allow_unknown)
        parallel = get_parallel()
        shard = _shard(parallel, params)
        config = ModelConfig.from_server_args(server_args)
        _refuse(params, config)
        self.forward_stream = forward_stream
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        states = params.req_to_token_pool if MAMBA in {_component(each) for each in components} else None
        heads = {KV: config.get_total_num_kv_heads(), SWA: config.get_swa_num_kv_heads(1)}
        self._layout = layout_of(kvcache, states, params.page_size, params.sliding_window_size or 0, heads, shard)
        _check_page(params.page_size, states is not None)
        modules = loaded_modules()
        dtypes = [str(tensor.dtype) for planes in self._layout.tensors.values() for tensor in planes.values()]
        self._arithmetic = arithmetic_of(server_args, sglang.__version__, modules, dtypes)
        self._translate = getattr(params.req_to_token_pool, "translate_mamba_indices", None)
        self._engine = _engine_id(server_args, parallel)
        self._name = self.options.name or _name(server_args, parallel)
        self._weights = LoadedWeights(modules)
        self._named = Weights(self.options.model_content)
        self._replaced = 0
        self._stale = ""
        self._breaker = Breaker()
        self._attached: _Attached | None = None
        adapters = get_lora().lora_paths or ()  # as SGLang has resolved them; server_args keeps what was written
        self._reading = WeightsReading(reading_of(server_args, adapters, self.options.model_content))
        self.layer_done_counter = LayerWaits(max(self._layout.layers) + 1)
        self.pools = {PoolName(group.pool): _pool_of(kvcache, states, group.pool) for group in self._layout.groups}
        if states is not None:
            states.register_layer_transfer_counter(self.layer_done_counter)
        if not self._reading.wait(START_WAIT_S):
            log.info("weights_being_read", effect="nothing is shared until their digest is known")
        self._ready()

    def hook_failed(self, hook: str, subject: Any) -> None:
        """A call has raised: what it was about is computed, fails or is not stored. No load writes on behind it."""
        if hook == "finish_layer_wise_loading" and self._attached is not None:
            self._attached.agent.revoke("its batch could not be ended")

    @guarded(_nothing)
    def lookup(self, rid: str, transfers: Any) -> list[int]:
        """Every number of pages, behind those on the device, that can be loaded for a request."""
        ready = self._ready()
        if ready is None or not self.options.load or self._are_replaced():
            return []
        return ready.loads.look_up(rid, _of(transfers, KV).keys)

    @guarded(_no)
    def load(self, rid: str, transfers: Any) -> bool:
        """Queue a hit into slots of its request's own; False, on a single rank only, = compute it."""
        if self._attached is None:
            return False
        full = _of(transfers, KV)
        return self._attached.loads.queue(rid, len(full.keys), self._slots(transfers))

    @guarded(lambda: -1)
    def start_layer_wise_loading(self) -> int:
        """Begin the loads of the batch that is being made; -1 = there are none."""
        return self._attached.loads.start() if self._attached is not None else -1

    @guarded(_no)
    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until the batch's loads write nothing any more; False = some of it is not in place."""
        return self._attached is not None and self._attached.loads.finish(counter_index)

    @guarded(_no)
    def cancel_queued_load(self, rid: str) -> bool:
        """The request has left before its load began."""
        return self._attached is not None and self._attached.loads.cancel(rid)

    @guarded(_no)
    def offload(self, transfers: Any, session_id: str | None = None) -> bool:
        """Begin to save a node. Its slots stay locked until it is reported as completed."""
        if not self.options.save or self._attached is None:
            return False
        slots = self._slots(transfers)
        self._attached.saves.begin(_of(transfers, KV).keys, slots, allowed=not self._are_replaced())
        return True

    @guarded(lambda: 0)
    def num_completed_offloads(self) -> int:
        """How many saves, from the oldest on, have ended."""
        return self._attached.saves.ended() if self._attached is not None else 0

    def pop_completed_offload(self) -> bool:
        """Whether the oldest of them is stored."""
        return self._attached is not None and self._attached.saves.take()

    def reset(self) -> None:
        """SGLang empties its cache: nothing reads or writes it any more when this returns. What is stored stays,
        unless the weights are others now: then it has other keys from here on.
        """
        ready = self._attached
        if ready is None:
            return
        ready.loads.reset()
        ready.saves.reset()
        if self._are_replaced():
            self._rename(ready)

    def close(self) -> None:
        """Cut off what is under way, and hang up."""
        attempt(self.reset, "close")
        self._reading.close()
        self._weights.close()
        if self._attached is not None:
            self._attached.agent.close()
            self._attached = None

    def failed_loads(self, index: int, requests: Sequence[str]) -> Mapping[str, str]:
        """End a batch, as :meth:`finish_layer_wise_loading`: which of its requests' loads have failed, and why."""
        if self.finish_layer_wise_loading(index):
            return {}
        return self.failures() or dict.fromkeys(requests, "its batch could not be loaded; see the engine's log")

    def failures(self) -> Mapping[str, str]:
        """Of the batch that has ended last: the requests whose loads have failed, and why."""
        return self._attached.loads.failures if self._attached is not None else {}

    def _ready(self) -> _Attached | None:
        """The agent, made as soon as the weights' content is known."""
        if self._attached is None and self._reading.wait(0):
            content, adapters = self._reading.found
            spec = msgspec.structs.replace(
                self._layout.spec, name=self._name, content=content, quantization=self._arithmetic + adapters
            )
            options = self.options
            agent = Agent(
                options.endpoint,
                spec,
                self._layout.tensors,
                self._engine,
                name=self._name,
                wait_s=ATTACH_WAIT_S,
                lookup_timeout_s=options.lookup_timeout_s,
            )
            loads = Loads(
                agent, self._layout, after=self._settled, timeout_s=options.load_timeout_s, breaker=self._breaker
            )
            saves = Saves(agent, self._layout, written=self._written)
            self.layer_done_counter.loads = loads
            self._attached = _Attached(agent, loads, saves)
            log.info(
                "linker_ready", engine=self._name, attached=agent.attached, page_tokens=spec.chunk_tokens,
                layers=spec.num_layers, groups=[group.pool for group in self._layout.groups],
            )  # fmt: skip
        return self._attached

    def _are_replaced(self) -> bool:
        """Are the weights others than those that the keys name? Nothing is loaded or saved until SGLang empties its
        cache: before, it may hold pages of both.
        """
        if not self._stale and (change := self._weights.change()):
            self._stale = change
            log.warning("weights_changed", seen=change, effect="nothing is shared until the cache is flushed")
        return bool(self._stale)

    def _rename(self, ready: _Attached) -> None:
        self._named.replaced(ready.agent.spec.content)
        name = self._named.name() if self._named.unnamed else ""
        self._replaced += 1
        if not name and ready.agent.spec.shard.workers > 1:
            name = f"{self._engine}/{self._replaced}"  # the same on every rank, and of no other engine
        ready.agent.reset(name)
        self._weights.accept()
        self._stale = ""
        log.info("weights_renamed", content=ready.agent.spec.content)

    def _slots(self, transfers: Any) -> dict[str, np.ndarray]:
        """int64 slots by pool."""
        found = {}
        for transfer in transfers:
            pool, indices = str(transfer.name), transfer.device_indices
            if pool == MAMBA and self._translate is not None:
                indices = self._translate(indices)
            found[pool] = indices.reshape(-1).to("cpu", torch.int64).numpy()
        return found

    def _written(self) -> Any:
        """An event behind what the forward pass has been given; None on the cpu."""
        return self._recorded(self.forward_stream)

    def _settled(self) -> Any:
        """An event behind all work that may touch slots which were free when the batch was made; None on the cpu."""
        return self._recorded(self.forward_stream, and_current=True)

    def _recorded(self, stream: Any, *, and_current: bool = False) -> Any:
        assert self._attached is not None
        agent = self._attached.agent
        if agent.device.kind == "cpu" or stream is None:
            return agent.record()
        device = torch.get_device_module(agent.memory.device)
        if and_current:
            both = device.Stream()
            both.wait_stream(stream)
            both.wait_stream(device.current_stream())
            stream = both
        with device.stream(stream):
            return agent.record()


def _of(transfers: Any, pool: str) -> Any:
    return next(transfer for transfer in transfers if str(transfer.name) == pool)


def _component(component: Any) -> str:
    return str(getattr(component, "name", component)).lower()


def _pool_of(kvcache: Any, states: Any, pool: str) -> Any:
    if pool == MAMBA:
        return states.mamba_pool
    inner = {KV: "full_kv_pool", SWA: "swa_kv_pool"}[pool]
    return getattr(kvcache, inner, kvcache)


def _shard(parallel: Any, params: Any) -> Shard:
    """:raises Unsupported: a parallelism that spreads a page over ranks, or layers over stages."""
    for name, size in (
        ("--pp-size", params.pp_size),
        ("--attn-cp-size", params.attn_cp_size),
        ("--dcp-size", getattr(parallel, "attn_dcp_size", 1)),
    ):
        if size > 1:
            raise Unsupported(f"{name} {size}: layerflow's linker does not support it yet; set it to 1")
    return Shard(parallel.attn_tp_rank, parallel.attn_tp_size)


def _refuse(params: Any, config: ModelConfig) -> None:
    """:raises Unsupported: what would be stored under keys that do not tell it apart, or would be left out of a hit."""
    if params.mtp_draft_device_pools or params.sidecar_draft_device_pools or params.mtp_draft_mamba_pools:
        raise Unsupported(
            "speculative decoding with a draft model: layerflow's linker does not move the draft model's cache yet, "
            "and SGLang would draft from pages that nobody has filled; run without --speculative-algorithm"
        )
    if config.is_multimodal:  # with --language-only too: an encoder elsewhere sends it what images are made into
        raise Unsupported(
            "a multimodal model: it has not been shown that SGLang's page hashes tell all images apart for ever; serve "
            "text alone (--language-model-only), or run without the linker"
        )
    if not config.is_generation:
        raise Unsupported("an embedding or reward model: layerflow's linker knows generating models only")


def _check_page(page: int, recurrent: bool) -> None:
    """:raises Unsupported: pages that are stored one by one would be single tokens, and SGLang does not demand it."""
    if page > 1:
        return
    if not recurrent:
        raise Unsupported(
            f"--page-size 1: each token would be an object of its own; set --page-size {PAGE_ADVICE} (at least 16)"
        )
    log.warning("pages_of_one_token", effect="each token is an object of its own, which costs much more to look up")


def _engine_id(cfg: Any, parallel: Any) -> str:
    """Shared by all ranks of one scheduler group, and by no other engine.

    Ranks on one machine have one parent, which starts anew with another number.
    """
    where = cfg.dist_init_addr if cfg.nnodes > 1 else f"{socket.gethostname()}:{cfg.port}:{os.getppid()}"
    return f"sglang-{where}-dp{parallel.attn_dp_rank}"


def _name(cfg: Any, parallel: Any) -> str:
    model = cfg.served_model_name or os.path.basename(cfg.model_path.rstrip("/"))
    return f"{model}@{socket.gethostname()}:{cfg.port}" + (
        f"-dp{parallel.attn_dp_rank}" if parallel.attn_dp_size > 1 else ""
    )
