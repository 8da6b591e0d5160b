"""vLLM's KV cache as layerflow sees it: groups, planes, and the registered tensors' blocks.

A block is moved whole and as it lies in memory: what its bytes mean is the attention backend's business (the CPU
backend, for one, tiles keys over 32 tokens). So planes are raw bytes, and everything that decides their packing is
part of the fingerprint.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import structlog
import torch

from layerflow.boxes import HeadAxis, PlaneInterior, head_axis
from layerflow.connectors.common.weights import Checkpoint
from layerflow.connectors.vllm.context import ContextParallel, context_of, sizes_of
from layerflow.connectors.vllm.identity.computation import computation_of
from layerflow.connectors.vllm.identity.identity import arithmetic_of, checkpoint_of, quantization_of
from layerflow.connectors.vllm.options import Options
from layerflow.connectors.vllm.reuse import check_attention, kind_of
from layerflow.connectors.vllm.versions import release
from layerflow.errors import ConfigError, Unsupported
from layerflow.kinds import KINDS
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard, default_chunk_tokens

# Layers of a draft model (EAGLE, MTP, a small model): which of vLLM's they are, and what their bytes depend on.
#
# vLLM 0.32 gives them no cache group of their own where their caches look like the model's. To layerflow they are one,
# so that engines with another draft model, or with none, share everything else.


BOUND = "a draft model may spread its KV heads over ranks in another way than the model"
_NAMED = {"draft_model", "mtp"}
_NO_LAYERS = ("ngram", "ngram_gpu", "suffix")
"""Methods that guess without a cache."""

log = structlog.get_logger("layerflow.vllm")


def draft_layers(vllm_config: Any, names: Iterable[str]) -> frozenset[str]:
    """Return a draft model's layers: named so, or numbered behind the model's last, as EAGLE's and most MTPs' are."""
    if getattr(vllm_config, "speculative_config", None) is None:
        return frozenset()
    count = vllm_config.model_config.get_total_num_hidden_layers()

    def is_draft(parts: list[str]) -> bool:
        return not _NAMED.isdisjoint(parts) or next((int(part) for part in parts if part.isdecimal()), 0) >= count

    return frozenset(name for name in names if is_draft(name.split(".")))


def guesses_unseen(vllm_config: Any, drafts: frozenset[str]) -> bool:
    """Is there a draft model of which no layer can be told from the model's?"""
    speculative = getattr(vllm_config, "speculative_config", None)
    return speculative is not None and not drafts and speculative.method not in _NO_LAYERS


def draft_facts(vllm_config: Any, layers: Collection[str]) -> str:
    """What the draft model computes with, its weights and its cache's layout apart."""
    speculative = vllm_config.speculative_config
    model = speculative.draft_model_config
    facts = {"method": speculative.method, "dtype": str(model.dtype), "quantization": quantization_of(model)}
    return json.dumps([facts, sorted(computation_of(vllm_config, model, layers))], sort_keys=True)


def left_out(reason: str) -> None:
    """Say that the draft model's layers are neither stored nor loaded."""
    log.info("draft_layers_left_out", reason=reason)


def draft_name(facts: str, packing: str, group: GroupSpec) -> str:
    """For :attr:`layerflow.spec.Shard.drafts`, before the draft model's weights are known.

    :param facts: of :func:`draft_facts`. :param packing: as of :attr:`layerflow.spec.ModelSpec.attention`.
    """
    cached = [facts, packing, group.kind, group.block_size, len(group.layers), group.window]
    cached += [[plane.name, plane.dtype, plane.shape] for plane in group.planes]
    return hashlib.blake2b(json.dumps(cached).encode(), digest_size=16).hexdigest()


# Which of vLLM's caches can be cut between KV heads, so that engines of other tensor sizes share them.


HEAD_MAJOR = "LBHNC"
"""The name of vLLM's layout in which a block's heads lie one after the other (HND)."""
_LAYOUTS = "vllm.v1.kv_cache_layout"
_LATENT = (*KINDS["mla"].vllm, "SlidingWindowMLASpec")


