"""Hooks on SGLang, by its own registry: no file of it is changed.

:func:`register` is layerflow's plug-in (entry point ``sglang.srt.plugins``), which SGLang calls in each process: it
makes the transfer backend ``layerflow`` a choice. Everything else is hooked where it is used, in the process that uses
it: by the linker, and by the backend's manager.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from http import HTTPStatus
from typing import Any, Protocol

import structlog

from layerflow.connectors.common.guard import attempt
from layerflow.connectors.sglang.pd.attempts import tell_attempt

MOST_REASON = 300
"""Characters of a reason that a client is told."""

log = structlog.get_logger("layerflow.sglang")


def register() -> None:
    """Make the backend known. SGLang applies hooks after all plug-ins have run."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - nothing else needs SGLang

    _name_backend()
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", backend_class, HookType.AROUND)


def hook_linker() -> None:
    """A load that has failed ends its own request only, and its client is told why."""
    _hook(
        around=(("mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper.finish_loads", finish_loads),),
        after=(("mem_cache.unified_radix_cache.UnifiedRadixCache.finish_external_linker_loads", tell_reasons),),
    )


def hook_events() -> None:
    """Show the linker's events the prompts that are saved and hit, of which the linker is told page hashes only."""
    _hook(
        before=(
            ("mem_cache.unified_radix_cache.UnifiedRadixCache.insert", prompt_inserted),
            ("mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper.load_back", hit_loaded),
        ),
    )


def hook_backend() -> None:
    """Tell the backend's manager of the pools, of prompts, batches and layers, and of flushes.

    Of batches it hears once it watches them.
    """
    _hook(
        before=(
            ("disaggregation.prefill.PrefillBootstrapQueue.create_sender", attach_manager),
            ("disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue", attach_manager),
        ),
        around=(
            (
                "disaggregation.prefill.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk",
                cached_prefix,
            ),
        ),
        after=(
            ("disaggregation.prefill.PrefillBootstrapQueue.create_sender", sender_made),
            ("disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue", receiver_made),
            ("managers.schedule_batch.Req.build_rebootstrap_payload", tell_attempt),
            ("managers.scheduler.Scheduler.flush_cache", cache_emptied),
        ),
    )
    hook_batches()
    hook_weights()


def hook_weights() -> None:
    """Tell caches that SGLang is about to replace the weights, or to let go of memory, and when it has that back."""
    updater = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    _hook(
        before=(
            *((f"{updater}.{name}", weights_change) for name in WEIGHTS_CHANGE),
            (f"{updater}.release_memory_occupation", memory_goes),
        ),
        after=((f"{updater}.resume_memory_occupation", memory_returns),),
    )


def hook_batches() -> None:
    """Tell whoever watches batches of their begin, their layers and their end, and of pages that SGLang frees."""
    _hook(
        before=(
            ("managers.scheduler.Scheduler.run_batch", batch_begins),
            ("mem_cache.allocator.paged.PagedTokenToKVPoolAllocator._release_page_ids", pages_freed),
            ("mem_cache.allocator.token.TokenToKVPoolAllocator.free", pages_freed),
        ),
        after=(
            ("managers.scheduler.Scheduler.run_batch", batch_ends),
            ("layers.radix_attention.RadixAttention.forward", layer_done),
            ("layers.radix_linear_attention.RadixLinearAttention.forward", layer_done),
        ),
    )


Hooks = Sequence[tuple[str, Callable[..., Any]]]


