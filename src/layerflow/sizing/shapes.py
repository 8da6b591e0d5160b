"""What a model caches, from its ``config.json`` alone: the groups that an engine would register, without an engine.

Sizes follow vLLM 0.32 (``v1/kv_cache_interface.py``, ``model_executor/layers/mamba/mamba_utils.py``,
``models/deepseek_v4``); ``tests/vllm/test_sizing.py`` holds them against vLLM's own specs. A ``model_type`` that is not
listed, or a field that decides the cache and is missing, is refused: two models with the same fields may cache
different things.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layerflow.boxes.shard import Shard
from layerflow.errors import ConfigError, shown
from layerflow.kinds import KINDS
from layerflow.spec import DTYPE_BYTES, GroupSpec, ModelSpec, Plane, default_chunk_tokens

DEFAULT_BLOCK_TOKENS = 16
"""vLLM's on CUDA; vLLM-Ascend's is 128."""

MOST = 1_000_000
"""Heads, elements or tokens that one field may say: a model has fewer."""

MOST_LAYERS = 10_000

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where models that see or hear keep their language model's fields."""


@dataclass(frozen=True, slots=True)
class Cache:
    """One cache of some layers, before it is spread over ranks.

    :param kind: a name of :data:`layerflow.kinds.KINDS`.
    :param layers: the model's layers that have it, ascending.
    :param planes: by name: dtype and, of one token (or one state), heads and elements of a head; 0 heads = the plane
        has no head axis and every rank holds it whole.
    :param block_tokens: 0 = as the engine is told; of recurrent state: as its attention layers.
    """

    kind: str
    layers: tuple[int, ...]
    planes: Mapping[str, tuple[str, int, int]]
    window: int = 0
    ratio: int = 1
    block_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's caches, and what computing its attention takes.

    :param layers: of the model, cached or not.
    :param pair_flops: floating-point operations of one query-key pair, summed over the layers whose queries see all
        earlier tokens. Windows, top-k selection and recurrent state are left out: they do not grow with the context.
    :param notes: sentences: where the engine takes other dtypes than the file's own, and what of compressor states is
        stored.
    """

    model_type: str
    layers: int
    caches: tuple[Cache, ...]
    pair_flops: float
    notes: tuple[str, ...] = ()

    @property
    def compressor_states(self) -> bool:
        """Whether there are any, as DeepSeek-V4 has."""
        return any(cache.ratio > 1 for cache in self.caches)


class Fields:
    """The fields of a ``config.json`` that were asked for, and those that were not there.

    :param given: what the file says. :param assumed: what transformers' class of this type has where a file is silent.
    """

    def __init__(self, given: Mapping[str, Any], assumed: Mapping[str, Any]) -> None:
        self._given, self._assumed = given, assumed
        self.missing: list[str] = []

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field; `default` where it is absent or null."""
        value = self._given.get(name)
        value = self._assumed.get(name) if value is None else value
        return default if value is None else value

    def silent_on(self, name: str) -> bool:
        """Say whether the file has no such field, not even null."""
        return name not in self._given

    def number(self, *names: str, least: int = 1, most: int = MOST) -> int:
        """Return the first of these fields that is there; none is noted as missing, and `least` is returned.

        :raises ConfigError: it is no whole number from `least` to `most`.
        """
        for name in names:
            value = self.optional_number(name, least=least, most=most)
            if value is not None:
                return value
        self.missing.append(" or ".join(names))
        return least

    def optional_number(self, name: str, *, least: int = 1, most: int = MOST) -> int | None:
        """Return the field; None where it is absent or null.

        :raises ConfigError: as of :meth:`number`.
        """
        value = self.get(name)
        return None if value is None else _whole(name, value, least, most)

    def numbers(self, name: str, *, least: int) -> list[int]:
        """Return a list of whole numbers; none is noted as missing, and an empty one is returned.

        :raises ConfigError: it is something else.
        """
        value = self.get(name)
        if value is None or value == []:
            self.missing.append(name)
            return []
        if not isinstance(value, list) or len(value) > MOST_LAYERS:
            raise ConfigError(f"config.json: {name} should be a list of at most {MOST_LAYERS:,} numbers")
        return [_whole(name, each, least, MOST) for each in value]

    def letters(self, name: str) -> str:
        """Return a text of one letter for each layer; none is noted as missing, and an empty one is returned.

        :raises ConfigError: it is something else.
        """
        value = self.get(name)
        if value is None or value == "":
            self.missing.append(name)
            return ""
        if not isinstance(value, str) or len(value) > MOST_LAYERS:
            raise ConfigError(f"config.json: {name} should be a text of at most {MOST_LAYERS:,} letters")
        return value


