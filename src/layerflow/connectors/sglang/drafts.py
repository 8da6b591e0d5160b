"""Draft models of speculative decoding: their caches, which SGLang hands over bare, and whose these are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.model_executor.model_runner import ModelRunner

from layerflow.connectors.common.computation import tracked_objects
from layerflow.errors import Unsupported

ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE")
"""SGLang's names of those whose draft model writes a row of its cache for each token, as soon as the next one is known.
MTP is called EAGLE there (NEXTN)."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model of this process.

    :param pool: its cache, whose slots are those of the model's full attention.
    :param heads: KV heads of the whole draft model.
    :param modules: its attention modules, whose numbers are some of the model's layers', too. With MLA a layer has two.
    """

    pool: Any
    heads: int
    modules: tuple[Any, ...]


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


def check_drafting(spec: Any) -> None:
    """Rows that are stored are those that any engine would compute over the same tokens.

    :param spec: of SGLang's ServerArgs, what is about speculative decoding.
    :raises Unsupported: some depend on what SGLang has guessed, or are not written.
    """
    if spec.enable_multi_layer_eagle and (spec.speculative_num_steps or 0) > 1:
        raise Unsupported(
            "--enable-multi-layer-eagle with more than one step: SGLang computes the draft model's last rows of a "
            "prompt and of each chunk from guesses, and writes them anew while it decodes; set "
            "--speculative-num-steps 1, or run without it"
        )
    if envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.get():
        raise Unsupported(
            "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND: SGLang leaves rows of the draft model's cache out, and does not "
            "say which; unset it, or run without --speculative-algorithm"
        )


def _runners() -> list[Any]:
    return [each for each in tracked_objects() if issubclass(type(each), ModelRunner)]


def _draft(pool: Any, runners: Iterable[Any]) -> Draft:
    runner = next(iter(runners), None)
    if runner is None:
        raise Unsupported(
            f"SGLang keeps a draft model's cache in a {type(pool).__name__} that belongs to no model runner of this "
            "process; run without --speculative-algorithm"
        )
    modules = tuple(module for module in runner.model.modules() if type(module).__name__ == "RadixAttention")
    return Draft(pool, runner.model_config.get_total_num_kv_heads(), modules)