def _hook(*, before: Hooks = (), around: Hooks = (), after: Hooks = ()) -> None:
    """Apply hooks now, each once in a process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - nothing else needs SGLang

    for kind, hooks in ((HookType.BEFORE, before), (HookType.AROUND, around), (HookType.AFTER, after)):
        for target, hook in hooks:
            if (target, kind.name) in _hooked:
                continue
            _hooked.add((target, kind.name))
            name = f"sglang.srt.{target}"
            if name in HookRegistry._patched:  # by another plug-in: apply_hooks() passes over it
                HookRegistry._apply_target(name, [(kind, hook, None)])
            else:
                HookRegistry.register(name, hook, kind)
    HookRegistry.apply_hooks()


_hooked: set[tuple[str, str]] = set()


def finish_loads(original: Callable[..., list[str]], wrapper: Any, *args: Any, **kwargs: Any) -> list[str]:
    """The requests of the batch that just ran whose loads have failed on some rank, the same on every rank.

    SGLang's own answers with all requests of the batch that load. Ranks compare one number per request here, and
    SGLang's ``inflight_load_rids`` are the same on each.
    """
    linker = wrapper.cache_linker
    if not hasattr(linker, "failed_loads"):
        return original(wrapper, *args, **kwargs)
    import torch  # noqa: PLC0415 - SGLang's frontend has no use for it here

    requests, wrapper.inflight_load_rids = wrapper.inflight_load_rids, []
    if not requests:
        return []
    index, wrapper.inflight_load_index = wrapper.inflight_load_index, -1
    failed = linker.failed_loads(index, requests)
    landed = torch.tensor([request not in failed for request in requests], dtype=torch.int)
    wrapper.cache._all_reduce_attn_groups(landed, torch.distributed.ReduceOp.MIN)
    for request in requests:
        wrapper.private_load_indices.pop(request, None)
    return [request for request, is_there in zip(requests, landed.tolist(), strict=True) if not is_there]


def tell_reasons(failed: list[Any], cache: Any, *args: Any, **kwargs: Any) -> None:
    """Put the reason into what the clients of these requests are told."""
    reasons = getattr(getattr(cache.linker, "cache_linker", None), "failures", None)
    if not failed or reasons is None:
        return
    from sglang.srt.managers.schedule_batch import FINISH_ABORT  # noqa: PLC0415 - there is one, where this is called

    for request in failed:
        reason = reasons().get(request.rid, "it failed on another rank")
        text = f"External KV cache load failed: {reason}"[:MOST_REASON]
        request.discard_output_reason = FINISH_ABORT(text, HTTPStatus.SERVICE_UNAVAILABLE)


def prompt_inserted(cache: Any, params: Any, *args: Any, **kwargs: Any) -> None:
    """A prompt is about to be inserted into the tree, which saves the nodes that are not stored."""
    if (events := _events_of(cache.linker)) is not None:
        attempt(lambda: events.inserting(params.key), "insert")


def hit_loaded(wrapper: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """A request is about to load what was found for it."""
    if (events := _events_of(wrapper)) is not None:
        attempt(lambda: events.found(request, wrapper.hit_markers.get(request.rid)), "load_back")


def _events_of(wrapper: Any) -> Any:
    """Of a wrapper's linker; None = it has none, or tells no router."""
    return getattr(getattr(wrapper, "cache_linker", None), "events", None)


# The transfer backend.

BACKEND = "layerflow"
_managers: list[Any] = []  #: this process's manager


def _name_backend() -> None:
    """Make ``--disaggregation-transfer-backend layerflow`` a choice, and a member of SGLang's enum."""
    from sglang.srt.arg_groups import choices  # noqa: PLC0415 - nothing else needs SGLang
    from sglang.srt.disaggregation.utils import TransferBackend  # noqa: PLC0415

    if BACKEND in TransferBackend._value2member_map_:
        return
    choices.add_disagg_transfer_backend_choices([BACKEND])
    member = object.__new__(TransferBackend)
    member._name_, member._value_ = BACKEND.upper(), BACKEND
    TransferBackend._value2member_map_[BACKEND] = member
    TransferBackend._member_map_[member._name_] = member


def backend_class(original: Callable[..., Any], backend: Any, kind: Any) -> Any:
    """The classes of the backend; of others SGLang's."""
    if getattr(backend, "value", backend) != BACKEND or kind.name == "KVARGS":
        return original(backend, kind)
    from layerflow.connectors.sglang.pd import backend as classes  # noqa: PLC0415 - only where it is chosen

    if kind.name == "MANAGER":
        hook_backend()
    return {
        "MANAGER": classes.LayerflowManager,
        "SENDER": classes.LayerflowSender,
        "RECEIVER": classes.LayerflowReceiver,
        "BOOTSTRAP_SERVER": classes.LayerflowBootstrapServer,
    }[kind.name]


def attach_manager(queue: Any, *args: Any, **kwargs: Any) -> None:
    """Before the first prompt: the manager gets the pools, which its constructor is not given."""
    manager = queue.kv_manager
    if manager not in _managers:
        manager.attach(queue)
        _managers[:] = [manager]
        keep_cache(manager)
        if manager.prefill is not None:
            watch_batches(manager)


