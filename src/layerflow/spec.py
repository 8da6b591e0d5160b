"""The vocabulary: planes, groups, shards and models, and the fingerprint that keys start from."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from layerflow.boxes import Box, worker_box
from layerflow.boxes.shard import MAX_LAYERS, Shard
from layerflow.errors import SpecError
from layerflow.kinds import KINDS, Kind

__all__ = ["DEFAULT_CHUNK_TOKENS", "DTYPE_BYTES", "MAX_LAYERS", "GroupSpec", "ModelSpec", "Plane", "Shard"]

DEFAULT_CHUNK_TOKENS = 256

DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}


class Plane(msgspec.Struct, frozen=True):
    """One tensor component of a layer's cache: k, v, latent, rope, indexer, scale.

    :param name: unique within its group.
    :param dtype: torch's name without the prefix, e.g. ``"bfloat16"``.
    :param shape: elements that one token (recurrent state: one state) has in one layer, e.g. ``(kv_heads, head_dim)``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise SpecError(f"plane {self.name!r}: unknown dtype {self.dtype!r}; use one of {sorted(DTYPE_BYTES)}")
        if not self.shape or any(n <= 0 for n in self.shape):
            raise SpecError(f"plane {self.name!r}: shape {self.shape} must name at least one positive extent")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, or one state, in one layer."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class GroupSpec(msgspec.Struct, frozen=True):
    """Layers that share a block table and a cache kind.

    :param kind: a name of :data:`layerflow.kinds.KINDS`, e.g. ``"full"``.
    :param block_size: tokens of one block; recurrent state: tokens from one kept state to the next.
    :param layers: the model's layer numbers in this group, ascending.
    :param planes: the planes that each of these layers has, in storage order.
    :param window: of a windowed kind: tokens a query sees, itself included.
    :param block_bytes: bytes of one block of one layer over all planes, where the engine declares
        them; checked against the planes. 0 = not declared.
    :param ratio: tokens that one row of a block stands for; above 1 the cache is compressed, or so many ranks share a
        block's tokens, and a hit ends at a multiple of it: the row that the next token belongs to is computed, never
        half loaded.
    """

    kind: str
    block_size: int
    layers: tuple[int, ...]
    planes: tuple[Plane, ...]
    window: int = 0
    block_bytes: int = 0
    ratio: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SpecError(f"group kind {self.kind!r} is unknown; use one of {sorted(KINDS)}")
        if self.block_size <= 0:
            raise SpecError(f"block_size {self.block_size} must be positive")
        if self.ratio < 1 or self.block_size % self.ratio or (self.ratio > 1 and KINDS[self.kind].exact):
            raise SpecError(
                f"group of kind {self.kind!r} with ratio {self.ratio}: it must divide block_size {self.block_size}, "
                "and be 1 for recurrent state"
            )
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise SpecError(f"group layers {self.layers} must be ascending, unique and not empty")
        names = [plane.name for plane in self.planes]
        if not names or len(set(names)) != len(names):
            raise SpecError(f"group of layers {self.layers}: plane names {names} must be unique and not empty")
        if KINDS[self.kind].windowed != (self.window > 0):
            raise SpecError(f"group kind {self.kind!r} with window {self.window}: only windowed kinds take a window")
        if self.block_bytes and self.block_bytes != self.bytes_per_block:
            raise SpecError(
                f"group of layers {self.layers}: its planes add up to {self.bytes_per_block} bytes a block "
                f"but {self.block_bytes} were declared; check each plane's dtype and shape"
            )

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in one layer, all planes."""
        return self.entries * sum(plane.token_bytes for plane in self.planes)

    @property
    def entries(self) -> int:
        """Rows of one block in each plane: `block_size` tokens (`ratio` of them in a row), or one state."""
        return self.rules.entries

    @property
    def rules(self) -> Kind:
        """The kind's need and keep rules for this group."""
        return _rules(self.kind, self.block_size, self.window, self.ratio)


@functools.lru_cache(256)
def _rules(kind: str, block_size: int, window: int, ratio: int) -> Kind:
    return KINDS[kind](block_size, window, ratio)


