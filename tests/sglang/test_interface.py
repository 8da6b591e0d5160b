"""The installed SGLang's interface is the one that the linker was written for; what it cannot do is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import json
import threading
from abc import abstractmethod
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import sglang
import torch
from device.simulated import DEVICE, Machine
from safetensors.torch import save_file
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES, GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver, CommonKVSender
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.lora.lora_config import LoRAConfig
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache import kv_cache_builder
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache import linker_factory, unified_cache_linker, unified_tree_core
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker, UnifiedCacheLinkerWrapper
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

from layerflow.connectors.common import loaded
from layerflow.connectors.common.computation import tracked_objects
from layerflow.connectors.common.interface import check_interface
from layerflow.connectors.common.weights import Weights
from layerflow.connectors.sglang import LayerflowLinker, engine, identity, linker, plugin
from layerflow.connectors.sglang.batch_saves import ALLOCATORS, frees_are_seen, full_attention_allocator
from layerflow.connectors.sglang.drafts import ALGORITHMS, check_drafting, drafts_of
from layerflow.connectors.sglang.identity import LoadedAdapters, _adapters
from layerflow.connectors.sglang.layout import KV, MAMBA, SWA
from layerflow.connectors.sglang.options import SglangOptions
from layerflow.connectors.sglang.pd import backend
from layerflow.connectors.sglang.versions import KNOWN, check_version
from layerflow.errors import ConfigError, Unsupported
from layerflow.spec import Shard

METHODS = {
    "lookup": ["self", "rid", "transfers"],
    "load": ["self", "rid", "transfers"],
    "start_layer_wise_loading": ["self"],
    "finish_layer_wise_loading": ["self", "counter_index"],
    "cancel_queued_load": ["self", "rid"],
    "offload": ["self", "transfers", "session_id"],
    "num_completed_offloads": ["self"],
    "pop_completed_offload": ["self"],
    "reset": ["self"],
    "close": ["self"],
}
CALLS = {
    "match": ["cache_linker.lookup(req.rid, lookup_transfers)", "_sync_restorable_prefix"],
    "load_back": ["req.rid, [transfer for _, transfer in component_transfers]", "cache_linker.load("],
    "_offload_node": ["cache_linker.offload(", "session_id="],
    "take_completed_offloads": ["cache_linker.pop_completed_offload() for _ in range(finish_count)"],
    "num_completed_offloads": ["cache_linker.num_completed_offloads()"],
}
"""By method of the wrapper: what stands in it, and what the linker relies on: who is asked, of what, in which order."""

BACKEND = {
    CommonKVManager: {
        "__init__": ["self", "args", "disaggregation_mode", "server_args", "is_mla_backend"],
        "try_ensure_parallel_info": ["self", "bootstrap_addr"],
        "_handle_node_failure": ["self", "failed_bootstrap_addr"],
        "record_failure": ["self", "bootstrap_room", "failure_reason"],
        "update_status": ["self", "bootstrap_room", "status"],
        "_send_multipart_locked": ["self", "endpoint", "parts", "is_ipv6"],
    },
    CommonKVSender: {"poll": ["self"], "abort": ["self"], "clear": ["self"]},
    CommonKVReceiver: {
        "__init__": ["self", "mgr", "bootstrap_addr", "bootstrap_room"],
        "init": ["self", "prefill_dp_rank"],
        "poll": ["self"], "abort": ["self"], "clear": ["self"],
    },
}  # fmt: skip
"""What the transfer backend builds on, calls or overrides."""


def test_the_version_is_known() -> None:
    assert sglang.__version__ in KNOWN


def test_the_abstract_methods() -> None:
    assert set(METHODS) == UnifiedCacheLinker.__abstractmethods__
    for name, wanted in METHODS.items():
        assert list(inspect.signature(getattr(UnifiedCacheLinker, name)).parameters) == wanted
    check_interface(LayerflowLinker, "SGLang")
    assert not LayerflowLinker.__abstractmethods__


def test_how_it_is_made() -> None:
    given = inspect.signature(LayerflowLinker.__init__).parameters
    assert list(given) == ["self", "server_args", "params", "components", "extra_config", "forward_stream"]
    factory = inspect.getsource(linker_factory)
    for name in ("components=", "extra_config=", "forward_stream="):
        assert name in factory


def test_what_it_is_given() -> None:
    fields = {field.name for field in dataclasses.fields(PoolTransfer)}
    assert {"name", "device_indices", "keys", "hit_policy"} <= fields
    assert {PoolName.KV.value, PoolName.SWA.value, PoolName.MAMBA.value} == {KV, SWA, MAMBA}
    params = {field.name for field in dataclasses.fields(CacheInitParams)}
    assert {
        "req_to_token_pool", "token_to_kv_pool_allocator", "page_size", "pp_size", "attn_cp_size",
        "sliding_window_size", "mtp_draft_device_pools", "sidecar_draft_device_pools", "mtp_draft_mamba_pools",
    } <= params  # fmt: skip
    # Transfers name their pools by the enum's members; the linker compares text.
    assert str(PoolTransfer(PoolName.KV).name.value) == KV


@pytest.mark.parametrize("method", CALLS)
def test_how_it_is_called(method: str) -> None:
    source = inspect.getsource(getattr(UnifiedCacheLinkerWrapper, method))
    for call in CALLS[method]:
        assert call in source
    # A failed load reaches its own requests only because their slots stay out of the tree.
    assert "private to the loading request" in str(unified_cache_linker.__doc__)


@pytest.mark.parametrize("kind", BACKEND, ids=lambda kind: kind.__name__)
def test_what_the_transfer_backend_builds_on(kind: type) -> None:
    found = {name: list(inspect.signature(getattr(kind, name)).parameters) for name in BACKEND[kind]}
    assert found == BACKEND[kind]


def test_another_release_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"SGLang 0\.4\.0: .*knows SGLang .*allow_unknown_sglang"):
        check_version("0.4.0")
    check_version("0.4.0", allow_unknown=True)


def test_an_engine_that_wants_more_is_refused() -> None:
    class Newer(UnifiedCacheLinker):  # type: ignore[misc]
        @abstractmethod
        def prefetch(self) -> None: ...

        def cancel_queued_load(self, rid: str, why: str) -> bool:
            raise NotImplementedError

    own = {name: vars(LayerflowLinker)[name] for name in METHODS}
    with pytest.raises(Unsupported, match="prefetch"):
        check_interface(type("Linker", (Newer,), own), "SGLang 9")
    with pytest.raises(Unsupported, match=r"cancel_queued_load\(\) with 'why'"):
        check_interface(type("Linker", (Newer,), own | {"prefetch": lambda self: None}), "SGLang 9")


PARALLEL = {"pp_size": 1, "attn_cp_size": 1, "attn_dcp_size": 1}
TEXT = {"is_multimodal": False, "is_generation": True}


@pytest.mark.parametrize(
    ("model", "parallel", "sentence"),
    [
        ({}, {"pp_size": 2}, "--pp-size 2: .*set it to 1"),
        ({}, {"attn_cp_size": 2}, "--attn-cp-size 2: .*set it to 1"),
        ({}, {"attn_dcp_size": 2}, "--dcp-size 2: .*set it to 1"),
        ({"is_multimodal": True}, {}, "multimodal model: .*or run without"),
        ({"is_generation": False}, {}, "embedding or reward model"),
    ],
)
def test_refusals_have_a_sentence(model: dict[str, Any], parallel: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Unsupported, match=sentence):
        engine._refuse(SimpleNamespace(**TEXT | model), SimpleNamespace(**PARALLEL | parallel))
    engine._refuse(SimpleNamespace(**TEXT), SimpleNamespace(**PARALLEL))


def test_single_tokens_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"--page-size 1: .*set --page-size 64"):
        linker._check_page(1, recurrent=False)
    linker._check_page(1, recurrent=True)
    linker._check_page(16, recurrent=False)


def params(**pools: Any) -> Any:
    none = {"mtp_draft_device_pools": (), "sidecar_draft_device_pools": (), "mtp_draft_mamba_pools": ()}
    return SimpleNamespace(**none | pools)


def test_draft_models_that_are_not_known_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    states = params(mtp_draft_mamba_pools=("pool",))
    with pytest.raises(Unsupported, match=r"recurrent states of its own.*run without --speculative-algorithm"):
        LayerflowLinker(None, states, components=(), extra_config={})
    for pools in ("mtp_draft_device_pools", "sidecar_draft_device_pools"):
        for algorithm in ("DFLASH", None):
            resolved = SimpleNamespace(speculative_algorithm=algorithm)
            monkeypatch.setattr(linker, "get_spec", lambda resolved=resolved: resolved)
            with pytest.raises(Unsupported, match=rf"--speculative-algorithm {algorithm}.*EAGLE, EAGLE3, STANDALONE"):
                LayerflowLinker(None, params(**{pools: ("pool",)}), components=(), extra_config={})
    assert set(ALGORITHMS) <= {each.name for each in SpeculativeAlgorithm}
    assert drafts_of([], "NGRAM") == []
    with pytest.raises(Unsupported, match="belongs to no model runner"):
        drafts_of([object()], "EAGLE")


class Attention(torch.nn.Module):
    """As far as SGLang's goes."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id


