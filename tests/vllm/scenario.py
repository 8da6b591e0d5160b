"""What runs in the vLLM processes of these tests: one engine, driven over a pipe, one question at a time.

Forked from a server that has imported vLLM already, which is most of an engine's start.
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing.connection
import os
import random
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from models import EYES

DRAIN_S = 30.0
LIKELIEST = 8
"""So many tokens are compared in likelihood."""
LOOKUP_S, CONNECT_S, START_S = 5.0, 30.0, 120.0
Prompt = Sequence[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What vLLM said to one prompt.

    :param tokens: generated ones.
    :param cached: prompt tokens that were not computed, from vLLM's own cache and from layerflow.
    :param reason: why it ended: ``length``, ``abort``, ``error``.
    :param transfer: the response's ``kv_transfer_params``.
    """

    tokens: tuple[int, ...]
    cached: int
    reason: str
    transfer: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as vLLM is told of it.

    :param number: vLLM's id: it reads the files at `path` once per id.
    :param inplace: read them again, under the same id.
    """

    name: str
    number: int
    path: str
    inplace: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of random pixels, for a model that sees.

    :param seed: of its pixels.
    :param uuid: what the client calls it.
    """

    seed: int
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request says besides its prompt.

    :param pictures: one for each place in the prompt that asks for one.
    :param images: (first placeholder, placeholders, identifier); only the connector sees them, the model has no eyes.
    :param transfer: ``kv_transfer_params``.
    """

    adapter: Adapter | None = None
    salt: str | None = None
    pictures: tuple[Picture, ...] = ()
    images: tuple[tuple[int, int, str], ...] = ()
    transfer: dict[str, Any] | None = None


PLAIN = Terms()


class Scenario:
    """One vLLM and what a test may ask of it. Greedy; never stops at an end token.

    :param arguments: of ``vllm.LLM``; ``ahead``: schedule each step before the output of the one before it is seen;
        ``unread``: layerflow's reading of the weights begins with :meth:`read_weights`.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM  # here, because the tests' own process imports this file too

        _be_patient()
        if arguments.pop("ahead", False):
            schedule_ahead()
        self._read = threading.Event()
        if arguments.pop("unread", False):
            _read_late(self._read)
        self._figures = _sum_figures()
        self._states: tuple[dict[Any, bytes], ...] | None = None
        self._llm = LLM(**arguments)
        self._engine = self._llm.llm_engine
        self._names = itertools.count()
        self._preemptions = 0
        scheduler = self._engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def counted(*given: Any, **named: Any) -> Any:
            self._preemptions += 1
            return preempt(*given, **named)

        scheduler._preempt_request = counted

    def generate(self, prompts: Sequence[Prompt], max_tokens: int, terms: Sequence[Terms]) -> list[Answer]:
        """Serve prompts that arrive together, each on its terms where there are any."""
        return self.churn(prompts, max_tokens, {}, terms)

    def churn(
        self, prompts: Sequence[Prompt], max_tokens: int, aborts: dict[int, int], terms: Sequence[Terms] = ()
    ) -> list[Answer]:
        """Serve prompts that arrive together.

        :param aborts: numbers of prompts, to the step before which they are aborted.
        """
        from vllm import SamplingParams

        names = {str(next(self._names)): index for index, _ in enumerate(prompts)}
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True)
        for name, index in names.items():
            self._add(name, prompts[index], sampling, terms[index] if terms else PLAIN)
        answers = [Answer((), 0, "abort") for _ in prompts]
        for step in itertools.count():
            gone = [name for name, index in names.items() if aborts.get(index) == step]
            if gone:
                self._engine.abort_request(gone)
            if not self._engine.has_unfinished_requests():
                return answers
            for output in self._engine.step():
                if output.finished:
                    made = output.outputs[0]
                    tokens, cached = tuple(made.token_ids), output.num_cached_tokens or 0
                    said = Answer(tokens, cached, str(made.finish_reason), output.kv_transfer_params)
                    answers[names[output.request_id]] = said
        raise AssertionError("unreachable")

    def _add(self, name: str, asked: Prompt, sampling: Any, terms: Terms) -> None:
        from vllm.lora.request import LoRARequest

        tokens: dict[str, Any] = {"prompt_token_ids": list(asked)}
        if terms.salt is not None:
            tokens["cache_salt"] = terms.salt
        if terms.pictures:
            tokens["multi_modal_data"] = {"image": [pixels(each.seed) for each in terms.pictures]}
            if any(each.uuid for each in terms.pictures):
                tokens["multi_modal_uuids"] = {"image": [each.uuid for each in terms.pictures]}
        if terms.transfer is not None:
            sampling = copy.copy(sampling)
            sampling.extra_args = {"kv_transfer_params": copy.deepcopy(terms.transfer)}
        lora = None
        if terms.adapter is not None:
            told = terms.adapter
            lora = LoRARequest(told.name, told.number, told.path, load_inplace=told.inplace)
        if not terms.images:
            return self._engine.add_request(name, tokens, sampling, lora_request=lora)
        connector = self._engine.engine_core.engine_core.scheduler.connector
        arrived = connector.on_new_request

        def seeing(request: Any) -> None:
            request.mm_features = [feature(*image) for image in terms.images]
            arrived(request)
            request.mm_features = []

        connector.on_new_request = seeing
        try:
            self._engine.add_request(name, tokens, sampling, lora_request=lora)
        finally:
            connector.on_new_request = arrived

    def pool(self, prompts: Sequence[Prompt], task: str) -> list[Any]:
        """What a pooling model makes of prompts that arrive together, as nested lists."""
        asked = [{"prompt_token_ids": list(each)} for each in prompts]
        outputs = self._llm.encode(asked, pooling_task=task, use_tqdm=False)
        self.free_blocks()  # what a prompt without further steps has saved is told in steps that compute nothing
        return [output.outputs.data.float().tolist() for output in outputs]

    def generate_embedded(self, prompts: Sequence[Prompt], max_tokens: int) -> list[tuple[int, ...]]:
        """Serve prompts that are given as embeddings: rows of a table of random ones."""
        import torch
        from vllm import SamplingParams

        size = self._engine.vllm_config.model_config.get_hidden_size()
        table = torch.randn(2048, size, generator=torch.Generator().manual_seed(0))
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True)
        asked = [{"prompt_embeds": table[list(each)]} for each in prompts]
        return [tuple(each.outputs[0].token_ids) for each in self._llm.generate(asked, sampling, use_tqdm=False)]

    def read_weights(self) -> bool:
        """Let layerflow read the weights; returns once it has, and tells whether it could."""
        self._read.set()
        return all(each._reading.wait(DRAIN_S) for each in _CONNECTORS)

    def likely(self, prompts: Sequence[Prompt], max_tokens: int, within: float) -> list[list[list[int]]]:
        """The tokens of each answer; behind each, others that are less likely by no more than `within`."""
        from vllm import SamplingParams

        names = {str(next(self._names)): index for index, _ in enumerate(prompts)}
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=LIKELIEST, detokenize=False, ignore_eos=True
        )
        for name, index in names.items():
            self._add(name, prompts[index], sampling, PLAIN)
        answers: list[list[list[int]]] = [[] for _ in prompts]
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    made = output.outputs[0]
                    answers[names[output.request_id]] = [
                        sorted(
                            (each for each in row if row[each].logprob >= row[token].logprob - within),
                            key=lambda each, token=token: each != token,
                        )
                        for token, row in zip(made.token_ids, made.logprobs, strict=True)
                    ]
        return answers

    def preemptions(self) -> int:
        """How often a running request's blocks were taken away."""
        return self._preemptions

    def figures(self) -> dict[str, float]:
        """What layerflow has counted in this process since it started, see :data:`~..worker.figures.FIGURES`."""
        return dict(self._figures)

    def watch_states(self) -> tuple[dict[Any, bytes], ...]:
        """Recurrent states since the first call: saved, loaded, and those that a step goes on from."""
        if self._states is None:
            self._states = _watch_states()
        return self._states

    def reset(self, pool: bool) -> bool:
        """Forget vLLM's own prefix cache, so that later hits are layerflow's; and layerflow's pool if `pool`."""
        return bool(self._llm.reset_prefix_cache(reset_connector=pool))

    def replace_weights(self, loaded: bool = False) -> None:
        """Other weights in place, the same ones each time: every token gets the embedding of another.

        :param loaded: by the model's own ``load_weights``; else written into its parameters.
        """
        self._core.model_executor.collective_rpc("apply_model", args=(_load if loaded else _replace,))

    def sleep(self, mode: str) -> None:
        """Pause in this mode, and unmap the cache."""
        self._core.sleep(level=1, mode=mode)

    def unmap(self) -> None:
        """Unmap the cache without a pause."""
        self._core.model_executor.sleep(1)

    def wake(self) -> None:
        """Map it again, and go on."""
        assert self._core.wake_up()

    def generate_over_sleep(self, asked: Prompt, max_tokens: int, steps: int, how: str) -> Answer:
        """Serve a prompt over a sleep of the engine, or ``discard``: while its cache's memory is given back."""
        self._begin(asked, max_tokens, steps)
        if how == "discard":
            self._core.pause_scheduler(mode="keep", clear_cache=True)
            self._core.model_executor.discard(("kv_cache",))
            self._core.wake_up(["kv_cache"])
        else:
            self.sleep(how)
            self.wake()
        return self._finish()

    def generate_over(self, asked: Prompt, max_tokens: int, steps: int, paused: bool) -> Answer:
        """Serve a prompt whose weights are replaced after some steps; with `paused`, as a trainer does it."""
        self._begin(asked, max_tokens, steps)
        if paused:
            self._core.pause_scheduler(mode="keep", clear_cache=True)
        else:
            self._llm.reset_prefix_cache(reset_connector=True)
        self.replace_weights()
        if paused:
            self._core.resume_scheduler()
        return self._finish()

    def _begin(self, asked: Prompt, max_tokens: int, steps: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True)
        self._engine.add_request(str(next(self._names)), {"prompt_token_ids": list(asked)}, sampling)
        for _ in range(steps):
            self._engine.step()

    def _finish(self) -> Answer:
        while True:
            for output in self._engine.step():
                if output.finished:
                    made = output.outputs[0]
                    return Answer(tuple(made.token_ids), output.num_cached_tokens or 0, str(made.finish_reason))

    @property
    def _core(self) -> Any:
        return self._engine.engine_core.engine_core

    def free_blocks(self) -> tuple[int, int]:
        """Blocks that are free, and all that can be. Blocks whose freeing was delayed get some steps to come back."""
        pool = self._engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        total = pool.num_gpu_blocks - 1  # block 0 is the null block
        deadline = time.monotonic() + DRAIN_S
        while pool.get_num_free_blocks() < total and time.monotonic() < deadline:
            self._engine.step()
            time.sleep(0.001)
        return pool.get_num_free_blocks(), total

    def break_loads(self, share: float) -> None:
        """This share of the loads of running steps fails before its first layer."""
        self._core.model_executor.collective_rpc(_break_loads, args=(share,))

    def break_plans(self, count: int) -> None:
        """The next so many loads that vLLM was promised cannot be planned."""
        from layerflow.connectors.vllm.scheduler import scheduler

        plan_load = scheduler.plan_load
        left = itertools.count(1)

        def broken(*given: Any, **named: Any) -> int:
            if next(left) <= count:
                raise RuntimeError("broken by the test")
            return plan_load(*given, **named)

        scheduler.plan_load = broken

    def metric(self, name: str) -> float:
        """A counter of vLLM's own; it counts unless ``disable_log_stats`` is set."""
        return sum(each.value for each in self._llm.get_metrics() if each.name == name)

    def facts(self) -> dict[str, Any]:
        """The sizes that vLLM settled on."""
        config = self._engine.vllm_config
        return {"block_size": config.cache_config.block_size, "steps_in_flight": config.max_concurrent_batches}

    def close(self) -> None:
        """End the engine as vLLM ends it."""
        self._engine.engine_core.shutdown()


