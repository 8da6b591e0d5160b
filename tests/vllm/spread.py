"""vLLM's own engine core, scheduler, block tables and connector hooks over ranks in one process, without a model.

What a model's layers would write is known from the prompt alone. Each rank writes the rows that vLLM's own slot mapping
gives it, and compares what it holds of a request's earlier tokens wherever attention would read them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from e2e.known import kv_bytes
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import override_forward_context
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import core
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker import block_table, kv_connector_model_runner_mixin
from vllm.v1.worker.gpu import block_table as second_block_table

from layerflow.connectors.common.loaded import LoadedWeights
from layerflow.connectors.vllm import connector as connectors
from layerflow.connectors.vllm import layout as layouts

MODELS = Path(sys.prefix) / "models"
LAYERS = 3
BLOCK = 16
"""Rows of a block on one rank."""
POISON = 0xEE
ANSWER_S = 60.0


# vLLM's Triton kernels that map tokens to rows, run as the Python functions that they are.


class Pointer:
    """A tensor's elements from one on, some of them, as Triton sees them."""

    def __init__(self, memory: np.ndarray, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.at + more)


class Value(np.ndarray):
    """What was loaded."""

    def to(self, dtype: Any) -> Any:
        return self.astype(dtype)


class HostTriton:
    """As much of ``triton.language`` as these kernels use, for one program of a grid."""

    int32, int64, constexpr = np.int32, np.int64, int

    def __init__(self, place: Sequence[int], grid: Sequence[int]) -> None:
        self.program_id, self.num_programs = place.__getitem__, grid.__getitem__
        self.where, self.arange, self.maximum = np.where, np.arange, np.maximum

    @staticmethod
    def load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
        at = np.asarray(pointer.at)
        wanted = np.broadcast_to(np.asarray(mask, bool), at.shape)
        found = np.full(at.shape, other, pointer.memory.dtype)
        found[wanted] = pointer.memory[at[wanted]]
        return found.view(Value)

    @staticmethod
    def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
        at = np.asarray(pointer.at)
        wanted = np.broadcast_to(np.asarray(mask, bool), at.shape)
        pointer.memory[at[wanted]] = np.broadcast_to(value, at.shape)[wanted]