class RadixAttention(Attention):
    """Known by its name."""


def test_a_draft_model_is_found_by_its_cache() -> None:
    """Its layers have the numbers of the model's: they are told apart by what they are."""
    runners = [ModelRunner.__new__(ModelRunner) for _ in range(2)]
    for heads, runner in enumerate(runners, 4):
        runner.token_to_kv_pool = object()
        # With MLA a layer has two.
        runner.model = torch.nn.ModuleList([RadixAttention(0), Attention(1), RadixAttention(1), RadixAttention(1)])
        runner.model_config = SimpleNamespace(get_total_num_kv_heads=lambda heads=heads: heads)
    model, draft = runners
    (found,) = drafts_of([draft.token_to_kv_pool], "EAGLE")
    assert (found.pool, found.heads) == (draft.token_to_kv_pool, 5)
    assert found.modules == (draft.model[0], draft.model[2], draft.model[3])
    cache = engine.EngineCache.__new__(engine.EngineCache)
    cache.layout = SimpleNamespace(layers={0: 0, 1: 1})  # type: ignore[assignment]
    cache._drafted = frozenset(map(id, found.modules))
    assert [cache.number_of(each) for each in (model.model[0], model.model[2])] == [0, 1]
    assert {cache.number_of(each) for each in found.modules} == {None}, "it may run before the model's own layer"
    assert cache.number_of(RadixAttention(9)) is None