def sender_made(made: bool, queue: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """A prefill engine has a sender for a request, if the request fits."""
    _prepare(request.disagg_kv_sender if made else None, request)


def receiver_made(made: Any, queue: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """A decode engine has a receiver for a request."""
    _prepare(made.kv_receiver, request)


def _prepare(end: Any, request: Any) -> None:
    """Show a request to its sender or receiver, where that is the backend's own: health checks have SGLang's fakes."""
    if hasattr(end, "prepare"):
        end.prepare(request)


def cache_emptied(succeeded: bool, *args: Any, **kwargs: Any) -> None:
    """SGLang has emptied its cache, or could not."""
    for manager in _managers:
        if succeeded:
            manager.emptied()


def cached_prefix(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What prefill has cached of a prompt is saved with its first batch: SGLang need not send it ahead of that."""
    return None if any(manager.prefill is not None for manager in _managers) else original(*args, **kwargs)


# Weights and memory, for each cache of this process.

WEIGHTS_CHANGE = (
    "update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor",
    "update_weights_from_ipc", "begin_weight_update",
)  # fmt: skip

WEIGHTS = "weights"
"""SGLang's tag of the memory of the weights. A request without tags is about all memory."""


class CacheKeeper(Protocol):
    """Hears of what happens to this process's weights and pools, on its scheduler's thread."""

    def weights_change(self) -> None:
        """SGLang is about to write to the weights. A batch may still be computing with them."""
        ...

    def memory_goes(self, *, weights: bool) -> None:
        """SGLang is about to let go of memory: nothing reads or writes its pools any more when this returns.

        :param weights: that of the weights goes too, which is not to be read until :meth:`weights_return`.
        """
        ...

    def weights_return(self) -> None:
        """The weights' memory is there again, and may hold anything."""
        ...


_keepers: list[CacheKeeper] = []


def keep_cache(keeper: CacheKeeper) -> None:
    """From here on this one hears of weights and memory; see :func:`hook_weights`."""
    _keepers.append(keeper)


def forget_cache(keeper: CacheKeeper) -> None:
    """This one hears of nothing any more."""
    if keeper in _keepers:
        _keepers.remove(keeper)


def weights_change(*args: Any, **kwargs: Any) -> None:
    """Weights are about to be written to."""
    for keeper in _keepers:
        keeper.weights_change()


def memory_goes(updater: Any, request: Any) -> None:
    """Memory is about to be let go of."""
    for keeper in _keepers:
        keeper.memory_goes(weights=_unmaps_weights(updater, request))


def memory_returns(result: Any, updater: Any, request: Any) -> None:
    """Memory is there again."""
    for keeper in _keepers:
        if _unmaps_weights(updater, request):
            keeper.weights_return()


def _unmaps_weights(updater: Any, request: Any) -> bool:
    """Is this about the weights' memory, and does SGLang unmap that?

    Without ``--enable-memory-saver`` its saver does nothing, and says so: the weights stay where they are.
    """
    saver = getattr(updater, "memory_saver_adapter", None)
    return (not request.tags or WEIGHTS in request.tags) and bool(getattr(saver, "enabled", True))


# Batches, for the transfer backend of a prefill engine, or for the linker of an ordinary one.


class BatchWatcher(Protocol):
    """Hears of this process's batches, on its scheduler's thread."""

    def begin_batch(self, batch: Any, loading: Collection[str]) -> None:
        """A batch that computes prompts is about to run.

        :param loading: ids of its requests that a cache linker loads some of.
        """
        ...

    def layer_done(self, layer: Any) -> None:
        """A layer's new keys and values, or its state, are written.

        :param layer: SGLang's module: a draft model numbers its layers as the model does.
        """
        ...

    def end_batch(self, batch: Any) -> None:
        """A batch, of whatever kind, has run, or has been given to the device."""
        ...

    def pages_freed(self, allocator: Any, pages: Sequence[Any]) -> None:
        """Pages are about to be given to other requests.

        :param pages: tensors of page numbers, on the device.
        """
        ...


_watching: list[BatchWatcher] = []  #: one at most


def watch_batches(watcher: BatchWatcher) -> None:
    """From here on this one hears of batches; see :func:`hook_batches`."""
    _watching[:] = [watcher]


def unwatch_batches(watcher: BatchWatcher) -> None:
    """This one hears of none any more."""
    if watcher in _watching:
        _watching.remove(watcher)


def batch_begins(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """A batch is about to run."""
    for watcher in _watching:
        if batch.forward_mode.is_extend():
            linker = getattr(scheduler.tree_cache, "linker", None)
            watcher.begin_batch(batch, getattr(linker, "inflight_load_rids", ()))


def batch_ends(result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """It has run, or has been given to the device."""
    for watcher in _watching:
        watcher.end_batch(batch)


def pages_freed(allocator: Any, *pages: Any) -> None:
    """Pages are about to be given to other requests."""
    for watcher in _watching:
        watcher.pages_freed(allocator, pages)


def layer_done(result: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    """A layer's new keys and values, or its state, are written."""
    for watcher in _watching:
        watcher.layer_done(layer)