def _whole(name: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"config.json: {name} = {shown(value)}: should be a whole number, {least:,} to {most:,}")
    return value


def read_config(path: Path) -> dict[str, Any]:
    """Return a model's configuration.

    :param path: a folder with a ``config.json``, or such a file.
    :raises ConfigError: there is none, or it is no JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}; give a model's folder with its config.json, or that file"
        ) from None
    except (ValueError, RecursionError) as error:  # thousands of nested lists
        raise ConfigError(f"{file}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: a model's configuration is a JSON object")
    return found


_STORED = {
    "all": 'All compressor states are stored, as the connector does unless its compressor_states is "read"; '
    "--compressor-states read plans for that.",
    "read": 'Of compressor states those are stored that a hit reads: set compressor_states to "read" in the '
    "connector's kv_connector_extra_config.",
}
"""What of compressor states is stored, by the connector's setting."""


def shape_of(
    config: Mapping[str, Any],
    kv_dtype: str = "auto",
    like: str = "",
    *,
    state_dtype: str = "auto",
    dtype: str = "auto",
    compressor_states: str = "all",
) -> Shape:
    """Return what a model caches.

    :param config: of ``config.json``.
    :param kv_dtype: vLLM's ``--kv-cache-dtype``: ``"auto"``, ``"fp8"``, or a dtype of layerflow's.
    :param like: take the model for one of this ``model_type``.
    :param state_dtype: vLLM's ``--mamba-ssm-cache-dtype``: of recurrent matrices.
    :param dtype: vLLM's ``--dtype``: what the model computes in.
    :param compressor_states: the connector's setting: ``"all"``, or ``"read"``.
    :raises ConfigError: the model is not known, or fields that decide its cache are missing: a sentence says which.
    """
    if compressor_states not in _STORED:
        raise ConfigError(f"--compressor-states {compressor_states}: should be all or read")
    text = next((dict(config[name]) for name in _NESTED if isinstance(config.get(name), dict)), dict(config))
    given = {**{key: config[key] for key in ("torch_dtype", "dtype") if key in config}, **text}
    named = like or str(text.get("model_type") or config.get("model_type") or "")
    read = _READERS.get(named)
    if read is None:
        raise ConfigError(_unknown(named, given, like))
    fields = Fields(given, _ASSUMED.get(named, {}))
    if named == "nemotron_h":
        layers = len(fields.letters("hybrid_override_pattern"))
    else:
        layers = fields.number(_LAYERS, most=MOST_LAYERS)
    notes: list[str] = []
    if kv_dtype == "auto":
        kv_dtype = _checkpoints_kv_dtype(config, notes, latent=read is _latent)
    dtypes = _dtypes(fields, kv_dtype, state_dtype, dtype, notes)
    reader = _Reader(named, fields, layers, dtypes, kv_dtype, all_states=compressor_states == "all")
    caches, pair_flops = read(reader)
    if fields.missing:
        raise ConfigError(
            f"config.json of model_type {named!r} does not say {', '.join(dict.fromkeys(fields.missing))}: without "
            "that the size of its cache is not known"
        )
    shape = Shape(named, layers, tuple(cache for cache in caches if cache.layers), pair_flops)
    if shape.compressor_states:
        notes.append(_STORED[compressor_states])
    return replace(shape, notes=tuple(notes))


def model_of(
    shape: Shape,
    *,
    tp: int = 1,
    pp: int = 1,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    chunk_tokens: int = 0,
    pp_rank: int = 0,
) -> ModelSpec:
    """Return what the first tensor rank of a stage registers, as an engine's connector tells it to the server.

    :param block_tokens: vLLM's ``--block-size``.
    :param chunk_tokens: 0 = as the connector chooses it.
    :raises ConfigError: heads or layers cannot be spread over so many ranks.
    """
    caches = _blocks(shape, tp, block_tokens)
    stages = _stages(shape.layers, pp)
    held = [_held(cache, stages) for cache in caches]
    groups, heads, number = [], [], 0
    for cache, layers in zip(caches, held, strict=True):
        numbers = tuple(range(number, number + layers[pp_rank]))
        number += layers[pp_rank]
        planes = tuple(
            Plane(name, dtype, (_share(name, count, tp), width)) for name, (dtype, count, width) in cache.planes.items()
        )
        if cache.kind == "state":
            heads.append(0)
        else:
            heads.append(max(count for _, count, _ in cache.planes.values()) or 1)
        groups.append(GroupSpec(cache.kind, cache.block_tokens, numbers, planes, cache.window, ratio=cache.ratio))
    return ModelSpec(
        name=shape.model_type,
        content="",
        groups=tuple(groups),
        shard=Shard(0, tp, pp_rank, pp, heads=tuple(heads), stages=tuple(held)),
        chunk_tokens=default_chunk_tokens(groups, chunk_tokens),
    )