def wanted_layout(vllm_config: Any) -> str | None:
    """The layout to ask vLLM for; it takes another one, with a warning, where its kernels cannot read this one."""
    model = vllm_config.model_config
    named = importlib.util.find_spec(_LAYOUTS) is not None  # before, a layer was viewed in as many ways as backends
    if not named or model is None or model.use_mla:
        return None
    # A MultiConnector compares names, and takes two for two layouts: vLLM-Ascend's connectors say the older one.
    return "HND" if vllm_config.device_config.device_type == "npu" else HEAD_MAJOR


def group_axis(
    vllm_config: Any,
    kind: str,
    layers: Mapping[str, tuple[Any, Sequence[torch.Tensor]]],
    num_blocks: int,
) -> HeadAxis:
    """What the heads of one group's boxes are.

    :param kind: layerflow's name of the group's kind.
    :param layers: of the group: by name its vLLM spec and its registered tensors.
    """
    size = vllm_config.parallel_config.tensor_parallel_size
    axes = {
        head_axis(
            kind,
            [_interior(layer_spec, part, tensor, num_blocks) for part, tensor in enumerate(tensors)],
            _model_heads(vllm_config.model_config, name),
            size,
        )
        for name, (layer_spec, tensors) in layers.items()
    }
    if len(axes) == 1:
        return axes.pop()
    refusals = sorted(axis.refusal for axis in axes if axis.refusal)
    return HeadAxis(size, refusals[0] if refusals else "its layers have different numbers of KV heads")


def _interior(layer_spec: Any, part: int, tensor: torch.Tensor, num_blocks: int) -> PlaneInterior:
    """vLLM's view of a layer is (blocks, heads, tokens, content), in any physical order."""
    name = f"part{part}" if part else "kv"
    if type(layer_spec).__name__ in _LATENT:
        return PlaneInterior(name, 0, "")
    heads = int(getattr(layer_spec, "num_kv_heads", 1))
    if tensor.dim() != 4 or tensor.shape[:2] != (num_blocks, heads):
        return PlaneInterior(name, heads, "")  # several kernel blocks in one, keys beside values, or no head axis
    strides = tensor.stride()
    order = sorted((axis for axis in (1, 2, 3) if tensor.shape[axis] > 1), key=lambda axis: -strides[axis])
    return PlaneInterior(name, heads, "".join("BHNC"[axis] for axis in order) or "C")


def _head_order(vllm_config: Any, layers: Mapping[str, tuple[Any, Sequence[torch.Tensor]]]) -> str:
    """How the blocks of a group on NPUs are packed where heads are seen outside of tokens; else "".

    The name of vLLM's layout does not tell it there: vLLM-Ascend packs blocks by an environment variable.

    :param layers: as of :func:`group_axis`.
    """
    if vllm_config.device_config.device_type != "npu":
        return ""
    seen = {  # of a kernel's block, where one of vLLM's is several
        _interior(layer_spec, part, tensor, tensor.shape[0]).packing
        for layer_spec, tensors in layers.values()
        for part, tensor in enumerate(tensors)
    }
    return ":" + "+".join(sorted(seen)) if any(order.startswith("H") for order in seen) else ""


def _model_heads(model: Any, name: str) -> int:
    """KV heads of the model in one layer, over all ranks."""
    facts: Any = getattr(model, "model_arch_config", None)
    if hasattr(type(facts), "__getitem__"):  # layers that differ
        layer = next((int(part) for part in name.split(".") if part.isdecimal()), 0)
        return int(facts[layer].total_num_kv_heads)
    return int(model.get_total_num_kv_heads())


# Of DeepSeek-V4's compressor states, those that are read behind a hit.
#
# A compressed row stands for `ratio` tokens. It is computed with the last of them, from the states of the last `window`
# tokens. Hits end at multiples of every ratio, so the first token behind a hit begins a row: that row reads the states
# of `window - ratio` tokens before the hit, and later rows read none of these. Rows of 128 tokens do not overlap, and
# read no state before the hit. Rows of 4 read those of 4 tokens: without these no hit is right, wherever it ends.
#
# vLLM's own prefix cache takes the blocks of states that were not loaded for valid. Its hits end with whole blocks of
# every group, those of compressed rows among them, which are multiples of every ratio too.