def _be_patient() -> None:
    """What comes late is a miss, be it an answer, a connection or the digest of the weights; tests have the time."""
    from layerflow.agent.control import Control
    from layerflow.agent.lookups import Lookups
    from layerflow.connectors.vllm import connector
    from layerflow.connectors.vllm.scheduler import scheduler

    connector.START_WAIT_S = START_S
    scheduler.DEFAULT_LOOKUP_TIMEOUT_S = CONNECT_S  # where the workers' layouts come with a step's output
    scheduler.SchedulerSide.meet_workers.__defaults__ = (CONNECT_S,)  # where they come before
    for client, name in ((Lookups, "timeout_s"), (Control, "lookup_timeout_s")):
        defaults = client.__init__.__kwdefaults__
        assert defaults is not None
        defaults[name] = LOOKUP_S


def _sum_figures() -> dict[str, float]:
    """What every worker of this process counts, summed up beside vLLM's own intervals."""
    from layerflow.connectors.vllm.worker.figures import StepCounters

    sums: dict[str, float] = {}
    add = StepCounters.add

    def counted(counters: StepCounters, name: str, value: float) -> None:
        sums[name] = sums.get(name, 0) + value
        add(counters, name, value)

    StepCounters.add = counted  # type: ignore[method-assign]
    return sums


