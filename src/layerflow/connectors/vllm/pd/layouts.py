"""Which facts two engines must share to hand prompts over, and the first one that differs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from layerflow.spec import ModelSpec

MOST_TEXT = 64
"""Longer facts are told by their digest: requests carry them."""


def layout_facts(spec: ModelSpec) -> dict[str, str]:
    """What both engines' keys are made from, in the order in which it is compared; sizes in parallel are no part."""
    spec = spec.own
    numbers = range(len(spec.groups))
    cut = all(spec.shard.heads_of(number) for number in numbers)
    return {
        "weights": _short(spec.content),
        "dtype and quantisation": _short(spec.quantization),
        "attention backend and layout": _short(spec.attention),
        "chunk_tokens": str(spec.chunk_tokens),
        "cache groups": " ".join(_group(spec, number) for number in numbers),
        "tensor size": "any" if cut else str(spec.shard.tp_size),
        "pipeline size": "any" if spec.shard.stages else str(spec.shard.pp_size),
        "fingerprint": spec.fingerprint.hex(),
    }


def first_difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Names the first fact that differs, with both values; "" where all that both tell is equal."""
    for fact, value in mine.items():
        other = theirs.get(fact, value)
        if other != value:
            return f"{fact}: {value!r} here, {other!r} at the other engine"
    return ""


def _group(spec: ModelSpec, number: int) -> str:
    """Kind, tokens of a block, and bytes of a token in one layer: of one head where ranks may hold different ones."""
    group, held = spec.groups[number], spec.box(number).heads if spec.shard.heads_of(number) else 1
    window = f",window={group.window}" if group.window else ""
    ratio = f",ratio={group.ratio}" if group.ratio > 1 else ""
    return f"{group.kind}({group.block_size}{window}{ratio}):{sum(plane.token_bytes for plane in group.planes) // held}"


def _short(text: str) -> str:
    return text if len(text) <= MOST_TEXT else hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