_COMPRESSOR_STATES = ("vllm.models.deepseek_v4.compressor", "CompressorStateCache")
"""Module and name of the class whose kernels read as said above; other engines' compressors may keep other states."""
_COMPRESSOR_RATIOS = {(4, 8): 4, (8, 128): 128}
"""By tokens of a state's block and of its window. What is read, `window - ratio` tokens, is whole blocks."""


def _compressor_ratios(vllm_config: Any, cache: Any, drafts: frozenset[str]) -> dict[str, int]:
    """By layer, the ratios of the model's compressor states of which it is known when they are read."""
    context = vllm_config.compilation_config.static_forward_context
    ratios: dict[str, int] = {}
    for name, layer_spec in _named_specs(cache):
        kind = type(context.get(name))
        # A draft model of several modules computes tokens before a hit again: its layers keep their windows.
        if name in drafts or (kind.__module__, kind.__name__) != _COMPRESSOR_STATES:
            continue
        ratio = _COMPRESSOR_RATIOS.get((layer_spec.block_size, layer_spec.sliding_window))
        if ratio is not None and not getattr(layer_spec, "extra_retained_tokens", 0):
            ratios[name] = ratio
    if not ratios:
        reason = "this model has no compressor states of which it is known when they are read"
        log.warning("compressor_states_all", reason=reason, effect="all of its caches are stored")
    return ratios


GroupName = tuple[int, Any]
"""What all pipeline stages call one of layerflow's groups: vLLM's cache group, and its layers' spec."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One worker's cache.

    :param spec: for layerflow; without its content, see :meth:`with_content`.
    :param tensors: for the agent: per layer and plane, uint8, shape ``(num_blocks, entries, bytes)``.
    :param numbers: layer names to layerflow's layer numbers.
    :param vllm_groups: for each of layerflow's groups: the vLLM cache group whose block table it shares.
    :param weights: of the model. :param draft: of its draft model, where some group is that one's.
    """

    spec: ModelSpec
    tensors: dict[int, dict[str, torch.Tensor]]
    numbers: dict[str, int]
    vllm_groups: tuple[int, ...]
    weights: Checkpoint
    draft: Checkpoint | None = None

    def with_content(self, stop: threading.Event | None = None) -> Layout:
        """The same with the digests of the weights in its spec. Reads them where they are not known.

        :param stop: set by another thread, it ends this call.
        :raises ConfigError: they cannot be read.
        """
        shard, content = self.spec.shard, self.weights.content(stop)
        if self.draft is not None:
            drafted = self.draft.content(stop)
            names = tuple(name and _digest(f"{name} {drafted}") for name in shard.drafts)
            shard = msgspec.structs.replace(shard, drafts=names)
        return replace(self, spec=msgspec.structs.replace(self.spec, content=content, shard=shard))

    def named_as(self, other: Layout) -> Layout:
        """The same with the digests that the weights have in another layout of this worker."""
        shard = msgspec.structs.replace(self.spec.shard, drafts=other.spec.shard.drafts)
        return replace(self, spec=msgspec.structs.replace(self.spec, content=other.spec.content, shard=shard))


def layer_specs(cache: Any) -> Iterator[Any]:
    """VLLM's specs of all caches that are loaded and saved.

    :param cache: vLLM's KVCacheConfig.
    """
    for _, layer_spec in _named_specs(cache):
        yield layer_spec


def _named_specs(cache: Any) -> Iterator[tuple[str, Any]]:
    for group in cache.kv_cache_groups:
        if getattr(group, "enable_kv_transfer", True):
            for name in group.layer_names:
                yield name, _layer_spec(group.kv_cache_spec, name)