def default_chunk_tokens(groups: Sequence[GroupSpec], wanted: int = 0) -> int:
    """Return the tokens of a chunk: `wanted` if given, else the least multiple of every block size from 256 tokens on.

    No more than the smallest window: of a longer chunk only its end would be kept, and no hit could end within it.
    """
    if wanted:
        return wanted
    unit = math.lcm(*(group.block_size for group in groups))
    default = unit * -(-DEFAULT_CHUNK_TOKENS // unit)
    window = min((group.window for group in groups if group.window), default=default)
    return min(default, max(unit, window // unit * unit))


class ModelSpec(msgspec.Struct, frozen=True):
    """What one worker caches, precisely enough that equal fingerprints mean interchangeable bytes.

    :param name: for people; not part of the fingerprint.
    :param content: digest of what the weights compute, see :func:`layerflow.content.model_content`.
    :param groups: every cached layer is in exactly one of them. Those of a draft model (`shard.drafts`) are the last:
        they are stored and loaded like the others, but a hit does not need them, and they change no key of the others.
    :param attention: the attention backend and how it packs a block, e.g. ``"flash_attn/NHD"``.
    :param quantization: weight quantisation where it changes KV bytes, else ``""``.
    :param chunk_tokens: tokens keyed and stored together; a multiple of every block size.
    """

    name: str
    content: str
    groups: tuple[GroupSpec, ...]
    shard: Shard = Shard()
    attention: str = ""
    quantization: str = ""
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS

    def __post_init__(self) -> None:
        if not self.groups:
            raise SpecError(f"model {self.name!r} has no cache group")
        if self.chunk_tokens < 1:
            raise SpecError(f"model {self.name!r}: chunk_tokens {self.chunk_tokens} must be positive")
        seen: dict[int, int] = {}
        for number, group in enumerate(self.groups):
            for layer in group.layers:
                if layer in seen:
                    raise SpecError(
                        f"model {self.name!r}: layer {layer} is in groups {seen[layer]} and {number}; "
                        "a layer belongs to exactly one group"
                    )
                seen[layer] = number
            if self.chunk_tokens % group.block_size:
                raise SpecError(
                    f"model {self.name!r}: chunk_tokens {self.chunk_tokens} is not a multiple of "
                    f"group {number}'s block_size {group.block_size}"
                )
        if sorted(seen) != list(range(len(seen))) or len(seen) > MAX_LAYERS:
            raise SpecError(
                f"model {self.name!r}: its groups name layers {sorted(seen)[:8]}...; cached layers are numbered "
                f"0, 1, 2, ... without a gap, at most {MAX_LAYERS}"
            )
        self._check_shard()

    def _check_shard(self) -> None:
        shard, count = self.shard, len(self.groups)
        if any(len(told) not in (0, count) for told in (shard.heads, shard.stages, shard.drafts)):
            raise SpecError(
                f"model {self.name!r} has {count} groups; its shard tells heads of {len(shard.heads)} and stages of "
                f"{len(shard.stages)}, draft models of {len(shard.drafts)}"
            )
        if shard.drafts and (shard.drafts[0] or list(shard.drafts) != sorted(shard.drafts, key=bool)):
            raise SpecError(f"model {self.name!r}: groups of a draft model must be behind the model's own")
        for number, group in enumerate(self.groups):
            if shard.stages and shard.stages[number][shard.pp_rank] != len(group.layers):
                raise SpecError(
                    f"model {self.name!r}, group {number}: {len(group.layers)} layers, but its stages "
                    f"{shard.stages[number]} tell of {shard.stages[number][shard.pp_rank]} on stage {shard.pp_rank}"
                )
            held = self.box(number).heads
            if any(plane.token_bytes * group.entries % held for plane in group.planes):
                raise SpecError(
                    f"model {self.name!r}, group {number}: blocks cannot be {held} heads of equal size each; its "
                    f"planes have {[plane.token_bytes * group.entries for plane in group.planes]} bytes"
                )

    def box(self, group: int) -> Box:
        """The layers and heads that this worker holds of a group; where it cannot be cut, ranks count as heads."""
        shard = self.shard
        if shard.stages:
            return shard.box(group)
        span = 0, len(self.groups[group].layers)
        return worker_box(span, shard.heads_of(group) or shard.tp_size, shard.tp_rank, shard.tp_size)

    def depth_of(self, group: int) -> int:
        """How many layers a group has in the whole model."""
        return self.shard.span_of(group)[2] if self.shard.stages else len(self.groups[group].layers)

    def bound_to_size(self) -> dict[int, str]:
        """The groups that only workers of the tensor size that stored them can read, each with what to know of it."""
        heads = self.shard.heads_of
        return {number: _why_bound(group) for number, group in enumerate(self.groups) if not heads(number)}

    @property
    def num_layers(self) -> int:
        """Cached layers of this worker."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that are equal where cached bytes are interchangeable, whatever host computed them.

        The worker's own ranks are left out: the object key carries them.
        """
        return _fingerprint(self)

    @property
    def own(self) -> ModelSpec:
        """The same without a draft model's groups: what a hit needs."""
        return _own(self) if self.shard.drafts else self

    @property
    def exact(self) -> bool:
        """Some group's hits cannot be shortened."""
        return any(group.rules.exact for group in self.own.groups)

    @property
    def block_tokens(self) -> int:
        """A hit may end after every so many tokens of a chunk; 0 = only where a chunk or a stored tail ends.

        Tokens of which every group has whole blocks. Recurrent state is kept at boundaries alone.
        """
        unit = _common_block(self)
        return unit if unit < self.chunk_tokens and not self.exact else 0

    def inside(self, held: int, shared: int) -> bool:
        """Can a hit end after the first `shared` of the `held` tokens that an object of each group stands for?"""
        return all(group.rules.inside(held, shared) for group in self.own.groups)

    def usable(self, stored: int, tokens: int) -> int | None:
        """How many of `stored` leading tokens a prompt of `tokens` tokens can load; None = none of them.

        At least one token is left to compute, and compressed rows are loaded whole or not at all. A hit is shortened
        for that where every group allows it.
        """
        most = min(stored, tokens - 1)
        most -= most % self.alignment
        return None if self.exact and most != stored else most

    @property
    def alignment(self) -> int:
        """Hits end at multiples of so many tokens; 1 = anywhere."""
        return _alignment(self)

    def layer_places(self) -> tuple[tuple[int, int], ...]:
        """For every layer: its group and its index within that group."""
        places = {
            layer: (number, index)
            for number, group in enumerate(self.groups)
            for index, layer in enumerate(group.layers)
        }
        return tuple(places[layer] for layer in range(self.num_layers))


MOST_TEXT = 64
"""Longer facts are told by their digest: requests carry them."""


@functools.lru_cache(maxsize=64)
def model_facts(spec: ModelSpec) -> Mapping[str, str]:
    """Return by name the facts that two engines must share to read each other's objects.

    They stand in the order in which they are compared. Their names and texts go from engine to engine with requests.
    """
    spec = spec.own
    numbers = range(len(spec.groups))
    return MappingProxyType(
        {
            "weights": _short(spec.content),
            "dtype and quantisation": _short(spec.quantization),
            "attention backend and layout": _short(spec.attention),
            "chunk_tokens": str(spec.chunk_tokens),
            "cache groups": " ".join(_group_fact(spec, number) for number in numbers),
            "dtypes": _short(" ".join("/".join(plane.dtype for plane in group.planes) for group in spec.groups)),
            "tensor size": "any" if spec.shard.shareable else str(spec.shard.tp_size),
            "pipeline size": "any" if spec.shard.stages else str(spec.shard.pp_size),
            "fingerprint": spec.fingerprint.hex(),
        }
    )


def first_mismatch(mine: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return the first fact of :func:`model_facts` that both tell and in which they differ: its name and both texts."""
    return next(((fact, here, there) for fact, here in mine.items() if (there := theirs.get(fact, here)) != here), None)


def _group_fact(spec: ModelSpec, number: int) -> str:
    """Kind, tokens of a block, and bytes of a token in one layer: of one head where ranks may hold different ones."""
    group, held = spec.groups[number], spec.box(number).heads if spec.shard.heads_of(number) else 1
    window = f",window={group.window}" if group.window else ""
    ratio = f",ratio={group.ratio}" if group.ratio > 1 else ""
    return f"{group.kind}({group.block_size}{window}{ratio}):{sum(plane.token_bytes for plane in group.planes) // held}"


def _short(text: str) -> str:
    return text if len(text) <= MOST_TEXT else hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _why_bound(group: GroupSpec) -> str:
    if group.rules.exact:
        return "recurrent state is divided inside its tensors"
    return "its engine tells no KV heads, or cannot cut blocks between them: see bound_to_tensor_size in its log"


@functools.lru_cache(maxsize=64)
def _alignment(spec: ModelSpec) -> int:
    return math.lcm(*(group.ratio for group in spec.own.groups))


def _facts(spec: ModelSpec, number: int) -> dict[str, object]:
    """What of a group changes its bytes. What it had when there was no `ratio` yet still has the same keys."""
    # Whether an engine declares a block's bytes does not change them.
    group, shard = msgspec.structs.replace(spec.groups[number], block_bytes=0), spec.shard
    facts = msgspec.structs.asdict(group)
    if group.ratio == 1:
        del facts["ratio"]
    if shard.stages:
        facts["layers"] = shard.span_of(number)[2]
    if shard.heads_of(number):
        facts["heads"], held = shard.heads_of(number), spec.box(number).heads
        facts["planes"] = [(plane.name, plane.dtype, plane.token_bytes // held) for plane in group.planes]
    return facts


@functools.lru_cache(maxsize=64)
def _common_block(spec: ModelSpec) -> int:
    return math.lcm(*(group.block_size for group in spec.own.groups))


@functools.lru_cache(maxsize=64)
def _own(spec: ModelSpec) -> ModelSpec:
    shard, count = spec.shard, sum(not draft for draft in spec.shard.drafts)
    own = msgspec.structs.replace(shard, heads=shard.heads[:count], stages=shard.stages[:count], drafts=())
    return msgspec.structs.replace(spec, groups=spec.groups[:count], shard=own)


@functools.lru_cache(maxsize=64)
def _fingerprint(spec: ModelSpec) -> bytes:
    spec = spec.own
    shard, groups = spec.shard, range(len(spec.groups))
    facts = {
        "content": spec.content,
        "groups": [_facts(spec, number) for number in groups],
        "tp_size": 1 if all(shard.heads_of(number) for number in groups) else shard.tp_size,
        "pp_size": 1 if shard.stages else shard.pp_size,
        "attention": spec.attention,
        "quantization": spec.quantization,
        "chunk_tokens": spec.chunk_tokens,
    }
    return hashlib.blake2b(
        msgspec.json.encode(facts, order="sorted"), digest_size=16, person=b"layerflow-model"
    ).digest()
