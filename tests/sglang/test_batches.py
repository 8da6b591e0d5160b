"""Batches of SGLang's without a model: its radix cache, its allocator, its hooks and the linker, on a real server."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connectors.sglang_fakes import PAGE, SLOTS, PoolWorker
from e2e.known import eventually
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.server_args import ServerArgs

from layerflow.connectors.sglang import LayerflowLinker, pages, plugin
from layerflow.connectors.sglang.engine import EngineCache
from layerflow.connectors.sglang.layout import KV
from layerflow.connectors.sglang.linker import _Ready
from layerflow.connectors.sglang.options import SglangOptions
from layerflow.connectors.sglang.pages import BatchPages, PromptHashes
from layerflow.server import EmbeddedServer

Embed = Callable[..., EmbeddedServer]
KEYS: list[dict[str, str]] = [
    {},
    {"extra_key": "adapter"},
    {"cache_salt": "salt"},
    {"extra_key": "x", "cache_salt": "y"},
]


class Request:
    """What the linker reads of SGLang's ``Req``."""

    def __init__(self, rid: str, tokens: Sequence[int], row: int, **keys: str) -> None:
        self.rid = rid
        self.origin_input_ids = array("q", tokens)
        self.full_untruncated_fill_ids = array("q", tokens)
        self.extra_key: str | None = keys.get("extra_key")
        self.cache_salt: str | None = keys.get("cache_salt")
        self.kv = SimpleNamespace(req_pool_idx=row)
        self.skip_radix_cache_insert = False
        self.session: Any = None
        self.discard_output_reason: Any = None
        self.prefix_len = 0
        self.protected = 0  #: tokens whose slots are the cache's