def layout_of(vllm_config: Any, cache: Any, kv_caches: Mapping[str, Any], options: Options) -> Layout:
    """Translate what vLLM registers.

    :param cache: vLLM's KVCacheConfig.
    :param kv_caches: registered tensors by layer name.
    :raises Unsupported: a cache kind or a memory layout that cannot be moved safely.
    :raises ConfigError: the weights are not files that can be read here, and have no name.
    """
    weights = checkpoint_of(vllm_config.model_config, vllm_config.load_config, options.model_content)
    drafts, draft_weights, unmoved = _drafts(vllm_config, cache)
    ratios = _compressor_ratios(vllm_config, cache, drafts) if options.compressor_states == "read" else {}
    specs = dict(_named_specs(cache))
    unmoved |= {name for name, ratio in ratios.items() if specs[name].sliding_window == ratio}
    drafted = draft_facts(vllm_config, drafts) if draft_weights is not None else ""
    stages = _stages(vllm_config.parallel_config.pipeline_parallel_size, cache, unmoved)
    context = _context(vllm_config, cache, unmoved)
    shard = _shard(vllm_config.parallel_config, context)
    places: dict[tuple[int, Any, tuple[int, ...], bool, int], list[str]] = {}
    planes: dict[str, tuple[torch.Tensor, ...]] = {}
    for index, group in enumerate(cache.kv_cache_groups):
        if not getattr(group, "enable_kv_transfer", True):
            continue
        for name in group.layer_names:
            if name in unmoved:
                continue
            layer_spec = _layer_spec(group.kv_cache_spec, name)
            if vllm_config.device_config.device_type == "npu":
                check_attention(name, vllm_config.compilation_config.static_forward_context.get(name))
            planes[name] = _planes(name, layer_spec, kv_caches[name], cache.num_blocks)
            widths = tuple(plane.shape[2] for plane in planes[name])
            window = layer_spec.sliding_window - ratios.get(name, 0) if KINDS[kind_of(layer_spec)].windowed else 0
            places.setdefault((index, layer_spec, widths, name in drafts, window), []).append(name)
        _check_apart({name: planes[name] for name in group.layer_names if name in planes})
    in_order = sorted(planes, key=lambda name: (name in drafts, _forward_order(name)))
    numbers = {name: number for number, name in enumerate(in_order)}
    groups: list[GroupSpec] = []
    axes: list[HeadAxis] = []
    vllm_groups: list[int] = []
    draft_names: list[str] = []
    orders: list[str] = []
    named = _common_groups(stages, [place[:2] for place in places])
    # All stages number their groups in one order, whichever of its layers each meets first; a draft model's are last.
    for (index, layer_spec, widths, draft, window), names in sorted(
        places.items(), key=lambda place: (place[0][3], named.index(place[0][:2]))
    ):
        kind = kind_of(layer_spec)
        layers = tuple(sorted(numbers[name] for name in names))
        own = tuple(Plane(f"part{part}" if part else "kv", "uint8", (width,)) for part, width in enumerate(widths))
        parts = context.parts(layer_spec)
        size, ratio = context.block_tokens(layer_spec), _ratio(layer_spec) * parts
        groups.append(GroupSpec(kind, size, layers, own, window, ratio=ratio))
        vllm_groups.append(index)
        registered = {name: (layer_spec, _parts(kv_caches[name])) for name in names}
        order = _head_order(vllm_config, registered)
        packing = _packing(vllm_config, cache, {name: planes[name] for name in names}) + order
        draft_names.append(draft_name(drafted, packing, groups[-1]) if draft else "")
        if draft or guesses_unseen(vllm_config, drafts):
            axis = HeadAxis(shard.tp_size, BOUND)
        else:
            axis = group_axis(vllm_config, kind, registered, cache.num_blocks)
        axes.append(axis if axis.refusal else HeadAxis(axis.heads * parts))
        orders.append(order if axis.refusal and not draft else "")  # of others the heads tell it
    spec = ModelSpec(
        name=str(vllm_config.model_config.served_model_name or vllm_config.model_config.model),
        content="",
        groups=tuple(groups),
        shard=_boxed(shard, axes, _layers(groups, named, stages), tuple(draft_names) if any(draft_names) else ()),
        attention=_packing(vllm_config, cache, {name: each for name, each in planes.items() if name not in drafts})
        + context.packing
        + "".join(orders),
        quantization=_arithmetic(vllm_config, [name for name in planes if name not in drafts]),
        chunk_tokens=default_chunk_tokens(
            [group for group, draft in zip(groups, draft_names, strict=True) if not draft], options.chunk_tokens
        ),
    )
    if spec.alignment % math.lcm(*ratios.values()):
        raise Unsupported(
            f"hits of this model end at multiples of {spec.alignment} tokens, inside of rows whose compressor states "
            'are not stored; leave out compressor_states = "read"'
        )
    tensors = {
        numbers[name]: {f"part{part}" if part else "kv": plane for part, plane in enumerate(parts)}
        for name, parts in planes.items()
    }
    return Layout(spec, tensors, numbers, tuple(vllm_groups), weights, draft_weights)