def test_models_are_found_when_the_garbage_collector_is_frozen() -> None:
    """As by SGLang's /freeze_gc, before a prefill or decode engine has got its first prompt."""
    layer = RadixAttention(0)
    gc.freeze()
    try:
        assert any(each is layer for each in tracked_objects())
        assert gc.get_freeze_count(), "what was frozen stays so"
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("several", "steps", "refused"), [(True, 2, True), (True, 1, False), (False, 3, False)])
def test_rows_that_hang_on_guesses_are_refused(several: bool, steps: int, refused: bool) -> None:
    spec = SimpleNamespace(enable_multi_layer_eagle=several, speculative_num_steps=steps)
    with pytest.raises(Unsupported, match="num-steps 1") if refused else contextlib.nullcontext():
        check_drafting(spec)


def test_rows_that_sglang_leaves_out_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND", "1")
    with pytest.raises(Unsupported, match="unset it"):
        check_drafting(SimpleNamespace(enable_multi_layer_eagle=False, speculative_num_steps=3))


def test_a_draft_models_cache_is_waited_for_by_its_own_numbers() -> None:
    waited: list[tuple[int, int]] = []
    waits = linker.LayerWaits({0: 0, 2: 1})
    draft = linker.DraftWaits({0: 2}, waits)
    for each in (waits, draft):
        each.wait_until(0)  # no batch runs
    waits.loads = SimpleNamespace(wait=lambda batch, layer: waited.append((batch, layer)))  # type: ignore[assignment]
    waits.set_consumer(7)
    for layer in range(3):
        waits.wait_until(layer)
        draft.wait_until(layer)
    assert waited == [(7, 0), (7, 2), (7, 1)]
    assert (waits.num_layers, draft.num_layers, draft.consumer_index) == (3, 1, 7)


def test_how_sglang_keys_pages_of_a_draft_model() -> None:
    """With EAGLE by each token and the next, but for models with recurrent states."""
    assert "is_eagle=spec_algorithm.is_eagle()" in inspect.getsource(kv_cache_builder)
    assert "params.is_eagle and ComponentType.MAMBA not in components" in inspect.getsource(unified_tree_core)
    for eagle, recurrent, pairs in ((True, False, True), (True, True, False), (False, False, False)):
        assert linker._keys_are_pairs(SimpleNamespace(is_eagle=eagle), recurrent) is pairs
    fields = {
        "speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision",
        "speculative_draft_load_format", "speculative_draft_model_quantization", "enable_multi_layer_eagle",
    }  # fmt: skip
    assert fields <= set(ServerArgs.__struct_fields__)
    assert callable(BaseSpecWorker._draft_model_runners)


