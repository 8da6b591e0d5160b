"""``LayerflowLinker``: SGLang's external cache linker, each call handed to loads or saves.

To follow a request: SGLang matches it (:meth:`LayerflowLinker.lookup`), admits it and gives it slots of its own
(``load``), makes a batch (``start_layer_wise_loading``), and its pools wait for each layer as attention reads it
(:class:`LayerWaits`). After the pass ``finish_layer_wise_loading`` says whether all of it was in place. Pages that the
batch makes whole are saved layer by layer (``begin_batch``, ``layer_done``, ``end_batch``). Later they come by
``offload``, node by node: what is not stored by then is saved, and ``num_completed_offloads`` tells when it is.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import structlog
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_disagg, get_observability, get_spec

from layerflow.agent.control import Control
from layerflow.connectors.common.guard import attempt, guarded, nothing
from layerflow.connectors.sglang.batch_saves import (
    BatchSaves,
    frees_are_seen,
    full_attention_allocator,
    untold_layers,
)
from layerflow.connectors.sglang.breaker import LoadBreaker
from layerflow.connectors.sglang.drafts import drafts_of
from layerflow.connectors.sglang.engine import EngineCache
from layerflow.connectors.sglang.events import PoolEvents, pool_events
from layerflow.connectors.sglang.layout import KV, MAMBA, SWA
from layerflow.connectors.sglang.loads import Loads
from layerflow.connectors.sglang.options import parse_options
from layerflow.connectors.sglang.page_saves import PageSaves
from layerflow.connectors.sglang.pages import BatchPages
from layerflow.connectors.sglang.plugin import (
    forget_cache,
    hook_batches,
    hook_events,
    hook_linker,
    hook_weights,
    keep_cache,
    unwatch_batches,
    watch_batches,
)
from layerflow.connectors.sglang.saves import Saves
from layerflow.errors import Unsupported

PAGE_ADVICE = 64

SHORT_DRAIN_S = 0.1
"""How long SGLang's scheduler waits, where it frees a page, for a save that reads it. What is cut off then, and stays
cached, is saved with its node."""

log = structlog.get_logger("layerflow.sglang")


class LayerWaits:
    """What SGLang's pools call before they read a layer: its ``layer_done_counter``.

    :param layers: layerflow's layer numbers by SGLang's.

    :ivar num_layers: SGLang's count of the model's layers.
    """

    def __init__(self, layers: Mapping[int, int]) -> None:
        self._layers = layers
        self.num_layers = max(layers) + 1
        self.consumer_index = -1
        self.loads: Loads | None = None

    def set_consumer(self, index: int) -> None:
        """The batch of this number runs next; -1 = one that loads nothing."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Return once the layer is in place, has failed, or its batch's deadline has passed. Never raises."""
        self.wait_for(self._layers.get(layer))

    def wait_for(self, layer: int | None) -> None:
        """Likewise.

        :param layer: layerflow's number; None = it has no cache.
        """
        if self.consumer_index >= 0 and self.loads is not None and layer is not None:
            self.loads.wait(self.consumer_index, layer)


class DraftWaits:
    """What a draft model's cache calls before it reads a layer: behind the model, in the same batch.

    :param layers: layerflow's layer numbers by those of the draft model.
    :param model: the model's. SGLang tells that one which batch runs.
    """

    def __init__(self, layers: Mapping[int, int], model: LayerWaits) -> None:
        self._layers = layers
        self._model = model
        self.num_layers = max(layers) + 1

    @property
    def consumer_index(self) -> int:
        """As of :class:`LayerWaits`."""
        return self._model.consumer_index

    def wait_until(self, layer: int) -> None:
        """As :meth:`LayerWaits.wait_until`."""
        self._model.wait_for(self._layers.get(layer))


def _no() -> bool:
    """What most calls answer where they raise."""
    return False


def _nothing() -> list[int]:
    """No page can be loaded."""
    return []


_FENCES = ("finish_layer_wise_loading", "pages_freed", "weights_change", "memory_goes")
"""Calls behind which SGLang takes it that nothing touches some slots any more."""


class _Ready:
    """What works with the agent, once there is one."""

    def __init__(self, loads: Loads, saves: Saves, batches: BatchSaves, pages: PageSaves) -> None:
        self.loads, self.saves, self.batches, self.pages = loads, saves, batches, pages


class LayerflowLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """SGLang makes one in each scheduler process.

    :raises ConfigError: ``linker_extra_config``; see :class:`.options.SglangOptions`.
    :raises Unsupported: an SGLang, a parallelism or a cache that is not known here.

    :ivar events: tells routers what can be hit; None = this process does not.
    """

    events: PoolEvents | None = None

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: Any, forward_stream: Any = None
    ) -> None:
        self.options = parse_options(extra_config)
        if params.mtp_draft_mamba_pools:
            raise Unsupported(
                "a draft model with recurrent states of its own: layerflow's linker does not move them, and SGLang "
                "would draft from states that nobody has filled; run without --speculative-algorithm"
            )
        pools = [*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools]
        drafts = drafts_of(pools, get_spec().speculative_algorithm) if pools else []
        hook_linker()
        self.forward_stream = forward_stream
        allocator = params.token_to_kv_pool_allocator
        kvcache = allocator.get_kvcache()
        states = params.req_to_token_pool if MAMBA in {_component(each) for each in components} else None
        _check_page(params.page_size, states is not None)
        self._cache = EngineCache(
            server_args,
            self.options,
            kvcache=kvcache,
            states=states,
            page=params.page_size,
            window=params.sliding_window_size or 0,
            drafts=drafts,
        )
        layout = self._cache.layout
        self._translate = getattr(params.req_to_token_pool, "translate_mamba_indices", None)
        pairs = _keys_are_pairs(params, states is not None)
        self._pages = BatchPages(params.req_to_token_pool, params.page_size, pairs=pairs)
        self._allocator = full_attention_allocator(allocator)
        self._breaker = LoadBreaker()
        self._attached: _Ready | None = None
        self._early = 0  #: nodes that came before the agent: failed saves, not taken yet, ahead of all others
        self.layer_done_counter = LayerWaits(layout.layers)
        for draft, numbers in zip(drafts, layout.draft_layers, strict=True):
            draft.pool.register_layer_transfer_counter(DraftWaits(numbers, self.layer_done_counter))
        self.pools = {PoolName(group.pool): _pool_of(kvcache, states, group.pool) for group in layout.groups}
        if states is not None:
            states.register_layer_transfer_counter(self.layer_done_counter)
        if self.options.load and get_disagg().disaggregation_mode != "decode":  # which asks no linker for a hit
            whole = [number for number, group in enumerate(layout.groups) if group.pool == KV]
            self.events = pool_events(params, get_observability().kv_events_config, whole, pairs=pairs)
        if self.events is not None:
            hook_events()
        if self._saves_by_layer(server_args):
            hook_batches()
            watch_batches(self)
        hook_weights()
        keep_cache(self)
        self._ready()

    def hook_failed(self, hook: str, subject: Any) -> None:
        """A call has raised: what it was about is computed, fails or is not stored. No load writes on behind it."""
        agent = self._cache.agent()
        if hook in _FENCES and agent is not None:
            agent.revoke(f"{hook} has failed, behind which nothing may touch these slots")

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
        if not self.options.save:
            return False
        if self._attached is None:  # another rank may have its agent: each begins every save, be it to fail
            self._early += 1
            return True
        slots, allowed = self._slots(transfers), not self._are_replaced()
        self._attached.saves.begin(_of(transfers, KV).keys, slots, allowed=allowed)
        if allowed and self.events is not None:
            self.events.saving()
        return True

    @guarded(lambda: 0)
    def num_completed_offloads(self) -> int:
        """How many saves, from the oldest on, have ended."""
        return self._early + (self._attached.saves.ended() if self._attached is not None else 0)

    def pop_completed_offload(self) -> bool:
        """Whether the oldest of them is stored."""
        if self._early:
            self._early -= 1
            return False
        return self._attached is not None and self._attached.saves.take()

    def reset(self) -> None:
        """SGLang empties its cache: nothing reads or writes it any more when this returns. What is stored stays,
        unless the weights are others now: then it has other keys from here on.
        """
        self._early = 0
        ready = self._attached
        if ready is None:
            return
        ready.loads.reset()
        ready.saves.reset()
        self._cache.rename()
        if not self._are_replaced():
            self._announce()

    @guarded(nothing)
    def begin_batch(self, batch: Any, loading: Collection[str]) -> None:
        """A batch that computes prompts is about to run: the pages that it makes whole are saved as it goes.

        :param loading: ids of its requests of which it loads some.
        """
        ready = self._ready()
        if ready is not None and not self._are_replaced():
            ready.pages.begin(self._pages.computed(batch, loading))

    def layer_done(self, layer: Any) -> None:
        """The running batch has written a layer's new keys and values, or its state.

        :param layer: SGLang's module, of the model or of a draft model.
        """
        ready = self._attached
        if ready is not None and ready.batches.running:  # in a decode step that is all
            attempt(lambda: ready.batches.layer_done(self._cache.number_of(layer)), "layer_done")

    @guarded(nothing)
    def end_batch(self, batch: Any) -> None:
        """It has run, or has been given to the device. SGLang has marked the requests whose loads have failed, the same
        ones on every rank.
        """
        ready = self._attached
        if ready is not None and ready.batches.running:
            ready.pages.end({each.rid for each in batch.reqs if each.discard_output_reason is not None})

    @guarded(nothing)
    def pages_freed(self, allocator: Any, pages: Sequence[Any]) -> None:
        """SGLang gives pages to other requests: no save reads them any more when this returns.

        :param allocator: whose pages they are. Of a window's nothing is saved before its node.
        """
        if allocator is self._allocator and self._attached is not None:
            self._attached.batches.let_go(pages)

    @guarded(nothing)
    def weights_change(self) -> None:
        """SGLang is about to write to the weights. A batch may still be computing with them."""
        self._cache.about_to_be_replaced()
        self._are_replaced()

    @guarded(nothing)
    def memory_goes(self, *, weights: bool) -> None:
        """SGLang is about to let go of memory: nothing reads or writes its pools any more when this returns.

        :param weights: that of the weights goes too.
        """
        if weights:
            self._cache.weights_go()
            self._are_replaced()
        if self._attached is not None:
            self._attached.saves.settle()

    @guarded(nothing)
    def weights_return(self) -> None:
        """The weights' memory is there again. Where it holds what it did, routers believe what they did."""
        self._cache.weights_return()
        if not self._are_replaced():
            self._announce()

    def close(self) -> None:
        """Cut off what is under way, and hang up."""
        unwatch_batches(self)
        forget_cache(self)
        attempt(self.reset, "close")
        if self.events is not None:
            self.events.close()
        self._attached = None
        self._cache.close()

    def failed_loads(self, index: int, requests: Sequence[str]) -> Mapping[str, str]:
        """End a batch, as :meth:`finish_layer_wise_loading`: which of its requests' loads have failed, and why."""
        if self.finish_layer_wise_loading(index):
            return {}
        return self.failures() or dict.fromkeys(requests, "its batch could not be loaded; see the engine's log")

    def failures(self) -> Mapping[str, str]:
        """Of the batch that has ended last: the requests whose loads have failed, and why."""
        return self._attached.loads.failures if self._attached is not None else {}

    def _ready(self) -> _Ready | None:
        """What loads and saves, made as soon as the weights' content is known."""
        agent = self._cache.agent() if self._attached is None else None
        if agent is not None:
            layout, stream, cache = self._cache.layout, self.forward_stream, self._cache
            loads = Loads(
                agent,
                layout,
                after=lambda: cache.event(stream, and_current=True),
                timeout_s=self.options.load_timeout_s,
                breaker=self._breaker,
            )
            self.layer_done_counter.loads = loads
            batches = cache.batch_saves(stream, by_layer=True, ask_late=True, drain_s=SHORT_DRAIN_S)
            pages = PageSaves(agent, layout, batches)
            saves = Saves(agent, layout, pages, written=lambda: cache.event(stream))
            self._attached = _Ready(loads, saves, batches, pages)
            self._announce()
            log.info(
                "linker_ready", engine=cache.name, attached=agent.attached, page_tokens=agent.spec.chunk_tokens,
                layers=agent.spec.num_layers, groups=[group.name for group in layout.groups],
            )  # fmt: skip
        return self._attached

    def _are_replaced(self) -> bool:
        """Are the weights others than those of the keys? Then routers believe nothing until the next flush."""
        replaced = self._cache.are_replaced()
        if replaced and self.events is not None:
            self.events.withdraw()
        return replaced

    def _announce(self) -> None:
        """Routers believe what is stored under the keys of now."""
        agent = self._cache.agent()
        if self.events is not None and agent is not None:
            connect = functools.partial(Control, self.options.endpoint, self._cache.engine, name=self._cache.name)
            self.events.begin(agent.spec, connect)

    def _saves_by_layer(self, server_args: Any) -> bool:
        """Are pages saved before SGLang makes nodes of them?"""
        if not (self.options.save and self.options.save_by_layer):
            return False
        if server_args.disaggregation_mode != "null":  # prefill saves them for its hand-offs; decode computes none
            return False
        reason = untold_layers(server_args)
        if not frees_are_seen(self._allocator):
            reason = f"it is not known when a {type(self._allocator).__name__} frees pages"
        if reason:
            log.info("saves_by_node", reason=reason)
        return not reason

    def _slots(self, transfers: Any) -> dict[str, np.ndarray]:
        """int64 slots by pool."""
        found = {}
        for transfer in transfers:
            pool, indices = str(transfer.name), transfer.device_indices
            if pool == MAMBA and self._translate is not None:
                indices = self._translate(indices)
            found[pool] = indices.reshape(-1).to("cpu", torch.int64).numpy()
        return found


def _of(transfers: Any, pool: str) -> Any:
    return next(transfer for transfer in transfers if str(transfer.name) == pool)


def _keys_are_pairs(params: Any, recurrent: bool) -> bool:
    """Does SGLang key a page by each of its tokens and the next one, as the rows of a draft model's cache depend on?
    Its tree (``UnifiedTreeCore.is_eagle``) does not where a model has recurrent states.
    """
    return bool(params.is_eagle) and not recurrent


def _component(component: Any) -> str:
    return str(getattr(component, "name", component)).lower()


def _pool_of(kvcache: Any, states: Any, pool: str) -> Any:
    if pool == MAMBA:
        return states.mamba_pool
    inner = {KV: "full_kv_pool", SWA: "swa_kv_pool"}[pool]
    return getattr(kvcache, inner, kvcache)


def _check_page(page: int, recurrent: bool) -> None:
    """:raises Unsupported: pages that are stored one by one would be single tokens, and SGLang does not demand it."""
    if page > 1:
        return
    if not recurrent:
        raise Unsupported(
            f"--page-size 1: each token would be an object of its own; set --page-size {PAGE_ADVICE} (at least 16)"
        )
    log.warning("pages_of_one_token", effect="each token is an object of its own, which costs much more to look up")