def model_layer(name: str) -> int:
    """The number of the model's layer that a cache belongs to: the first one in its name."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), 0)


def _ratio(layer_spec: Any) -> int:
    """Tokens of one row: vLLM's ``tokens_per_state`` (``compress_ratio`` before 0.32; -1 = recurrent state)."""
    tokens = getattr(layer_spec, "tokens_per_state", None) or getattr(layer_spec, "compress_ratio", None) or 1
    if tokens != int(tokens):
        raise Unsupported(
            f"this model stores several rows per token ({tokens} tokens a row), which layerflow cannot move yet; "
            "run it without the connector"
        )
    return max(1, int(tokens))


def _shard(parallel: Any, context: ContextParallel) -> Shard:
    """The worker among those of the model; where a block's tokens are spread over ranks, in the order of the parts."""
    ranks, pp_size = context.ranks, parallel.pipeline_parallel_size
    return Shard(context.place(parallel.rank), ranks, parallel.rank // ranks % pp_size, pp_size)


def _context(vllm_config: Any, cache: Any, unmoved: frozenset[str]) -> ContextParallel:
    """How the engine spreads its tokens over ranks."""
    sizes = sizes_of(vllm_config.parallel_config)
    if not sizes.active:
        return sizes
    import vllm  # noqa: PLC0415 - this file is used without vLLM too

    layers = {
        name: (layer_spec, _model_heads(vllm_config.model_config, name))
        for name, layer_spec in _named_specs(cache)
        if name not in unmoved
    }
    return context_of(sizes, layers, vllm.__version__)


def _arithmetic(vllm_config: Any, layers: Sequence[str]) -> str:
    """Return the arithmetic of all pipeline stages: each sees its own layers only."""
    import vllm  # noqa: PLC0415 - this file is used without vLLM too

    stages = vllm_config.parallel_config.pipeline_parallel_size
    told = _of_stages(stages, computation_of(vllm_config, vllm_config.model_config, layers))
    engine = ".".join(str(part) for part in release(vllm.__version__))
    return arithmetic_of(vllm_config, engine, frozenset[str]().union(*told))


def _is_movable(draft_spec: Any) -> bool:
    try:
        return not KINDS[kind_of(draft_spec)].exact
    except Unsupported:
        return False


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _drafts(vllm_config: Any, cache: Any) -> tuple[frozenset[str], Checkpoint | None, frozenset[str]]:
    """A draft model's layers, its weights, and those of its layers that are neither stored nor loaded."""
    specs, parallel = dict(_named_specs(cache)), vllm_config.parallel_config
    drafts = draft_layers(vllm_config, specs)
    if not drafts:
        return drafts, None, drafts
    sizes = {layer_spec.block_size for name, layer_spec in specs.items() if name not in drafts}
    unlike = {name for name in drafts if not _is_movable(specs[name]) or specs[name].block_size not in sizes}
    if sizes_of(parallel).active:
        left_out("a draft model may spread its tokens over ranks in another way than the model")
    elif parallel.pipeline_parallel_size > 1:
        left_out("they are on one pipeline stage, and the others have none")
    elif unlike:
        left_out(f"the cache of {min(unlike)} is not divided into blocks as the model's")
    else:
        try:
            # Its hf_overrides are vLLM's own, and the same wherever this method runs.
            model = vllm_config.speculative_config.draft_model_config
            return drafts, checkpoint_of(model, vllm_config.load_config), frozenset()
        except ConfigError as error:
            left_out(str(error))
    return drafts, None, drafts


def _stages(count: int, cache: Any, unmoved: frozenset[str]) -> list[dict[GroupName, int]]:
    """How many layers each pipeline stage has of each group. All stages ask each other, so none may fail before."""
    own: dict[GroupName, int] = Counter(
        (index, _layer_spec(group.kv_cache_spec, name))
        for index, group in enumerate(cache.kv_cache_groups)
        if getattr(group, "enable_kv_transfer", True)
        for name in group.layer_names
        if name not in unmoved
    )
    return _of_stages(count, own)


def _of_stages(count: int, own: Any) -> list[Any]:
    """What each pipeline stage tells the others, in their order."""
    if count == 1:
        return [own]
    from vllm.distributed.parallel_state import get_pp_group  # noqa: PLC0415 - this file is used without vLLM too

    told: list[Any] = [None] * count
    torch.distributed.all_gather_object(told, own, group=get_pp_group().cpu_group)
    return told


def _common_groups(stages: Sequence[Mapping[GroupName, int]], own: Sequence[GroupName]) -> list[GroupName]:
    """The groups of all stages in the first one's order.

    :param own: of this stage, after its tensors were seen.
    """
    if len(stages) == 1:
        return list(own)
    for number, stage in enumerate(stages):
        if missing := sorted({index for index, _ in set(stages[0]) ^ set(stage)}):
            raise Unsupported(
                f"pipeline stages 0 and {number} do not both have layers of vLLM's cache groups {missing}, which is "
                "not supported; choose another pipeline size, or stages that do with VLLM_PP_LAYER_PARTITION"
            )
    if len(own) != len(stages[0]):
        raise Unsupported("layers of one cache group have tensors of several shapes; pipeline stages cannot share them")
    return list(stages[0])


def _layers(
    groups: Sequence[GroupSpec], named: Sequence[GroupName], stages: Sequence[Mapping[GroupName, int]]
) -> tuple[tuple[int, ...], ...]:
    """Return by group how many of its layers each pipeline stage has."""
    if len(stages) == 1:
        return tuple((len(group.layers),) for group in groups)
    return tuple(tuple(stage[name] for stage in stages) for name in named)


def _boxed(
    shard: Shard, axes: Sequence[HeadAxis], stages: tuple[tuple[int, ...], ...], drafts: tuple[str, ...]
) -> Shard:
    """The shard with the heads and layers that other sizes know it by, as far as its caches can be cut.

    :param stages: of each group, its layers on each pipeline stage. :param drafts: of each, whose layers it has.
    """
    shard = msgspec.structs.replace(shard, drafts=drafts)
    for number, axis in enumerate(axes):
        if axis.refusal:
            log.info("bound_to_tensor_size", group=number, tp_size=shard.tp_size, reason=axis.refusal)
    heads = tuple(0 if axis.refusal else axis.heads for axis in axes)
    if not any(heads) and shard.pp_size == 1:
        return shard
    return msgspec.structs.replace(shard, heads=heads if any(heads) else (), stages=stages)


def _layer_spec(group_spec: Any, name: str) -> Any:
    per_layer = getattr(group_spec, "kv_cache_specs", None)  # layers of one block table, but of several shapes
    return group_spec if per_layer is None else per_layer[name]


def _forward_order(name: str) -> tuple[int, str]:
    """Layers as the forward pass meets them."""
    return model_layer(name), name


def _planes(name: str, layer_spec: Any, registered: Any, num_blocks: int) -> tuple[torch.Tensor, ...]:
    """The layer's blocks as uint8 tensors of shape ``(num_blocks, entries, bytes)``, sharing memory."""
    entries = KINDS[kind_of(layer_spec)](layer_spec.block_size, ratio=_ratio(layer_spec)).entries
    views: list[torch.Tensor] = []
    for tensor in _parts(registered):
        if tensor.shape[0] % num_blocks and tensor.dim() > 1 and tensor.shape[1] % num_blocks == 0:
            views += [_blocks(name, half, num_blocks, entries) for half in tensor]  # keys and values apart
        else:
            views.append(_blocks(name, tensor, num_blocks, entries))
    return tuple(views)


def _parts(registered: Any) -> list[torch.Tensor]:
    return list(registered) if isinstance(registered, list | tuple) else [registered]


def _blocks(name: str, tensor: torch.Tensor, num_blocks: int, entries: int) -> torch.Tensor:
    """Raw bytes of each block; a block that kernels see as several smaller ones is one again."""
    ratio, rest = divmod(tensor.shape[0], num_blocks)
    if rest or not ratio:
        raise Unsupported(f"layer {name}: a cache of shape {tuple(tensor.shape)} has no axis of {num_blocks} blocks")
    item = tensor.element_size()
    stride, inner = tensor.stride(0) * item, _dense_bytes(tensor[0])
    if inner is None or (ratio > 1 and stride != inner) or (inner * ratio) % entries:
        raise Unsupported(
            f"layer {name}: a block of its cache (shape {tuple(tensor.shape)}, strides {tensor.stride()}) is not one "
            "piece of memory; choose another attention backend or KV cache layout"
        )
    storage = tensor.untyped_storage()
    offset = tensor.data_ptr() - storage.data_ptr()
    width = inner * ratio // entries
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, offset, (num_blocks, entries, width), (stride * ratio, width, 1))