def request(room: int, length: int = 32, **more: Any) -> Any:
    """What the transfer backend reads of SGLang's ``Req`` to name its pages."""
    usual = {"extra_key": None, "cache_salt": None, "lora_id": None, "bootstrap_room": room}
    asked = {"rid": f"r{room}", "origin_input_ids": array("q", range(length))}
    return SimpleNamespace(**asked | usual | dict.fromkeys(backend.UNTOLD) | more)


@pytest.mark.parametrize("tokens", [31, 32, 33])
def test_the_last_page_of_a_prompt_with_a_draft_model_is_its_own(tokens: int) -> None:
    """That model's row of the last token depends on the one that is made next."""

    for pairs in (True, False):
        hashing = backend.PromptHashing(16, pairs=pairs, drafts=True)
        one, other = hashing.of(request(1, tokens)), hashing.of(request(2, tokens))
        assert (one[:-1], len(one)) == (other[:-1], -(-tokens // 16))
        assert one[-1] != other[-1]
        assert one == hashing.of(request(1, tokens))
        # What is whole is what SGLang's cache, and so the linker, calls it.
        longer = RadixKey(array("q", range(tokens)), is_bigram=pairs)[: (tokens - 1) // 16 * 16]
        assert one[:-1] == get_storage_hash_str(longer, None, page_size=16)
    plain = backend.PromptHashing(16)
    assert plain.of(request(1, tokens)) == plain.of(request(2, tokens))


@pytest.mark.parametrize("name", backend.UNTOLD)
def test_what_page_hashes_do_not_hold_is_not_handed_over(name: str) -> None:
    """SGLang's token ids of a prompt that is given as embeddings are made up, the same ones for every such prompt."""
    parameters = inspect.signature(Req.__init__).parameters
    assert parameters[name].default is None and f"self.{name} = {name}" in inspect.getsource(Req.__init__)
    reasons: list[str] = []
    side = SimpleNamespace(begin=lambda parts: reasons.append(f"{len(parts)} parts"))
    manager = SimpleNamespace(
        hashes_of=backend.PromptHashing(16).of,
        can_hash=backend.PromptHashing(16).is_ready,
        prefill=side,
        obstacle="",
        give_up=lambda room, reason: reasons.append(reason),
    )
    sender = backend.LayerflowSender.__new__(backend.LayerflowSender)
    sender.bootstrap_room, sender.hashes = 7, ()
    asked = request(7, **{name: [[0.5]]}, disagg_kv_sender=sender)
    backend.LayerflowManager.begin_batch(manager, SimpleNamespace(reqs=[asked]))
    receiver = backend.LayerflowReceiver.__new__(backend.LayerflowReceiver)
    receiver.kv_mgr, receiver.bootstrap_room, receiver._hashes, receiver._refusal = manager, 7, (), ""
    receiver.prepare(asked)
    prefill, parts, decode = *reasons, receiver._refusal
    assert parts == "0 parts" and not sender.hashes and not receiver._hashes
    assert all(f"request r7: its keys and values depend on {name}" in reason for reason in (prefill, decode))


def adapters(**weights: float) -> LoadedAdapters:
    """Of one engine, by SGLang's ids; each has one weight of such elements."""
    name = "base_model.model.model.layers.0.self_attn.o_proj.lora_{}.weight"
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"]}
    found = {}
    for lora_id, weight in weights.items():
        made = LoRAAdapter(lora_id, LoRAConfig.from_dict(config), SimpleNamespace(num_hidden_layers=1), None, None)
        made.initialize_weights_from_tensors({name.format(side): torch.full((2, 2), weight) for side in "AB"})
        found[lora_id] = made
    return LoadedAdapters(SimpleNamespace(loras=found))


@pytest.mark.parametrize("tokens", [31, 32, 33])
def test_an_adapter_is_handed_over_by_its_content_and_its_room(tokens: int) -> None:
    """Ids are random in each engine, rooms are counted anew, and what was handed over stays in the pool."""
    assert "self.loras[lora_ref.lora_id] = lora_adapter" in inspect.getsource(LoRAManager)
    assert "self.lora_manager" in inspect.getsource(ModelRunner.__init__)
    prefill = backend.PromptHashing(16, adapters=adapters(p1=1.0, p2=2.0))
    decode = backend.PromptHashing(16, adapters=adapters(d1=1.0, d2=2.0))

    def hashes(hashing: backend.PromptHashing, room: int, lora_id: str | None) -> list[str]:
        return hashing.of(request(room, tokens, lora_id=lora_id))

    assert hashes(prefill, 1, "p1") == hashes(decode, 1, "d1")
    others = [(1, None), (1, "p1"), (1, "p2"), (2, "p1")]
    pages = [page for room, lora_id in others for page in hashes(prefill, room, lora_id)]
    assert len(set(pages)) == len(pages) == len(others) * -(-tokens // 16)
    with pytest.raises(Unsupported, match="no adapter with the id d1"):
        hashes(prefill, 1, "d1")


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_prompt_waits_for_its_adapter_to_be_read_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """SGLang computes no prompt, and has no pages for one, whose end bootstraps on some rank."""
    for queue in (PrefillBootstrapQueue.pop_bootstrapped, DecodePreallocQueue._update_handshake_waiters):
        assert "poll == KVPoll.Bootstrapping" in inspect.getsource(queue)
    may_end, read = threading.Event(), identity.content_of_tensors

    def late(*facts: Any) -> str:
        assert may_end.wait(30)
        return read(*facts)

    monkeypatch.setattr(identity, "content_of_tensors", late)
    hashing = backend.PromptHashing(16, adapters=adapters(p=1.0))
    manager = backend.LayerflowManager.__new__(backend.LayerflowManager)
    manager._hashing, manager._attempts, manager.request_status = hashing, {}, {}
    manager.prefill = SimpleNamespace(undecided=lambda room: False, refusal=lambda room: "")
    kind = {"prefill": backend.LayerflowSender, "decode": backend.LayerflowReceiver}[side]
    base = {"prefill": CommonKVSender, "decode": CommonKVReceiver}[side]
    monkeypatch.setattr(base, "poll", lambda end: manager.check_status(end.bootstrap_room))

    def begun(room: int, **more: Any) -> Any:
        end = kind.__new__(kind)
        end.kv_mgr, end.bootstrap_room = manager, room
        end.hashes, end._hashes, end._refused, end._refusal, end._unread, end._following = (), (), False, "", None, None
        end.prepare(request(room, sampling_params=SimpleNamespace(custom_params=None), **more))
        manager.request_status[room] = KVPoll.WaitingForInput
        return end

    plain, adapted = begun(1), begun(2, lora_id="p")
    assert [plain.poll(), adapted.poll()] == [KVPoll.WaitingForInput, KVPoll.Bootstrapping]
    may_end.set()
    hashes = hashing.of(request(2, lora_id="p"))  # waits
    assert adapted.poll() == KVPoll.WaitingForInput
    assert side == "prefill" or adapted._hashes == hashes


def test_salts_and_adapters_are_in_the_page_hashes() -> None:
    tokens = array("q", range(32))
    keys = ({}, {"extra_key": "x"}, {"cache_salt": "x"}, {"extra_key": "x", "cache_salt": "x"})
    hashes = [get_storage_hash_str(RadixKey(tokens, **key), None, page_size=16) for key in keys]
    assert len({tuple(each) for each in hashes}) == len(keys)
    assert all(len(each) == 2 for each in hashes)
    # An adapter's id is in the extra key. It is random, but of an adapter that is there from the start: by its path.
    assert ") + lora_id" in inspect.getsource(Req.__init__)
    assert LoRARef().lora_id != LoRARef().lora_id
    assert LoRARef.deterministic_id("name", "path") == LoRARef.deterministic_id("name", "path")


def test_adapters_from_the_start_are_told_by_their_content(tmp_path: Path) -> None:
    given = [LoRARef(lora_id="1", lora_name="name", lora_path=str(tmp_path))]
    with pytest.raises(ConfigError, match="adapter 'name'"):
        _adapters(given)
    contents = []
    for rank, weight in ((8, 0.0), (8, 1.0), (16, 1.0)):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"r": rank}))
        save_file({"a": torch.full((2, 2), weight)}, tmp_path / "adapter_model.safetensors")
        contents.append(_adapters(given)[0][1])
    assert len(set(contents)) == 3
    assert _adapters([]) == []


def test_nodes_that_come_before_the_agent_are_begun_and_fail() -> None:
    """Another rank may have its agent by then, and SGLang takes as many saves from each."""
    early = LayerflowLinker.__new__(LayerflowLinker)
    early.options, early._attached, early._early = SglangOptions(), None, 0
    assert [early.offload([]), early.offload([])] == [True, True]
    assert early.num_completed_offloads() == 2
    assert [early.pop_completed_offload(), early.pop_completed_offload()] == [False, False]
    assert early.num_completed_offloads() == 0


def test_what_another_plugin_has_hooked_first_is_hooked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's registry passes over a target that it has patched before."""
    heard: list[str] = []
    monkeypatch.setattr(sglang.srt, "probe", SimpleNamespace(call=lambda: heard.append("sglang")), raising=False)
    monkeypatch.setattr(plugin, "_hooked", set())
    HookRegistry.register("sglang.srt.probe.call", lambda _: heard.append("another's"), HookType.AFTER)
    HookRegistry.apply_hooks()
    for _ in range(2):
        plugin._hook(
            before=[("probe.call", lambda: heard.append("before"))],
            after=[("probe.call", lambda _: heard.append("after"))],
        )
    sglang.srt.probe.call()
    HookRegistry._hooks.pop("sglang.srt.probe.call")
    HookRegistry._patched.discard("sglang.srt.probe.call")
    assert heard == ["before", "sglang", "another's", "after"]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("page", [1, 4])
def test_every_page_is_told_of_before_it_is_free(monkeypatch: pytest.MonkeyPatch, page: int, grouped: bool) -> None:
    """However SGLang frees it: by slots, by a row's segment, by numbers, at once or many together."""
    plugin.hook_backend()
    kind = TokenToKVPoolAllocator if page == 1 else PagedTokenToKVPoolAllocator
    assert kind.__name__ in ALLOCATORS
    sizes = {"page_size": page} if page > 1 else {}
    allocator = kind(16 * page, dtype=torch.uint8, device="cpu", kvcache=None, need_sort=False, **sizes)
    told: list[int] = []

    class Manager:
        def pages_freed(self, _: Any, pages: Any) -> None:
            free = set(allocator.free_pages.tolist())
            told.extend(each for numbers in pages for each in numbers.tolist() if each not in free)

    monkeypatch.setattr(plugin, "_watching", [Manager()])
    slots = allocator.alloc(6 * page)
    if grouped:
        allocator.free_group_begin()
    allocator.free(slots[: 2 * page])
    allocator.free_segment(slots[2 * page : 4 * page], start_pos=0)
    allocator.free_page_ids(slots[4 * page :: page] // page)
    if grouped:
        allocator.free_group_end()
    assert set(told) == set((slots // page).tolist())
    assert allocator.available_size() == 16 * page


@pytest.mark.parametrize("grouped", [False, True])
def test_with_sliding_windows_the_pages_of_full_attention_are_told_of(
    monkeypatch: pytest.MonkeyPatch, grouped: bool
) -> None:
    plugin.hook_batches()
    kvcache = Mock(spec=BaseSWAKVPool, swa_req_ring_size=None)
    allocator = SWATokenToKVPoolAllocator(16, 8, 1, dtype=torch.uint8, device="cpu", kvcache=kvcache, need_sort=False)
    full = full_attention_allocator(allocator)
    assert full is not allocator and frees_are_seen(full) and not frees_are_seen(allocator)
    told: list[int] = []

    class Watcher:
        def pages_freed(self, given: Any, pages: Any) -> None:
            if given is full:
                free = set(full.free_pages.tolist())
                told.extend(each for numbers in pages for each in numbers.tolist() if each not in free)

    monkeypatch.setattr(plugin, "_watching", [Watcher()])
    slots = allocator.alloc(6)
    if grouped:
        allocator.free_group_begin()
    allocator.free(slots[:2])
    allocator.free_segment(slots[2:4], start_pos=2)
    allocator.free_swa_segment(slots[4:], start_pos=4)
    allocator.free_full_segment(slots[4:], start_pos=4)
    if grouped:
        allocator.free_group_end()
    assert set(told) == set(slots.tolist())
    assert full.available_size() == 16


@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_pass_leaves_is_saved_behind_its_own_stream(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """SGLang's scheduler goes on beside the pass, on another stream, and calls the hook behind a batch there."""
    machine = Machine()
    device = machine.accelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda _: machine)
    cache = engine.EngineCache.__new__(engine.EngineCache)
    agent: Any = SimpleNamespace(device=device, memory=SimpleNamespace(device=DEVICE), record=device.record)
    cache._agent, cache.rank, cache.layout = agent, Shard(), None  # type: ignore[assignment]
    schedule, forward = machine.Stream(), machine.Stream()
    args: Any = SimpleNamespace(enable_two_batch_overlap=False, elastic_ep_backend=None)
    saves = backend.prefill_saves(cache, forward if overlap else None, args, SglangOptions())
    assert saves.by_layer
    with machine.stream(schedule):
        last = (forward if overlap else schedule).put(held=True)
        event: Any = saves.passed()
    machine.run()
    assert not event.query()
    last.held = False
    machine.run()
    assert event.query()


def test_a_backends_cache_hears_of_new_weights_and_of_memory_that_goes() -> None:
    revoked: list[str] = []
    cache = engine.EngineCache.__new__(engine.EngineCache)
    cache._agent, cache._stale = SimpleNamespace(revoke=revoked.append), ""  # type: ignore[assignment]
    manager = backend.LayerflowManager.__new__(backend.LayerflowManager)
    manager._pages = cache
    assert not missing(plugin.CacheKeeper, backend.LayerflowManager) and not missing(
        plugin.CacheKeeper, LayerflowLinker
    )
    cache._weights = SimpleNamespace(are_away=False)  # type: ignore[assignment]
    plugin.keep_cache(manager)
    try:
        plugin.weights_change()
        assert len(revoked) == 1 and manager.obstacle == backend.REPLACED
        plugin.memory_goes(None, ReleaseMemoryOccupationReqInput(tags=[GPU_MEMORY_TYPE_KV_CACHE]))
        assert len(revoked) == 2
    finally:
        plugin.forget_cache(manager)


class Weighed:
    """A linker, or a transfer backend's manager, whose model can be written to, and whose weights SGLang may release.

    On a GPU whoever reads them then ends the process.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        self.model = torch.nn.Linear(8, 8)
        self.named: list[str] = []
        self.routers: list[str] = []
        self.unmapped = False
        self.saver: Any = SimpleNamespace(enabled=True, resume=lambda tag: None)
        read = loaded._read

        def looked(group: Any) -> torch.Tensor:
            assert not self.unmapped, "unmapped memory is read"
            return read(group)

        monkeypatch.setattr(loaded, "_read", looked)
        cache = engine.EngineCache.__new__(engine.EngineCache)
        agent: Any = SimpleNamespace(spec=SimpleNamespace(content="c"), reset=self.named.append, revoke=lambda _: None)
        cache._agent, cache._stale, cache._replaced, cache.rank, cache.engine = agent, "", 0, Shard(0, 2), "e"
        cache.name = "e"
        cache._weights, cache._named = loaded.LoadedWeights([self.model]), Weights("")
        self.cache = cache
        if kind == "linker":
            nothing = SimpleNamespace(reset=lambda: None, settle=lambda: None)
            made = LayerflowLinker.__new__(LayerflowLinker)
            made._cache, made.options, made._early = cache, SglangOptions(), 0
            made._attached = SimpleNamespace(loads=nothing, saves=nothing)  # type: ignore[assignment]
            made.events = SimpleNamespace(  # type: ignore[assignment]
                withdraw=lambda: self.routers.append("none"), begin=lambda *_: self.routers.append("all")
            )
            self.flush, self.keeper = made.reset, made
        else:
            self.keeper = backend.LayerflowManager.__new__(backend.LayerflowManager)
            self.keeper._pages = cache
            self.flush = self.keeper.emptied

    def check_told(self, what: str) -> None:
        """Routers of the linker's engine believe this of what is stored."""
        assert self.routers[-1:] == [what] * isinstance(self.keeper, LayerflowLinker)

    def release(self, *tags: str) -> None:
        updater = SimpleNamespace(memory_saver_adapter=self.saver)
        with contextlib.suppress(AttributeError):  # there is no scheduler
            SchedulerWeightUpdaterManager.release_memory_occupation(updater, ReleaseMemoryOccupationReqInput(tags=tags))
        self.unmapped = self.saver.enabled and (not tags or GPU_MEMORY_TYPE_WEIGHTS in tags)

    def resume(self, *tags: str) -> None:
        self.unmapped = False
        updater = SimpleNamespace(
            offload_tags=set(GPU_MEMORY_ALL_TYPES),
            memory_saver_adapter=self.saver,
            _assert_weight_cache_inactive=lambda what: None,
            tp_cpu_group=None,
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=self.model)),
            stashed_model_static_state={"buffers": []},
            scheduler=None,
        )
        SchedulerWeightUpdaterManager.resume_memory_occupation(updater, ResumeMemoryOccupationReqInput(tags=tags))


@pytest.fixture(params=["linker", "backend"])
def weighed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Weighed]:
    plugin.hook_weights()
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: None)
    made = Weighed(monkeypatch, request.param)
    plugin.keep_cache(made.keeper)
    yield made
    plugin.forget_cache(made.keeper)