def _watch_states() -> tuple[dict[Any, bytes], ...]:
    """See :meth:`Scenario.watch_states`."""
    from layerflow.connectors.vllm.worker.worker import WorkerSide

    saved: dict[Any, bytes] = {}
    loaded: dict[Any, bytes] = {}
    current: dict[Any, bytes] = {}
    wait_tails, end = WorkerSide.wait_tails, WorkerSide.end

    def note(side: Any, part: Any, into: dict[Any, bytes]) -> None:
        group = side._layout.spec.groups[part.group]
        for piece in part.pieces if group.rules.exact else ():
            for layer in group.layers:
                for name, plane in side._layout.tensors[layer].items():
                    into[piece.digest, layer, name] = plane[int(part.table[piece.blocks.start])].numpy().tobytes()

    def after_tails(side: Any) -> None:
        wait_tails(side)
        known: set[tuple[str, int]] = set()
        for part in side._plan.tails:
            note(side, part, current if (part.request, part.group) in known else loaded)
            known.add((part.request, part.group))

    def before_end(side: Any) -> None:
        for part in side._plan.saves.parts if side._plan.saves else ():
            note(side, part, saved)
        end(side)

    WorkerSide.wait_tails, WorkerSide.end = after_tails, before_end  # type: ignore[method-assign]
    return saved, loaded, current