def _check_apart(planes: Mapping[str, Sequence[torch.Tensor]]) -> None:
    """Layers of one block table use the same blocks at the same time, so each needs memory of its own.

    Those of different groups may lie in one tensor: vLLM gives a block to one group at a time.

    :param planes: of one cache group, by layer.
    :raises Unsupported: a block of one layer lies where a block of another one does.
    """
    for near in _interleaved(planes):
        count = near[0][1].shape[0]
        starts = np.concatenate([np.arange(count) * plane.stride(0) + plane.data_ptr() for _, plane in near])
        ends = starts + np.repeat([plane[0].numel() for _, plane in near], count)
        order = np.argsort(starts, kind="stable")
        shared = np.flatnonzero(ends[order][:-1] > starts[order][1:])
        if shared.size:
            first, second = (near[order[shared[0] + place] // count][0] for place in (0, 1))
            raise Unsupported(
                f"layers {first} and {second} use the same blocks and share memory, so that loading one overwrites the "
                "other; turn off what has layers take turns in one buffer (layer-wise reuse of buffers in another "
                "connector), or run without this connector"
            )


def _interleaved(planes: Mapping[str, Sequence[torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Planes, by their layers' names, that lie within each other's address ranges: packed layouts, mostly none."""
    near: list[tuple[str, torch.Tensor]] = []
    end = 0
    named = [(name, plane) for name, parts in planes.items() for plane in parts if plane.numel()]
    for name, plane in sorted(named, key=lambda each: each[1].data_ptr()):
        if plane.data_ptr() >= end:
            if len(near) > 1:
                yield near
            near = []
        near.append((name, plane))
        end = max(end, plane.data_ptr() + (plane.shape[0] - 1) * plane.stride(0) + plane[0].numel())
    if len(near) > 1:
        yield near


def _dense_bytes(block: torch.Tensor) -> int | None:
    """Bytes of a tensor without holes, whatever the order of its axes; None with holes."""
    expected = 1
    for stride, size in sorted(zip(block.stride(), block.shape, strict=True)):
        if size > 1 and stride != expected:
            return None
        expected *= size
    return block.numel() * block.element_size()


def _packing(vllm_config: Any, cache: Any, planes: Mapping[str, Sequence[torch.Tensor]]) -> str:
    """How the engine packs a block: its attention backends, their instruction set, the cache's layout."""
    layers = vllm_config.compilation_config.static_forward_context
    backends = set()
    for name in planes:
        layer = layers.get(name)
        backend = getattr(layer, "attn_backend", None)
        label = backend.get_name() if backend is not None else type(layer).__name__
        backends.add(f"{label}/{getattr(layer, 'isa', '') or _cpu_isa(vllm_config, layer)}")
    return f"vllm:{'+'.join(sorted(backends))}:{getattr(cache, 'kv_cache_layout', None) or ''}"


def _cpu_isa(vllm_config: Any, layer: Any) -> str:
    """The CPU backend tiles a block by what the processor can do."""
    if vllm_config.device_config.device_type != "cpu":
        return ""
    amx = "amx" if torch.cpu._is_amx_tile_supported() else "plain"
    return f"{amx}:head{getattr(layer, 'head_size', 0)}"