@pytest.mark.parametrize("tags", [(), (GPU_MEMORY_TYPE_WEIGHTS,)], ids=["all", "weights"])
@pytest.mark.parametrize("others", [False, True])
def test_released_weights_are_not_read_until_they_are_back(
    weighed: Weighed, others: bool, tags: tuple[str, ...]
) -> None:
    """Others may come back than have gone, by no call that anybody hears of; the flush meanwhile names nothing."""
    weighed.release(*tags)
    weighed.flush()
    assert weighed.cache.are_replaced() and not weighed.named
    weighed.check_told("none")
    if others:
        weighed.model.weight.data.add_(1)
    weighed.resume(*tags)
    assert weighed.cache.are_replaced() is others and not weighed.named
    weighed.check_told("none" if others else "all")
    weighed.flush()
    assert not weighed.cache.are_replaced() and weighed.named == ["e/1"] * others
    weighed.check_told("all")


def test_weights_that_stay_where_they_are_go_on(weighed: Weighed) -> None:
    """Whatever SGLang is asked: without ``--enable-memory-saver`` it releases nothing."""
    weighed.saver = TorchMemorySaverAdapter.create(enable=False)
    assert "self.memory_saver_adapter.pause(GPU_MEMORY_TYPE_WEIGHTS)" in inspect.getsource(
        SchedulerWeightUpdaterManager
    )
    weighed.release()
    weighed.flush()
    assert not weighed.cache.are_replaced() and not weighed.cache.weights_are_away
    weighed.resume()
    assert not weighed.cache.are_replaced() and not weighed.named