_CONNECTORS: list[Any] = []


def _read_late(go: threading.Event) -> None:
    """A start does not wait for the digest of the weights, and their reading waits for `go`."""
    from layerflow.connectors.vllm import connector, layout

    with_content, register = layout.Layout.with_content, connector.LayerflowConnector.register_kv_caches

    def registered(self: Any, kv_caches: Any) -> None:
        _CONNECTORS.append(self)
        register(self, kv_caches)

    def late(self: Any, stop: threading.Event) -> Any:
        go.wait()
        return with_content(self, stop)

    connector.START_WAIT_S = 0.0
    connector.LayerflowConnector.register_kv_caches = registered
    layout.Layout.with_content = late  # type: ignore[method-assign]


def _break_loads(_worker: Any, share: float) -> None:
    """In a worker's process."""
    from layerflow.agent import Step

    if not hasattr(Step, "unbroken"):
        Step.unbroken = Step.wait_layer, Step.wait_all  # type: ignore[attr-defined]
    wait_layer, wait_all = Step.unbroken  # type: ignore[attr-defined]

    def broken(step: Step) -> bool:
        return random.Random(step.number).random() < share

    def cut(step: Step, layer: int) -> Any:
        if broken(step):
            step.fence("broken by the test")
        return wait_layer(step, layer)

    def cut_all(step: Step) -> Any:
        if broken(step):
            step.fence("broken by the test")
        return wait_all(step)

    Step.wait_layer, Step.wait_all = cut, cut_all  # type: ignore[method-assign]


def pixels(seed: int) -> Any:
    """An image that vLLM's processors need not resize, the same for the same seed."""
    from PIL import Image

    side = EYES["image_size"]
    return Image.frombytes("RGB", (side, side), random.Random(seed).randbytes(3 * side * side))


def feature(offset: int, length: int, identifier: str) -> Any:
    """An image as vLLM's Request has it; what it shows follows from its identifier."""
    import torch
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )

    where = PlaceholderRange(offset=offset, length=length)
    pixels = torch.tensor(list(identifier.encode()), dtype=torch.float32)
    data = MultiModalKwargsItem({"pixel_values": MultiModalFieldElem(data=pixels, field=MultiModalBatchedField())})
    return MultiModalFeatureSpec(data=data, modality="image", identifier=identifier, mm_position=where)


def schedule_ahead() -> None:
    """vLLM's asynchronous scheduler, though the platform is a CPU: its workers stay as they are.

    They compute a step while it is handed to them, so the next one is scheduled before vLLM has looked at its output,
    as on a device.
    """
    from vllm.v1.engine.core import EngineCore

    initialize = EngineCore._initialize_kv_caches

    def between_workers_and_scheduler(core: Any, vllm_config: Any) -> Any:
        vllm_config.scheduler_config.async_scheduling = True
        return initialize(core, vllm_config)

    EngineCore._initialize_kv_caches = between_workers_and_scheduler


def _replace(model: Any) -> None:
    for name, weights in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            weights.data.copy_(weights.data.roll(7, 0))


def _load(model: Any) -> None:
    own = dict(model.named_parameters())
    model.load_weights((name, own[name].data.roll(7, 0)) for name in own if name.endswith("embed_tokens.weight"))


def serve(
    pipe: multiprocessing.connection.Connection, arguments: dict[str, Any], log: str, kind: type[Scenario] = Scenario
) -> None:
    """Start an engine and answer ``(method, arguments)`` until the pipe closes.

    Sends ``(True, result)``, or ``(False, traceback)``.

    :param log: a file that takes the engine's output. :param kind: what answers.
    """
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        scenario = kind(arguments)
        pipe.send((True, scenario.facts()))
    except Exception:  # noqa: BLE001  the test looks at it
        pipe.send((False, traceback.format_exc()))
        return
    while True:
        try:
            name, given = pipe.recv()
        except EOFError:
            return scenario.close()
        try:
            pipe.send((True, getattr(scenario, name)(*given)))
        except Exception:  # noqa: BLE001  the test looks at it
            pipe.send((False, traceback.format_exc()))
