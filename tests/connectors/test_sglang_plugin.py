"""The hooks on SGLang's linker wrapper: a load that has failed ends its own request, with its reason, on every rank."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from layerflow.connectors.sglang import plugin


class Linker:
    """One whose loads of some requests have failed."""

    def __init__(self, **failed: str) -> None:
        self.failed = failed
        self.asked: list[int] = []

    def failed_loads(self, index: int, requests: list[str]) -> dict[str, str]:
        self.asked.append(index)
        return self.failed

    def failures(self) -> dict[str, str]:
        return self.failed


def wrapper(linker: Any, *requests: str, others: tuple[int, ...] = ()) -> Any:
    """:param others: what another rank says of each request: 1 = it is there."""

    def all_reduce(landed: torch.Tensor, _: object) -> None:
        if others:
            landed.copy_(torch.minimum(landed, torch.tensor(others, dtype=landed.dtype)))

    return SimpleNamespace(
        cache_linker=linker,
        inflight_load_rids=list(requests),
        inflight_load_index=7,
        private_load_indices=dict.fromkeys(requests, "slots"),
        cache=SimpleNamespace(_all_reduce_attn_groups=all_reduce),
    )


def original(_: Any) -> list[str]:
    return ["sglang's own"]


def test_only_the_requests_whose_loads_have_failed_are_ended() -> None:
    linker = Linker(b="deadline")
    of = wrapper(linker, "a", "b", "c")
    assert plugin.finish_loads(original, of) == ["b"]
    assert linker.asked == [7]
    assert (of.inflight_load_rids, of.inflight_load_index, of.private_load_indices) == ([], -1, {})


def test_a_load_that_has_failed_on_another_rank_ends_here_too() -> None:
    assert plugin.finish_loads(original, wrapper(Linker(b="deadline"), "a", "b", "c", others=(0, 1, 1))) == ["a", "b"]


def test_a_batch_that_loads_nothing_asks_no_rank() -> None:
    linker = Linker()
    assert plugin.finish_loads(original, wrapper(linker)) == []
    assert linker.asked == []


def test_other_linkers_keep_what_sglang_does() -> None:
    assert plugin.finish_loads(original, wrapper(object(), "a")) == ["sglang's own"]


@pytest.fixture
def finish_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's class, where SGLang is not installed."""
    names = ["sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.managers.schedule_batch"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].FINISH_ABORT = lambda text, status: (text, int(status))  # type: ignore[attr-defined]


def test_each_client_is_told_its_own_reason(finish_abort: None) -> None:
    cache = SimpleNamespace(linker=SimpleNamespace(cache_linker=Linker(a="deadline", b="x" * 1000)))
    ended = [SimpleNamespace(rid=rid, discard_output_reason=None) for rid in ("a", "b", "c")]
    plugin.tell_reasons(ended, cache)
    told = [request.discard_output_reason for request in ended]
    assert told[0] == ("External KV cache load failed: deadline", 503)
    assert len(told[1][0]) == plugin.MOST_REASON
    assert told[2] == ("External KV cache load failed: it failed on another rank", 503)


def test_without_a_failure_or_with_another_linker_nothing_is_told() -> None:
    ended = [SimpleNamespace(rid="a", discard_output_reason="sglang's own")]
    plugin.tell_reasons([], SimpleNamespace(linker=SimpleNamespace(cache_linker=Linker())))
    plugin.tell_reasons(ended, SimpleNamespace(linker=SimpleNamespace(cache_linker=object())))
    plugin.tell_reasons(ended, SimpleNamespace(linker=None))
    assert ended[0].discard_output_reason == "sglang's own"


class Manager:
    """The transfer backend's, of a prefill engine."""

    def __init__(self) -> None:
        self.begun: list[tuple[Any, list[str]]] = []
        self.ended: list[Any] = []

    def begin_batch(self, batch: Any, loading: Iterable[str] = ()) -> None:
        self.begun.append((batch, list(loading)))

    def end_batch(self, batch: Any) -> None:
        self.ended.append(batch)

    def pages_freed(self, allocator: Any, pages: Sequence[Any]) -> None:
        self.ended.append((allocator, *pages))


@pytest.mark.parametrize("linker", [None, wrapper(Linker(), "b")], ids=["alone", "with-a-linker"])
def test_a_batch_is_told_with_what_a_linker_loads_of_it(monkeypatch: pytest.MonkeyPatch, linker: Any) -> None:
    manager = Manager()
    monkeypatch.setattr(plugin, "_watching", [manager])
    scheduler = SimpleNamespace(tree_cache=SimpleNamespace(linker=linker) if linker else SimpleNamespace())
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: True))
    plugin.batch_begins(scheduler, batch)
    plugin.batch_ends("result", scheduler, batch)
    assert manager.begun == [(batch, ["b"] if linker else [])]
    assert manager.ended == [batch]


def test_a_prefill_engine_hears_of_freed_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.pages_freed("allocator", "decode's")
    manager = Manager()
    monkeypatch.setattr(plugin, "_watching", [manager])
    plugin.pages_freed("allocator", "some", "others")
    assert manager.ended == [("allocator", "some", "others")]


@pytest.mark.parametrize("unmaps", [True, False])
@pytest.mark.parametrize(
    ("tags", "weights"),
    [(None, True), ([], True), (["kv_cache", "weights"], True), (["kv_cache"], False), (["cuda_graph"], False)],
)
def test_caches_hear_whether_the_weights_memory_goes_and_returns(
    monkeypatch: pytest.MonkeyPatch, tags: list[str] | None, weights: bool, unmaps: bool
) -> None:
    """Without a memory saver SGLang's weights stay mapped, whatever it is asked."""
    heard: list[Any] = []
    keeper = SimpleNamespace(
        memory_goes=lambda *, weights: heard.append(weights), weights_return=lambda: heard.append("returned")
    )
    monkeypatch.setattr(plugin, "_keepers", [keeper])
    request, updater = SimpleNamespace(tags=tags), SimpleNamespace(memory_saver_adapter=SimpleNamespace(enabled=unmaps))
    plugin.memory_goes(updater, request)
    plugin.memory_returns("result", updater, request)
    assert heard == [weights and unmaps, *["returned"] * (weights and unmaps)]