def test_new_weights_that_were_released_before_a_flush_stay_without_a_name(weighed: Weighed) -> None:
    plugin.weights_change()
    weighed.release(GPU_MEMORY_TYPE_WEIGHTS)
    weighed.flush()
    weighed.resume(GPU_MEMORY_TYPE_WEIGHTS)
    assert weighed.cache.are_replaced() and not weighed.named
    weighed.flush()
    assert weighed.named == ["e/1"] and not weighed.cache.are_replaced()


def test_weights_stay_where_other_memory_goes(weighed: Weighed) -> None:
    assert plugin.WEIGHTS == GPU_MEMORY_TYPE_WEIGHTS
    weighed.release(GPU_MEMORY_TYPE_KV_CACHE)
    assert not weighed.cache.are_replaced()
    weighed.model.weight.data.add_(1)
    weighed.flush()
    assert weighed.named == ["e/1"]


def test_who_watches_batches_hears_all_of_them() -> None:
    assert not missing(plugin.BatchWatcher, backend.LayerflowManager)
    assert not missing(plugin.BatchWatcher, LayerflowLinker)


def missing(protocol: type, kind: type) -> set[str]:
    """What of a protocol's calls a class of SGLang's kin, which no type checker looks into, does not have."""
    return {name for name in vars(protocol) if not name.startswith("_")} - set(dir(kind))


def test_passes_that_call_a_layer_more_than_once_tell_of_none() -> None:
    cache = engine.EngineCache.__new__(engine.EngineCache)
    cache._agent, cache.layout = SimpleNamespace(record=None), None  # type: ignore[assignment]
    for overlap, elastic, wanted in ((True, None, True), (False, "mooncake", True), (False, None, False)):
        args: Any = SimpleNamespace(enable_two_batch_overlap=overlap, elastic_ep_backend=elastic)
        assert not backend.prefill_saves(cache, None, args, SglangOptions(save_by_layer=wanted)).by_layer
    assert {"enable_two_batch_overlap", "elastic_ep_backend"} <= set(ServerArgs.__struct_fields__)