class Engine:
    """One scheduler, as far as it is about pages.

    :ivar worker: the linker's agent, and a pool whose bytes follow from page hashes.
    """

    def __init__(self, server: EmbeddedServer) -> None:
        self.worker = worker = PoolWorker(server)
        self.allocator = PagedTokenToKVPoolAllocator(
            SLOTS - PAGE, page_size=PAGE, dtype=torch.uint8, device="cpu", kvcache=None, need_sort=False
        )
        self.pool = ReqToTokenPool(8, 256, "cpu", enable_memory_saver=False)
        self.linker = linker = LayerflowLinker.__new__(LayerflowLinker)
        linker.options, linker._early, linker._translate = SglangOptions(), 0, None
        linker._pages, linker._allocator = BatchPages(self.pool, PAGE), self.allocator
        linker.pools = {KV: None}  # type: ignore[dict-item]
        linker._cache = SimpleNamespace(  # type: ignore[assignment]
            layout=worker.layout,
            agent=lambda: worker.agent,
            are_replaced=lambda: False,
            number_of=worker.layout.layers.get,
        )
        linker._attached = _Ready(worker.loads, worker.saves, worker.batches, worker.pages)
        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.pool,
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE,
                tree_components=(ComponentType.FULL,),
            )
        )
        self.cache.linker = UnifiedCacheLinkerWrapper(self.cache, linker)
        self.scheduler = SimpleNamespace(tree_cache=self.cache)
        self.hashes = PromptHashes(PAGE)  # of its own: what pages should hold

    @property
    def saved_bytes(self) -> int:
        return self.worker.agent.statistics().saved_bytes

    def slots_of(self, request: Request, first: int, end: int) -> dict[str, Any]:
        row = self.pool.req_to_token[request.kv.req_pool_idx]
        return {KV: row[first * PAGE : end * PAGE].to(torch.int64).numpy()}

    def compute(
        self,
        *parts: tuple[Request, int],
        failed: Sequence[Request] = (),
        loading: Sequence[str] = (),
        between: Callable[[int], None] = lambda _: None,
        ends: bool = True,
        **more: Any,
    ) -> None:
        """Run a batch that computes these requests up to so many tokens.

        :param failed: those whose loads have failed. :param between: called before each layer.
        :param ends: else it raises behind its second layer.
        """
        self.cache.linker.inflight_load_rids = list(loading)
        batch = SimpleNamespace(
            reqs=[request for request, _ in parts],
            prefix_lens=[request.prefix_len for request, _ in parts],
            extend_lens=[end - request.prefix_len for request, end in parts],
            forward_mode=ForwardMode.EXTEND,
            decoding_reqs=None,
        )
        vars(batch).update(more)
        for request, end in parts:
            held = -(-request.prefix_len // PAGE) * PAGE
            row = self.pool.req_to_token[request.kv.req_pool_idx]
            if (new := -(-end // PAGE) * PAGE - held) > 0:
                row[held : held + new] = self.allocator.alloc(new).to(row.dtype)
        plugin.batch_begins(self.scheduler, batch)
        for request, end in parts:
            whole = end // PAGE
            if whole:
                self.worker.compute(self.hashes.of(request, 0, whole), self.slots_of(request, 0, whole))
        for layer in self.worker.layout.layers:
            if layer == 2 and not ends:
                return
            between(layer)
            plugin.layer_done(None, layer)
        for request in failed:
            request.discard_output_reason = "its load has failed"
        plugin.batch_ends(None, self.scheduler, batch)

    def insert(self, request: Request, end: int) -> None:
        """Bring what is computed of a request into the radix cache, which offloads its nodes."""
        whole = end // PAGE * PAGE
        key = RadixKey(request.full_untruncated_fill_ids[:whole], request.extra_key, cache_salt=request.cache_salt)
        value = torch.from_numpy(self.slots_of(request, 0, whole // PAGE)[KV].copy())
        self.cache.insert(InsertParams(key=key, value=value, prev_prefix_len=request.protected))
        request.protected = whole
        request.prefix_len = end

    def settle(self) -> None:
        """Until no node is being saved."""

        def done() -> bool:
            self.cache.check_hicache_events()
            return not self.cache.linker.pending_offloads and not self.worker.pages.under_way()

        assert eventually(done)

    def bytes_of(self, pages: int) -> int:
        spec = self.worker.agent.spec
        return pages * PAGE * spec.groups[0].bytes_per_block * len(spec.groups[0].layers)

    def stored(self, request: Request, pages: int) -> int:
        """How many leading pages another engine would hit."""
        hashes = [each.encode() for each in self.hashes.of(request, 0, pages)]
        self.worker.agent.drop_lease("looked up")
        return self.worker.agent.lookup("looked up", self.worker.agent.hashed_chain(hashes)).tokens // PAGE


@pytest.fixture
def engine(embed: Embed) -> Iterator[Engine]:
    plugin.hook_batches()
    engine = Engine(embed())
    plugin.watch_batches(engine.linker)
    yield engine
    plugin.unwatch_batches(engine.linker)
    engine.worker.agent.close()


def objects(engine: Engine, server: EmbeddedServer) -> int:
    return server.call(lambda: server.server.pool.statistics().objects)


@pytest.mark.parametrize("keys", KEYS, ids=lambda keys: "+".join(keys) or "plain")
def test_pages_have_the_keys_of_their_nodes_and_are_moved_once(engine: Engine, keys: dict[str, str]) -> None:
    """In chunks that end inside of pages. A part of a page at the prompt's end is not saved."""
    request = Request("r", range(100, 139), 1, **keys)
    for end, whole in ((18, 4), (33, 8), (39, 9)):
        engine.compute((request, end))
        assert eventually(lambda: not engine.worker.pages.under_way())
        assert engine.saved_bytes == engine.bytes_of(whole), "before there is a node"
        engine.insert(request, end)
        engine.settle()
        assert engine.saved_bytes == engine.bytes_of(whole)
    assert engine.stored(request, 9) == 9
    assert engine.worker.wrong_bytes(engine.hashes.of(request, 0, 9), engine.slots_of(request, 0, 9)) == 0


def test_a_node_whose_pages_are_not_saved_by_then_is_saved_as_ever(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook that raises hurts nothing."""
    request = Request("r", range(100, 120), 1)
    monkeypatch.setattr(engine.worker.pages, "begin", lambda _: 1 // 0)
    engine.compute((request, 20))
    assert engine.saved_bytes == 0
    engine.insert(request, 20)
    engine.settle()
    assert engine.saved_bytes == engine.bytes_of(5)
    assert engine.stored(request, 5) == 5


def test_new_weights_keep_a_batch_from_being_saved(engine: Engine) -> None:
    engine.linker._cache.are_replaced = lambda: True  # type: ignore[method-assign]
    request = Request("r", range(100, 120), 1)
    engine.compute((request, 20))
    engine.insert(request, 20)
    engine.settle()
    assert engine.saved_bytes == 0


def test_weights_that_are_replaced_under_a_batch_are_in_no_page_of_it(engine: Engine) -> None:
    """Its pass may still run on the device: what layers compute from here on has old weights below it and new ones."""
    plugin.hook_weights()
    plugin.keep_cache(engine.linker)
    seen: list[str] = []
    cache = EngineCache.__new__(EngineCache)
    cache._agent, cache._stale = engine.worker.agent, ""
    engine.linker._cache.about_to_be_replaced = lambda: EngineCache.about_to_be_replaced(cache) or seen.append("told")  # type: ignore[method-assign]
    engine.linker._cache.are_replaced = lambda: bool(seen)  # type: ignore[method-assign]
    request = Request("r", range(100, 120), 1)

    def replace(layer: int) -> None:
        if layer == 1:
            with suppress(Exception):  # there is no model to write to
                SchedulerWeightUpdaterManager.update_weights_from_tensor(SimpleNamespace(), None)

    try:
        engine.compute((request, 20), between=replace)
        engine.insert(request, 20)
        engine.settle()
    finally:
        plugin.forget_cache(engine.linker)
    assert seen == ["told"] and cache._stale
    assert engine.stored(request, 5) == 0


def test_nothing_reads_pools_whose_memory_goes(engine: Engine) -> None:
    plugin.hook_weights()
    plugin.keep_cache(engine.linker)
    request = Request("r", range(100, 132), 1)
    try:
        engine.compute((request, 32))
        engine.insert(request, 32)
        with suppress(Exception):  # there is no memory saver
            asked = ReleaseMemoryOccupationReqInput(tags=[GPU_MEMORY_TYPE_KV_CACHE])
            SchedulerWeightUpdaterManager.release_memory_occupation(SimpleNamespace(), asked)
        assert not engine.worker.agent.statistics().open_steps
    finally:
        plugin.forget_cache(engine.linker)
    engine.settle()
    assert engine.stored(request, 8) == 8


def test_a_batch_that_was_not_ended_publishes_nothing(engine: Engine) -> None:
    bad, good = Request("bad", range(100, 132), 1), Request("good", range(300, 332), 2)
    engine.compute((bad, 32), ends=False)
    engine.compute((good, 32))
    assert eventually(lambda: not engine.worker.pages.under_way())
    assert (engine.stored(bad, 8), engine.stored(good, 8)) == (0, 8)


@pytest.mark.parametrize("failed", [False, True])
def test_where_the_thread_is_ahead_of_the_device_slots_are_asked_for_behind_the_launch(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    """Layers leave in their order all the same, and verdicts on loads count."""
    engine.worker.batches._at_once = False
    asked: list[str] = []
    fetch = pages.fetch_slots

    def fetched(*args: Any) -> Callable[[], Any]:
        slots = fetch(*args)
        return lambda: asked.append("slots") or slots()

    monkeypatch.setattr(pages, "fetch_slots", fetched)
    monkeypatch.setattr(engine.worker.batches, "_written", lambda: asked.append("event"))
    one, two = Request("one", range(100, 132), 1), Request("two", range(300, 332), 2)
    engine.compute((one, 32), (two, 32), loading=["one"], failed=[one] * failed)
    assert asked == ["event"] * len(engine.worker.layout.layers) + ["slots"]
    assert eventually(lambda: not engine.worker.pages.under_way())
    assert (engine.stored(one, 8), engine.stored(two, 8)) == (8 * (not failed), 8)
    assert engine.worker.wrong_bytes(engine.hashes.of(two, 0, 8), engine.slots_of(two, 0, 8)) == 0
    engine.insert(two, 32)
    engine.settle()
    assert engine.saved_bytes == engine.bytes_of(8 if failed else 16)


def test_what_was_cached_or_loaded_is_not_read_again(engine: Engine) -> None:
    first = Request("first", range(100, 124), 1)
    engine.compute((first, 24))
    engine.insert(first, 24)
    engine.settle()
    before = engine.saved_bytes
    # The same prompt goes on; its slots before are the cache's.
    second = Request("second", [*range(100, 124), *range(500, 516)], 2)
    engine.pool.req_to_token[2, :24] = engine.pool.req_to_token[1, :24]
    second.prefix_len = second.protected = 24
    engine.compute((second, 40))
    engine.insert(second, 40)
    engine.settle()
    assert engine.saved_bytes - before == engine.bytes_of(4)
    assert engine.stored(second, 10) == 10


def test_the_same_prompt_twice_in_a_batch_is_saved_once_and_the_others_pages_are_free(engine: Engine) -> None:
    free = engine.allocator.available_size()
    one, two = (Request(f"r{row}", range(100, 132), row) for row in (1, 2))
    engine.compute((one, 32), (two, 32))
    engine.insert(one, 32)
    engine.insert(two, 32)
    assert engine.allocator.available_size() == free - 32, "the second one's were freed"
    engine.settle()
    assert engine.saved_bytes == engine.bytes_of(8)
    assert engine.stored(one, 8) == 8


def test_pages_of_an_aborted_request_are_read_to_the_end_before_others_have_them(engine: Engine) -> None:
    request = Request("r", range(100, 132), 1)
    engine.compute((request, 32))
    slots = torch.from_numpy(engine.slots_of(request, 0, 8)[KV].copy())
    engine.allocator.free_segment(slots, start_pos=0)
    assert not engine.worker.agent.saving("pages-0"), "nothing reads them"
    for planes in engine.worker.layout.tensors.values():
        for tensor in planes.values():
            tensor[slots] = 0
    engine.settle()
    assert engine.stored(request, 8) == 8
    again = engine.worker.slots(8)
    assert engine.worker.loads.look_up("later", engine.hashes.of(request, 0, 8))[-1] == 8
    assert engine.worker.loads.queue("later", 8, again)
    assert engine.worker.loads.finish(engine.worker.loads.start())
    assert engine.worker.wrong_bytes(engine.hashes.of(request, 0, 8), again) == 0


def test_frees_of_another_allocator_are_not_asked_about(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window's pages have numbers of their own."""
    told: list[Any] = []
    monkeypatch.setattr(engine.worker.batches, "let_go", told.append)
    other = PagedTokenToKVPoolAllocator(
        SLOTS - PAGE, page_size=PAGE, dtype=torch.uint8, device="cpu", kvcache=None, need_sort=False
    )
    other.free(other.alloc(PAGE))
    assert not told
    engine.allocator.free(engine.allocator.alloc(PAGE))
    assert len(told) == 1


def test_a_request_whose_load_has_failed_publishes_nothing(engine: Engine) -> None:
    bad, good = Request("bad", range(100, 132), 1), Request("good", range(300, 332), 2)
    engine.compute((bad, 32), (good, 32), loading=["bad", "good"], failed=[bad])
    assert eventually(lambda: not engine.worker.pages.under_way())
    assert (engine.stored(bad, 8), engine.stored(good, 8)) == (0, 8)


LEFT_OUT: dict[str, Callable[[Request], dict[str, Any]]] = {
    "decoding": lambda request: {"forward_mode": ForwardMode.MIXED, "decoding_reqs": [request]},
    "a decode batch": lambda _: {"forward_mode": ForwardMode.DECODE},
    "drafts that are verified": lambda _: {"forward_mode": ForwardMode.TARGET_VERIFY},
    "diffusion": lambda _: {"forward_mode": ForwardMode.DLLM_EXTEND},
    "kept out of the cache": lambda request: setattr(request, "skip_radix_cache_insert", True) or {},
    "a session's": lambda request: setattr(request, "session", SimpleNamespace(streaming=True)) or {},
}


@pytest.mark.parametrize("which", LEFT_OUT)
def test_what_is_not_saved_before_its_node(engine: Engine, which: str) -> None:
    request, other = Request("r", range(100, 132), 1), Request("other", range(300, 332), 2)
    more = LEFT_OUT[which](request)
    engine.compute((request, 32), (other, 32), **more)
    assert eventually(lambda: not engine.worker.pages.under_way())
    others = more.get("forward_mode") in (None, ForwardMode.MIXED)
    assert (engine.stored(request, 8), engine.stored(other, 8)) == (0, 8 * others)


def test_what_is_generated_anew_has_other_hashes() -> None:
    """SGLang retracts a request: its output may become another one, its prompt does not."""
    request, known = Request("r", range(100, 106), 1), PromptHashes(PAGE)
    hashes = []
    for output in ([1, 2, 3], [9, 2, 3]):
        request.full_untruncated_fill_ids = request.origin_input_ids + array("q", output)
        hashes.append(known.of(request, 0, 2))
        assert known.of(request, 1, 2) == hashes[-1][1:]
        assert PromptHashes(PAGE).of(request, 0, 2) == hashes[-1]
    assert hashes[0][0] == hashes[1][0] and hashes[0][1] != hashes[1][1]


@pytest.mark.parametrize(("tokens", "pages"), [(15, 3), (16, 3), (17, 4)])
def test_with_an_eagle_draft_model_a_page_is_whole_with_the_token_behind_it(tokens: int, pages: int) -> None:
    """As in SGLang's own cache: that model's row of a token depends on the next one."""
    pool = ReqToTokenPool(8, 256, "cpu", enable_memory_saver=False)
    made = BatchPages(pool, PAGE, pairs=True)
    request = Request("r", range(100, 100 + tokens), 1)
    wanted = get_storage_hash_str(
        RadixKey(request.origin_input_ids, is_bigram=True)[: pages * PAGE], None, page_size=PAGE
    )
    found: list[str] = []
    for start, end in ((0, 8), (8, tokens)):  # the token behind a chunk is in the prompt
        batch = SimpleNamespace(
            reqs=[request],
            prefix_lens=[start],
            extend_lens=[end - start],
            forward_mode=ForwardMode.EXTEND,
            decoding_reqs=None,
        )
        for computed in made.computed(batch, ()):
            assert len(computed.slots) == len(computed.hashes) * PAGE
            found += computed.hashes
    assert found == wanted


class PagedTokenAllocatorOfTomorrow:
    """One that nobody knows."""


@pytest.mark.parametrize(
    ("allocator", "args", "options", "by_layer"),
    [
        ("known", {}, {}, True),
        ("known", {}, {"save_by_layer": False}, False),
        ("known", {}, {"save": False}, False),
        ("known", {"disaggregation_mode": "prefill"}, {}, False),
        ("known", {"disaggregation_mode": "decode"}, {}, False),
        ("known", {"enable_two_batch_overlap": True}, {}, False),
        ("known", {"elastic_ep_backend": "mooncake"}, {}, False),
        ("unknown", {}, {}, False),
    ],
)
def test_when_pages_are_saved_by_layer(
    engine: Engine, allocator: str, args: dict[str, Any], options: dict[str, Any], by_layer: bool
) -> None:
    linker = engine.linker
    linker.options = SglangOptions(**options)
    if allocator == "unknown":
        linker._allocator = PagedTokenAllocatorOfTomorrow()
    given = {"disaggregation_mode": "null", "enable_two_batch_overlap": False, "elastic_ep_backend": None} | args
    assert linker._saves_by_layer(SimpleNamespace(**given)) is by_layer
    assert set(given) <= set(ServerArgs.__struct_fields__)


def test_every_way_to_replace_weights_is_hooked() -> None:
    changes = {name for name in vars(SchedulerWeightUpdaterManager) if name.startswith("update_weights_from_")}
    assert changes | {"begin_weight_update"} == set(plugin.WEIGHTS_CHANGE)
