"""Draft models of speculative decoding: their caches, which SGLang hands over bare, and whose these are."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.model_executor.model_runner import ModelRunner

from layerflow.errors import Unsupported

ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE")
"""SGLang's names of those whose draft model writes a row of its cache for each token, as soon as the next one is known.
MTP is called EAGLE there (NEXTN)."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model of this process.

    :param pool: its cache, whose slots are those of the model's full attention.
    :param heads: KV heads of the whole draft model.
    :param layers: its attention layers, by the number that SGLang gives them, which is one of the model's, too.
    """

    pool: Any
    heads: int
    layers: dict[int, Any]


def drafts_of(pools: Sequence[Any], algorithm: str | None) -> list[Draft]:
    """The draft models of these caches.

    :param algorithm: of speculative decoding, SGLang's name.
    :raises Unsupported: it is not known how this algorithm fills them.
    """
    if pools and algorithm not in ALGORITHMS:
        raise Unsupported(
            f"--speculative-algorithm {algorithm}: it is not known here when a row of its draft model's cache is "
            f"written (of {', '.join(ALGORITHMS)} it is); choose one of these, or run without it"
        )
    runners = _runners() if pools else ()
    return [_draft(pool, [each for each in runners if each.token_to_kv_pool is pool]) for pool in pools]


def _runners() -> list[Any]:
    return [each for each in gc.get_objects() if issubclass(type(each), ModelRunner)]


def _draft(pool: Any, runners: Iterable[Any]) -> Draft:
    runner = next(iter(runners), None)
    if runner is None:
        raise Unsupported(
            f"SGLang keeps a draft model's cache in a {type(pool).__name__} that belongs to no model runner of this "
            "process; run without --speculative-algorithm"
        )
    layers = {module.layer_id: module for module in runner.model.modules() if type(module).__name__ == "RadixAttention"}
    return Draft(pool, runner.model_config.get_total_num_kv_heads(), layers)