def run_kernel(module: Any, kernel: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> None:
    """Run a kernel of `module` for every program of the grid; tensors are on the host."""
    given = tuple(Pointer(each.numpy().reshape(-1)) if isinstance(each, torch.Tensor) else each for each in given)
    with pytest.MonkeyPatch.context() as patch:
        for place in itertools.product(*map(range, grid)):
            patch.setattr(module, "tl", HostTriton(place, grid))
            kernel(*given, **named)


class SlotMappingKernel:
    """For ``block_table._COMPUTE_SLOT_MAPPING_KERNEL``, which is refused on a CPU with context parallelism."""

    def register_warmup(self, **_: Any) -> None: ...

    def __call__(self, requests: int, tokens: int, most: int, *rest: Any) -> None:
        names = ("KV_CACHE_BLOCK_SIZE", "TOTAL_CP_WORLD_SIZE", "TOTAL_CP_RANK", "CP_KV_CACHE_INTERLEAVE_SIZE")
        named = dict(zip(names, rest[-4:], strict=True)) | {"PAD_ID": -1, "BLOCK_SIZE": 64}
        kernel = block_table.ComputeSlotMappingKernel.kernel
        run_kernel(block_table, kernel, (requests + 1,), tokens, most, *rest[:-4], **named)


def second_slots(
    rows: Mapping[int, Sequence[int]], positions: Mapping[int, Sequence[int]], part: int, parts: int, interleave: int
) -> dict[int, np.ndarray]:
    """The same by the kernel of vLLM's second model runner: by request, the row of each position; -1 = another rank's.

    :param rows: block ids by request.
    """
    width = max(map(len, rows.values()))
    table = np.zeros((len(rows), width), np.int32)
    for at, blocks in enumerate(rows.values()):
        table[at, : len(blocks)] = blocks
    counts = [len(positions[name]) for name in rows]
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    flat = torch.tensor([position for name in rows for position in positions[name]], dtype=torch.int64)
    slots = torch.full((1, len(flat) + 8), 77, dtype=torch.int64)
    ids, on = torch.arange(len(rows), dtype=torch.int32), torch.ones(1, dtype=torch.bool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second_block_table, "_load_ptr", lambda *_: Pointer(table.reshape(-1)))
        run_kernel(
            second_block_table, second_block_table._compute_slot_mappings_kernel, (1, len(rows) + 1),
            slots.shape[1], ids, starts, flat, torch.zeros(1, dtype=torch.int64), torch.tensor([width]),
            torch.tensor([BLOCK]), on, on, slots, slots.stride(0), part,
            CP_SIZE=parts, CP_INTERLEAVE=interleave, PAD_ID=-1, TRITON_BLOCK_SIZE=64,
        )  # fmt: skip
    ends = starts.tolist()
    return {name: slots[0, ends[at] : ends[at + 1]].numpy() for at, name in enumerate(rows)}


def parallel_groups(tensor: int, pipeline: int, prefill: int, decode: int) -> dict[str, list[list[int]]]:
    """Which ranks vLLM puts together, by the name of the group."""
    made: dict[str, list[list[int]]] = {}

    def record(ranks: list[list[int]], *_: Any, group_name: str, **__: Any) -> None:
        made[group_name] = ranks

    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=1, enable_elastic_ep=False),
        engram_config=None,
        model_config=SimpleNamespace(is_moe=False, architecture="LlamaForCausalLM"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.config.get_current_vllm_config", lambda: config)
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_world_size", lambda: tensor * pipeline * prefill)
        patch.setattr(torch.distributed, "get_rank", lambda: 0)
        patch.setattr(parallel_state, "init_model_parallel_group", record)
        patch.setattr(parallel_state, "get_world_group", lambda: SimpleNamespace(local_rank=0))
        for name in ("_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB"):
            patch.setattr(parallel_state, name, None, raising=False)
        with contextlib.suppress(AttributeError):  # it goes on to log what the groups that were not made say
            parallel_state.initialize_model_parallel(tensor, pipeline, prefill, decode, backend="gloo")
    return made


# An engine.


@dataclasses.dataclass
class Running:
    """A request as a rank follows it."""

    tokens: list[int]
    blocks: list[int]


class Rank:
    """One worker: its caches, its connector, and what it has found wrong.

    :param config: vLLM's, of the engine. :param number: the worker's rank.
    """

    specs: ClassVar[Mapping[str, Any]]

    def __init__(self, config: Any, number: int) -> None:
        self.config = copy.copy(config)
        self.config.parallel_config = copy.copy(config.parallel_config)
        self.config.parallel_config.rank = number
        parallel = self.config.parallel_config
        sizes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        self.parts = parallel.decode_context_parallel_size
        groups = parallel_groups(*sizes, parallel.prefill_context_parallel_size, self.parts)
        self.part = next(ranks.index(number) for ranks in groups["dcp"] if number in ranks)
        self.number, self.tensor_rank = number, number % sizes[0]
        # The rows of its KV head; latent rows are those of head 0.
        heads = 1 if config.model_config.use_mla else config.model_config.get_total_num_kv_heads()
        self.head = self.tensor_rank * heads // sizes[0]
        self.requests: dict[str, Running] = {}
        self.hits: dict[str, int] = {}
        self.read = self.wrong = 0

    def initialize_from_config(self, configs: list[Any]) -> None:
        cache = configs[self.number]
        self.config.adjust_dcp_kv_cache_interleave_size(cache)
        self.interleave = self.config.parallel_config.cp_kv_cache_interleave_size
        self.caches: dict[str, torch.Tensor] = {}
        specs = self.config.spread_specs
        for tensor in cache.kv_cache_tensors:
            raw = torch.full((tensor.size,), POISON, dtype=torch.uint8).view(torch.int8)
            views = create_kv_cache_views(
                raw, specs[tensor.layers[0]], cache.num_blocks, KVCacheLayout[cache.kv_cache_layout], tensor
            )
            self.caches |= dict(zip(tensor.layers, views, strict=True))
        self.connector = KVConnectorFactory.create_connector(
            config=self.config, role=KVConnectorRole.WORKER, kv_cache_config=cache
        )
        with pytest.MonkeyPatch.context() as patch:
            # There is no model that could be looked for among all objects of the process, nor weights to watch.
            patch.setattr(layouts, "_arithmetic", lambda *_: "")
            patch.setattr(connectors, "_loaded_weights", lambda *_: LoadedWeights(()))
            self.connector.register_kv_caches(self.caches)
        self.make_table()

    def make_table(self) -> None:
        """Make vLLM's block table of this rank."""
        with pytest.MonkeyPatch.context() as patch:
            group = SimpleNamespace(world_size=self.parts, rank_in_group=self.part)
            patch.setattr(block_table, "get_dcp_group", lambda: group)
            patch.setattr(block_table, "_COMPUTE_SLOT_MAPPING_KERNEL", SlotMappingKernel())
            self.table = block_table.BlockTable(
                BLOCK, 8, 512, 4096, pin_memory=False, device=torch.device("cpu"),
                cp_kv_cache_interleave_size=self.interleave,
            )  # fmt: skip

    def slots(self, request: Running, upto: int) -> np.ndarray:
        """The row of each token before `upto`; -1 = another rank has it."""
        self.table.add_row(request.blocks, 0)
        self.table.commit_block_table(1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block_table, "_COMPUTE_SLOT_MAPPING_KERNEL", SlotMappingKernel())
            self.table.compute_slot_mapping(1, torch.tensor([0, upto], dtype=torch.int32), torch.arange(upto))
        return self.table.slot_mapping.gpu[:upto].numpy().copy()

    def rows(self, name: str, slots: np.ndarray) -> torch.Tensor:
        """Bytes of rows of a layer: shape ``(rows, bytes)``."""
        cache = self.caches[name][torch.from_numpy(slots // BLOCK), :, torch.from_numpy(slots % BLOCK)]
        return cache.flatten(1).contiguous().view(torch.uint8)

    def fill(self, name: str, slots: np.ndarray, rows: np.ndarray) -> None:
        if not len(slots):
            return
        cache = self.caches[name]
        values = torch.from_numpy(np.ascontiguousarray(rows)).view(cache.dtype).reshape(len(slots), cache.shape[1], -1)
        cache[torch.from_numpy(slots // BLOCK), :, torch.from_numpy(slots % BLOCK)] = values

    def execute(self, output: Any) -> ModelRunnerOutput:
        """One step, in the order of vLLM's first model runner."""
        connector = self.connector
        if output.kv_connector_metadata is not None:
            connector.handle_preemptions(output.kv_connector_metadata)
        starts = self._update(output)
        context: Any = SimpleNamespace(attn_metadata={"any": None} if starts else None)
        with pytest.MonkeyPatch.context() as patch, override_forward_context(context):
            patch.setattr(kv_connector_model_runner_mixin, "get_kv_transfer_group", lambda: connector)
            mixin = kv_connector_model_runner_mixin.KVConnectorModelRunnerMixin
            with mixin._get_kv_connector_output(output) as told:
                slots = {
                    name: (start, self.slots(self.requests[name], start + output.num_scheduled_tokens[name]))
                    for name, start in starts.items()
                }
                for layer, name in enumerate(self.caches) if starts else ():
                    self._attend(layer, name, slots, hooks=connector.has_connector_metadata())
        names = list(starts)
        sampled = []
        for name in names:
            request = self.requests[name]
            whole = starts[name] + output.num_scheduled_tokens[name] == len(request.tokens)
            sampled.append([len(request.tokens) % 50] if whole else [])
            request.tokens += sampled[-1]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=told,
        )

    def _update(self, output: Any) -> dict[str, int]:
        """Follow the scheduler; by request of this step, the tokens that are there already."""
        for name in output.finished_req_ids:
            self.requests.pop(name, None)
        starts = {}
        for new in output.scheduled_new_reqs:
            (blocks,) = new.block_ids
            self.requests[new.req_id] = Running(list(new.prompt_token_ids), list(blocks))
            starts[new.req_id] = self.hits[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, more, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            request = self.requests[name]
            if name in cached.resumed_req_ids:
                request.blocks = []
            request.blocks += more[0] if more is not None else []
            starts[name] = computed
        return starts

    def _attend(self, layer: int, name: str, slots: dict[str, tuple[int, np.ndarray]], *, hooks: bool) -> None:
        """Read what is there, then write what is computed, as far as it is this rank's.

        :param slots: by request: tokens that are there, and the row of each token; -1 = another rank's.
        """
        if hooks:
            self.connector.wait_for_layer_load(name)
        cache = self.caches[name]
        width = cache[0, :, 0].numel() * cache.element_size()
        for request, (start, rows) in slots.items():
            prompt = np.array(self.requests[request].tokens[: len(rows)], np.uint64)
            wanted = kv_bytes(prompt, layer, self.head, width)
            own = np.flatnonzero(rows >= 0)
            before, computed = own[own < start], own[own >= start]
            self.wrong += int((self.rows(name, rows[before]).numpy() != wanted[before]).any(1).sum())
            self.read += len(before)
            self.fill(name, rows[computed], wanted[computed])
        if hooks:
            self.connector.save_kv_layer(name, cache, None)


class SpreadExecutor(Executor):
    """All ranks of an engine in this process, one after the other."""

    def _init_executor(self) -> None:
        self.ranks = [Rank(self.vllm_config, number) for number in range(self.parallel_config.world_size)]

    def get_kv_cache_specs(self) -> list[Any]:
        return [dict(self.vllm_config.spread_specs) for _ in self.ranks]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["LBHNC"]] * len(self.ranks)

    def set_kv_cache_layout(self, layout_name: str, *_: Any) -> None:
        from vllm.v1.attention.backends.utils import record_kv_cache_layout

        record_kv_cache_layout(self.vllm_config.cache_config, layout_name)

    def determine_available_memory(self) -> list[int]:
        return [self.vllm_config.cache_config.kv_cache_memory_bytes] * len(self.ranks)

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        for rank in self.ranks:
            rank.initialize_from_config(kv_cache_configs)

    def compile_or_warm_up_model(self) -> None: ...

    def get_kv_connector_handshake_metadata(self) -> list[Any]:
        return [{(0, rank.tensor_rank): rank.connector.get_handshake_metadata()} for rank in self.ranks]

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        outputs: list[Any] = [rank.execute(scheduler_output) for rank in self.ranks]
        assert self.kv_output_aggregator is not None
        done: Future[Any] = Future()
        done.set_result(self.kv_output_aggregator.aggregate(outputs))
        return done if non_block else done.result()

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(method)

    def check_health(self) -> None: ...

    def shutdown(self) -> None:
        for rank in self.ranks:
            rank.connector.shutdown()


class SpreadEngine:
    """An engine of `tensor` x `prefill` ranks.

    :param model: llama (2 KV heads) or mla.
    :param heads: KV heads instead.
    """

    def __init__(
        self,
        endpoint: str,
        model: str = "mla",
        *,
        tensor: int = 2,
        decode: int = 1,
        prefill: int = 1,
        interleave: int = 1,
        heads: int = 0,
        blocks: int = 200,
        specs: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        extra = arguments.pop("extra", {})
        transfer = {
            "kv_connector": "LayerflowConnector",
            "kv_connector_module_path": "layerflow.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"endpoint": endpoint, "model_content": "known", **extra},
        }
        if heads:
            arguments["hf_overrides"] = {"num_key_value_heads": heads}
        made = EngineArgs(
            model=str(MODELS / model),
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=2048,
            block_size=BLOCK,
            enforce_eager=True,
            tensor_parallel_size=tensor,
            decode_context_parallel_size=decode if prefill == 1 else 1,
            cp_kv_cache_interleave_size=interleave,
            distributed_executor_backend=SpreadExecutor,
            kv_transfer_config=transfer,
            **({"enable_prefix_caching": False, "async_scheduling": False} | arguments),
        )
        config = made.create_engine_config()
        if prefill > 1:  # which vLLM's configuration refuses on a CPU
            config.parallel_config.prefill_context_parallel_size = prefill
            config.parallel_config.decode_context_parallel_size = decode
            config.parallel_config.world_size *= prefill
        config.spread_specs = specs or layer_specs(config)
        config.cache_config.kv_cache_memory_bytes = 1 << 30
        config.cache_config.num_gpu_blocks_override = blocks
        with set_current_vllm_config(config), pytest.MonkeyPatch.context() as patch:
            patch.setattr(core, "freeze_gc_heap", lambda: None)  # which takes a second, for engines that stay
            self.core = EngineCore(config, SpreadExecutor, log_stats=False)
        self.ranks: list[Rank] = self.core.model_executor.ranks
        self._names = itertools.count()
        self.handed_on: Mapping[str, Any] = {}

    def __enter__(self) -> SpreadEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.core.shutdown()

    @property
    def spec(self) -> Any:
        """Layerflow's, of the first rank."""
        return self.ranks[0].connector._worker._layout.spec

    def serve(self, *prompts: Sequence[int], answer: int = 2, transfer: Mapping[str, Any] | None = None) -> list[int]:
        """Serve prompts that arrive together; how many tokens of each were found cached.

        :param transfer: their ``kv_transfer_params``; what comes back of the last that ends is :attr:`handed_on`.
        """
        requests = []
        for prompt in prompts:
            name = f"request-{next(self._names)}"
            extra = {"kv_transfer_params": dict(transfer)} if transfer else None
            params = SamplingParams(max_tokens=answer, ignore_eos=True, extra_args=extra)
            requests.append(Request(name, list(prompt), params, None, block_hasher=self.core.request_block_hasher))
            self.core.add_request(requests[-1])
        ends = time.monotonic() + ANSWER_S
        while self.core.scheduler.has_requests():  # also while saves still read the blocks of requests that are over
            assert time.monotonic() < ends, f"not finished: {[request.status for request in requests]}"
            outputs, _ = self.core.step()
            for each in (outputs or {}).values():
                for output in each.outputs:
                    self.handed_on = output.kv_transfer_params or self.handed_on
        return [self.ranks[0].hits[request.request_id] for request in requests]

    @property
    def wrong(self) -> int:
        """Rows that did not hold what their token's row holds, wherever attention has read it."""
        return sum(rank.wrong for rank in self.ranks)

    @property
    def read(self) -> int:
        """Rows that were read, over all layers and ranks."""
        return sum(rank.read for rank in self.ranks)


def layer_specs(config: Any) -> dict[str, Any]:
    """What the layers of a model answer when vLLM asks them for their caches."""
    if config.model_config.use_mla:
        spec: Any = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=24, dtype=torch.float32)
    else:
        heads = config.model_config.get_num_kv_heads(config.parallel_config)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=heads, head_size=8, dtype=torch.float32)
    return {f"model.layers.{layer}.self_attn.attn": spec for layer in range(LAYERS)}