# How caches are spread over ranks, and divided into blocks.


_REPLICATED = ("k", "v", "conv_groups")
"""Planes whose heads several ranks hold where there are fewer heads than ranks."""


def _share(name: str, heads: int, tp: int) -> int:
    """Heads that one rank holds; 1 for a plane without a head axis."""
    if not heads:
        return 1
    if heads % tp and (name not in _REPLICATED or tp % heads):
        raise ConfigError(
            f"{heads} heads of plane {name} cannot be spread over --tp {tp}; choose a tensor size that can"
        )
    return max(1, heads // tp)


def _stages(layers: int, pp: int) -> list[int]:
    """Return by pipeline stage its layers: vLLM's ``get_pp_indices``; what is left over goes to the stages before the
    last, and then to earlier ones."""
    if layers < pp:
        raise ConfigError(f"--pp {pp}: the model has {layers} layers")
    counts = [layers // pp] * pp
    for position in range(layers % pp):
        counts[-2 - position] += 1
    return counts


def _held(cache: Cache, stages: Sequence[int]) -> tuple[int, ...]:
    """How many of a cache's layers each stage has."""
    counts, first = [], 0
    for count in stages:
        counts.append(sum(first <= layer < first + count for layer in cache.layers))
        first += count
    if min(counts) < 1:
        raise ConfigError(
            f"--pp {len(stages)}: a stage has no layer with a cache of kind {cache.kind}"
            f"{f' and window {cache.window}' if cache.window else ''}, and then nothing is stored; choose a smaller one"
        )
    return tuple(counts)


def _blocks(shape: Shape, tp: int, block_tokens: int) -> list[Cache]:
    """Divide caches into blocks as vLLM does.

    A state takes a block of its own. So vLLM makes blocks of attention layers so long that one of them is at least as
    large as a state (``_align_hybrid_block_size``, ``platforms/interface.py``), and keeps a state at each block's end.
    """

    def per_rank(cache: Cache) -> int:
        return sum(
            _share(name, heads, tp) * width * DTYPE_BYTES[dtype] for name, (dtype, heads, width) in cache.planes.items()
        )

    states = [cache for cache in shape.caches if KINDS[cache.kind].exact]
    if states:
        rows = [per_rank(cache) for cache in shape.caches if not KINDS[cache.kind].exact]
        largest = max(per_rank(cache) for cache in states)
        # With attention by latents vLLM's kernels want blocks of at least 128 tokens.
        unit = max(block_tokens, 128) if any(cache.kind == "mla" for cache in shape.caches) else block_tokens
        block_tokens = max([block_tokens, *(unit * -(-largest // (unit * row)) for row in rows)])
    return [replace(cache, block_tokens=cache.block_tokens or block_tokens) for cache in shape.caches]


# The shapes. Each reader gives a model's caches and the floating-point operations of a query-key pair in all layers.


_LAYERS = "num_hidden_layers"
_WINDOWED, _FULL = ("sliding_attention",), ("full_attention", "attention")
_LINEAR = ("linear_attention", "mamba")
_INDEX_SCALE_TOKENS = 128  # values that share one float32 scale in the indexer's fp8 keys


@dataclass(frozen=True, slots=True)
class _Dtypes:
    """Of the model's values and its convolutions' states, of attention caches, and of recurrent matrices."""

    model: str
    cache: str
    state: str


class _Reader:
    """Reads one model's fields.

    :param kv_dtype: as it was asked for.
    :param all_states: compressor states are stored as far as their windows reach.
    """

    def __init__(
        self, model_type: str, fields: Fields, layers: int, dtypes: _Dtypes, kv_dtype: str, *, all_states: bool
    ) -> None:
        self.model_type, self.fields, self.layers = model_type, fields, layers
        self.dtypes, self.kv_dtype, self.all_states = dtypes, kv_dtype, all_states

    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads and elements of a head. A missing KV head count means one for each query head."""
        fields = self.fields
        queries = fields.number("num_attention_heads")
        width = fields.optional_number("head_dim") or fields.number("hidden_size") // queries
        if not width and not fields.missing:
            raise ConfigError("config.json: hidden_size is smaller than num_attention_heads")
        return queries, fields.optional_number("num_key_value_heads") or queries, width

    def types(self) -> list[str]:
        """Return each layer's kind, where the configuration lists them; else an empty list."""
        listed = self.fields.get("layer_types", [])
        if not isinstance(listed, list):
            raise ConfigError(f"config.json: layer_types = {shown(listed)}: should be a list")
        types = [str(kind) for kind in listed]
        if types and len(types) != self.layers:
            raise ConfigError(f"config.json: layer_types lists {len(types)} layers, and {_LAYERS} is {self.layers}")
        unknown = sorted(set(types) - {*_WINDOWED, *_FULL, *_LINEAR})
        if unknown:
            raise ConfigError(
                f"config.json: layers of type {', '.join(unknown)} have a cache that layerflow does not move"
            )
        return types

    def attention(
        self, full: Iterable[int], windowed: Iterable[int] = (), window: int = 0
    ) -> tuple[list[Cache], float]:
        """Keys and values of these layers."""
        queries, heads, width = self.heads()
        planes = {name: (self.dtypes.cache, heads, width) for name in ("k", "v")}
        full, windowed = tuple(full), tuple(windowed)
        caches = [Cache("full", full, planes)]
        if windowed:
            caches.append(Cache("sliding", windowed, planes, window))
        # Scores take 2 operations an element, the weighted sum of values as many.
        return caches, 4.0 * queries * width * len(full)

    def state(self, layers: Iterable[int], **planes: tuple[int, int]) -> Cache:
        """Recurrent state: heads (of a convolution: columns) and elements of each, by plane."""
        dtypes = {"ssm": self.dtypes.state}
        shaped = {name: (dtypes.get(name, self.dtypes.model), *told) for name, told in planes.items()}
        return Cache("state", tuple(layers), shaped)


_Read = Callable[[_Reader], tuple[list[Cache], float]]


def _attention(reader: _Reader) -> tuple[list[Cache], float]:
    """MHA, MQA and GQA, with sliding windows where the configuration says which layers have them."""
    fields, types = reader.fields, reader.types()
    every = range(reader.layers)
    window = fields.optional_number("sliding_window", least=0)
    if fields.silent_on("sliding_window") and reader.model_type == "mistral":
        fields.missing.append("sliding_window (null = none)")  # transformers then takes 4096
    if fields.get("use_sliding_window") is False or (not types and not window):
        return reader.attention(every)
    if types:
        windowed = [layer for layer in every if types[layer] in _WINDOWED]
        if any(kind in _LINEAR for kind in types):
            raise ConfigError("config.json: layer_types has recurrent layers, which this model_type has not")
        return reader.attention(
            [layer for layer in every if layer not in windowed],
            windowed,
            fields.number("sliding_window") if windowed else 0,
        )
    first = fields.optional_number("max_window_layers", least=0) or 0
    return reader.attention(range(min(first, reader.layers)), range(first, reader.layers), window or 0)


def _pattern(reader: _Reader) -> tuple[list[Cache], float]:
    """Windows in all layers but each n-th: Gemma 2 and 3, Cohere 2, gpt-oss, unless they list their layers."""
    if reader.types():
        return _attention(reader)
    every = reader.fields.number("sliding_window_pattern", "_sliding_window_pattern")
    full = [layer for layer in range(reader.layers) if (layer + 1) % every == 0]
    windowed = [layer for layer in range(reader.layers) if layer not in full]
    return reader.attention(full, windowed, reader.fields.number("sliding_window"))


def _latent(reader: _Reader) -> tuple[list[Cache], float]:
    """DeepSeek's MLA: one latent and its rope part a token; with the sparse indexer (V3.2) its fp8 keys and scales too.

    vLLM packs fp8 rows of sparse MLA as 512 fp8 values, 4 float32 scales and 64 bfloat16 of rope: ``fp8_ds_mla``.
    """
    fields, every = reader.fields, tuple(range(reader.layers))
    rank, rope = fields.number("kv_lora_rank"), fields.number("qk_rope_head_dim")
    queries, nope, values = (fields.number(name) for name in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
    sparse = fields.optional_number("index_head_dim", least=0) or fields.optional_number("index_topk", least=0)
    planes = {"latent": (reader.dtypes.cache, 0, rank), "rope": (reader.dtypes.cache, 0, rope)}
    if not sparse:
        return [Cache("mla", every, planes)], 2.0 * queries * (nope + rope + values) * reader.layers
    if reader.kv_dtype == "fp8":
        planes = {
            "latent": ("float8_e4m3fn", 0, rank),
            "scale": ("float32", 0, rank // _INDEX_SCALE_TOKENS),
            "rope": ("bfloat16", 0, rope),
        }
    return [Cache("mla", every, planes), Cache("mla", every, _index(fields))], 0.0


def _index(fields: Fields) -> dict[str, tuple[str, int, int]]:
    """The keys of a sparse indexer: fp8, and a float32 scale for 128 of them."""
    width = fields.number("index_head_dim")
    return {
        "indexer": ("float8_e4m3fn", 0, width),
        "indexer_scale": ("float32", 0, max(1, width // _INDEX_SCALE_TOKENS)),
    }


_V4_BLOCK, _V4_WINDOW_BLOCK, _V4_ROW = 256, 64, 584
_V4_STATES = {4: (4, 8), 128: (8, 128)}  # by ratio: tokens of a compressor state's block, and its window


def _compressed(reader: _Reader) -> tuple[list[Cache], float]:
    """DeepSeek-V4: a window in every layer, and in most a cache of one row per 4 or 128 tokens with its compressor's
    state; layers of ratio 4 also have an indexer, and its state.

    Rows are vLLM's ``fp8_ds_mla`` (448 fp8, 64 bfloat16 of rope, 8 scales: 584 bytes), or `head_dim` values. Blocks are
    fixed: 256 tokens of compressed rows, 64 of the window, 4 and 8 of states (``models/deepseek_v4/compressor.py``).
    """
    fields, width = reader.fields, reader.fields.number("head_dim")
    ratios = fields.numbers("compress_ratios", least=0)[: reader.layers]
    if reader.kv_dtype in ("auto", "fp8") and width == 512:
        row = {"kv": ("uint8", 0, _V4_ROW)}
    else:
        row = {"kv": (reader.dtypes.cache, 0, width)}
    unknown = sorted(set(ratios) - {0, 1, *_V4_STATES})
    if unknown:
        raise ConfigError(f"config.json: compress_ratios {unknown} are none that DeepSeek-V4 has (0, 4, 128)")
    caches = [Cache("sliding", tuple(range(len(ratios))), row, fields.number("sliding_window"), 1, _V4_WINDOW_BLOCK)]

    def state(layers: tuple[int, ...], ratio: int, elements: int) -> Cache:
        block, window = _V4_STATES[ratio]
        if not reader.all_states:  # the first row behind a hit reads the others, as far as it overlaps the rows before
            window -= ratio
        return Cache("sliding", layers if window else (), {"state": ("float32", 0, elements)}, window, 1, block)

    for ratio in sorted({ratio for ratio in ratios if ratio > 1}):
        layers = tuple(layer for layer, each in enumerate(ratios) if each == ratio)
        caches.append(Cache("mla", layers, row, 0, ratio, _V4_BLOCK))
        # A ratio of 4 looks one group back, so that its state is two groups wide; each has a value and a gate.
        overlap = 2 if ratio == 4 else 1
        caches.append(state(layers, ratio, 2 * overlap * width))
        if ratio == 4:
            index = fields.number("index_head_dim")
            caches.append(Cache("mla", layers, _index(fields), 0, ratio, _V4_BLOCK))
            caches.append(state(layers, ratio, 2 * overlap * index))
    return caches, 0.0


def _delta_net(reader: _Reader) -> tuple[list[Cache], float]:
    """Qwen3-Next and Qwen3.5: gated delta net layers, and full attention in each n-th.

    State as vLLM's ``gated_delta_net_state_shape``: the convolution over queries, keys and values; a matrix per value
    head, in ``mamba_ssm_dtype`` where the configuration has it.
    """
    fields = reader.fields
    if not (types := reader.types()):
        every = fields.optional_number("full_attention_interval") or fields.number(
            "layer_types or full_attention_interval"
        )
        types = ["full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(reader.layers)]
    keys, values = fields.number("linear_num_key_heads"), fields.number("linear_num_value_heads")
    key, value = fields.number("linear_key_head_dim"), fields.number("linear_value_head_dim")
    depth = fields.number("linear_conv_kernel_dim") - 1
    conv = 2 * keys * key + values * value
    caches, flops = reader.attention(layer for layer, kind in enumerate(types) if kind in _FULL)
    recurrent = [layer for layer, kind in enumerate(types) if kind in _LINEAR]
    return [*caches, reader.state(recurrent, conv=(conv, depth), ssm=(values, value * key))], flops


def _mamba2(names: Mapping[str, str]) -> _Read:
    """Mamba 2 layers beside attention; `names` are the fields of heads, head, groups, state and convolution.

    State as vLLM's ``mamba2_state_shape``.
    """

    def read(reader: _Reader) -> tuple[list[Cache], float]:
        fields = reader.fields
        heads, head, groups, size, kernel = (
            fields.number(names[name]) for name in ("heads", "head", "groups", "size", "kernel")
        )
        if "pattern" in names:
            kinds = {"M": "mamba", "*": "attention"}
            types = [kinds.get(letter, "") for letter in fields.letters(names["pattern"])]
        elif not (types := reader.types()):
            fields.missing.append("layer_types")
        caches, flops = reader.attention(layer for layer, kind in enumerate(types) if kind in _FULL)
        recurrent = [layer for layer, kind in enumerate(types) if kind in _LINEAR]
        depth = kernel - 1
        state = reader.state(
            recurrent,
            conv=(heads * head, depth),
            conv_groups=(groups, 2 * size * depth),
            ssm=(heads, head * size),
        )
        return [*caches, state], flops

    return read


def _jamba(reader: _Reader) -> tuple[list[Cache], float]:
    """Jamba: Mamba 1 layers, and attention in each n-th. State as vLLM's ``mamba1_state_shape``."""
    fields = reader.fields
    period, offset = fields.number("attn_layer_period"), fields.number("attn_layer_offset", least=0)
    inner = fields.number("mamba_expand") * fields.number("hidden_size")
    size, kernel = fields.number("mamba_d_state"), fields.number("mamba_d_conv")
    full = [layer for layer in range(reader.layers) if layer % period == offset]
    recurrent = [layer for layer in range(reader.layers) if layer % period != offset]
    caches, flops = reader.attention(full)
    return [*caches, reader.state(recurrent, conv=(inner, kernel - 1), ssm=(inner, size))], flops


def _dtypes(fields: Fields, kv_dtype: str, state_dtype: str, dtype: str, notes: list[str]) -> _Dtypes:
    model = (fields.get("torch_dtype") or fields.get("dtype")) if dtype == "auto" else dtype
    if not isinstance(model, str):
        fields.missing.append("torch_dtype")
        model = "bfloat16"
    model = _dtype(model)
    if model == "float32" and dtype == "auto":
        # vLLM's _resolve_auto_dtype (config/model.py): to bfloat16, or float16 where a device lacks that.
        model = "bfloat16"
        notes.append("Its float32 is computed in 16 bits, as vLLM's --dtype auto does; else --dtype float32.")
    cache = {"auto": model, "fp8": "float8_e4m3fn"}.get(kv_dtype) or _dtype(kv_dtype)
    if state_dtype == "auto":
        state_dtype = str(fields.get("mamba_ssm_dtype") or fields.get("mamba_ssm_cache_dtype") or model)
    return _Dtypes(model, cache, _dtype(state_dtype))


def _checkpoints_kv_dtype(config: Mapping[str, Any], notes: list[str], *, latent: bool) -> str:
    """What vLLM makes of ``--kv-cache-dtype auto``: ``"fp8"`` where the checkpoint was quantised for that.

    vLLM's ``get_kv_cache_quant_algo_string`` (``utils/torch_utils.py``) for ModelOpt's checkpoints, and ``Attention``
    for those of llm-compressor, whose schemes ``compressed_tensors.py`` takes as 8-bit floats alone.

    :param latent: attention by latents, where vLLM looks at ModelOpt's word only.
    :raises ConfigError: it asks for something else.
    """
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        return "auto"
    inner = found.get("quantization")
    places = [inner, found] if isinstance(inner, dict) else [found]
    asked = next((place[name] for name in _KV_SCHEMES for place in places if place.get(name)), None)
    if asked is None:
        return "auto"
    method = str(found.get("quant_method", ""))
    if isinstance(asked, dict):
        fp8 = asked.get("num_bits") == 8 and asked.get("type") == "float"
        if method.startswith("modelopt"):
            fp8 = fp8 and asked.get("dynamic") is False
        else:
            fp8 = fp8 and method == "compressed-tensors" and not latent
    else:
        fp8 = method.startswith("modelopt") and str(asked).lower() == "fp8"
    if fp8:
        notes.append("Its cache is fp8, as its quantization_config asks; else give --kv-dtype.")
        return "fp8"
    raise ConfigError(
        f"config.json: quantization_config asks for a cache of {shown(asked)}, which is not known here; give the "
        "engine's --kv-cache-dtype as --kv-dtype"
    )


_KV_SCHEMES = ("kv_cache_scheme", "kv_cache_quant_algo")


def _dtype(name: str) -> str:
    bare = name.removeprefix("torch.")
    bare = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "half": "float16", "float": "float32"}.get(
        bare, bare
    )
    if bare not in DTYPE_BYTES:
        raise ConfigError(f"{name!r} is no dtype of a cache that layerflow knows; there are {', '.join(DTYPE_BYTES)}")
    return bare


_ATTENTION = (
    "arcee", "gemma", "glm", "glm4", "glm4_moe", "gpt_neox", "granite", "granitemoe", "internlm3", "llama",
    "minimax_m2", "mistral", "mixtral", "nemotron", "olmo2", "olmoe", "phi3", "phimoe", "qwen2", "qwen2_moe",
    "qwen2_vl_text", "qwen2_5_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "seed_oss",
    "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
_BAMBA = {
    "heads": "mamba_n_heads",
    "head": "mamba_d_head",
    "groups": "mamba_n_groups",
    "size": "mamba_d_state",
    "kernel": "mamba_d_conv",
}
_NEMOTRON = {
    "heads": "mamba_num_heads",
    "head": "mamba_head_dim",
    "groups": "n_groups",
    "size": "ssm_state_size",
    "kernel": "conv_kernel",
    "pattern": "hybrid_override_pattern",
}
_READERS: dict[str, _Read] = {
    **dict.fromkeys(_ATTENTION, _attention),
    **dict.fromkeys(("cohere2", "gemma2", "gemma3_text", "gpt_oss", "olmo3"), _pattern),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2"), _latent),
    "deepseek_v4": _compressed,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _delta_net),
    "granitemoehybrid": _mamba2(_BAMBA),
    "nemotron_h": _mamba2(_NEMOTRON),
    "jamba": _jamba,
}

_WITHOUT_WINDOWS = {"use_sliding_window": False}
_ASSUMED: dict[str, dict[str, Any]] = {
    **{name: _WITHOUT_WINDOWS for name in _ATTENTION if name.startswith(("qwen", "smollm"))},
    "gemma2": {"sliding_window_pattern": 2},
    "gemma3_text": {
        "sliding_window_pattern": 6, "sliding_window": 4096, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256,
    },
    "cohere2": {"sliding_window_pattern": 4},
    "olmo3": {"sliding_window_pattern": 4},
    "gpt_oss": {"sliding_window_pattern": 2},
    "nemotron_h": {"mamba_ssm_cache_dtype": "float32"},
}  # fmt: skip
"""What transformers 5.19's class of a ``model_type`` has where its file is silent; of Nemotron-H, what vLLM has."""

_DECIDING = (
    _LAYERS, "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "layer_types", "sliding_window",
    "kv_lora_rank", "qk_rope_head_dim", "index_head_dim", "compress_ratios",
)  # fmt: skip


def _unknown(named: str, given: Mapping[str, Any], like: str) -> str:
    """Say what is missing to size a model of this type."""
    if like:
        return f"--like {like}: no such model_type; there are {', '.join(sorted(_READERS))}"
    missing = [name for name in _DECIDING[:5] if given.get(name) is None]
    if not named:
        return f"config.json: model_type is missing{', and so are ' + ', '.join(missing) if missing else ''}"
    lacks = f", and its file lacks {', '.join(missing)}" if missing else ""
    return (
        f"config.json: model_type {named!r} is none whose caches are known here{lacks}; if they are those of a known "
        "type, name it with --like, e.g. --like llama"
    )
