"""vLLM processes as tests see them: started by forking, asked over a pipe, killed at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import models
import pytest
import scenario
from e2e.fork_server import fork_server
from scenario import PLAIN, Answer, Prompt, Terms

START_S = 240.0
ANSWER_S = 120.0
MODELS = Path(sys.prefix) / "models"
ENVIRONMENT = {
    # One process and one thread: an engine starts in seconds and shares two cores with others.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
PER_MODEL: dict[str, dict[str, Any]] = {
    "llama": {"dtype": "float32"},
    # vLLM's own rotary operator for CPUs is wrong for this model: greedy tokens would differ for its reasons.
    "mla": {"dtype": "float32", "compilation_config": {"custom_ops": ["none"]}},
    "deepseek32": {"dtype": "bfloat16"},
    "gemma3": {"dtype": "float32"},
    "gptoss": {"dtype": "bfloat16"},
    "phi3": {"dtype": "float32"},
    # Images are prepared by programs that have a tokenizer. No cache between them: each request's pixels are its own.
    "idefics3": {"dtype": "float32", "skip_tokenizer_init": False, "mm_processor_cache_gb": 0},
    "hrmtext": {"dtype": "float32"},
    "classifier": {"dtype": "float32", "runner": "pooling", "skip_tokenizer_init": False},
    "qwen3moe": {"dtype": "bfloat16"},
    # Recurrent states are kept at block boundaries only where vLLM's own prefix cache is on.
    "qwen3next": {"dtype": "bfloat16", "enable_prefix_caching": True, "mamba_cache_mode": "align"},
    "qwen3nextdense": {"dtype": "bfloat16", "enable_prefix_caching": True, "mamba_cache_mode": "align"},
}
VERSION = tuple(int(part) for part in version("vllm").partition("+")[0].split("."))
# vLLM itself cannot serve these on a CPU.
UNSERVED = ({"mla", "qwen3next", "qwen3nextdense", "idefics3"} if VERSION < (0, 28) else set()) | (
    {"hrmtext"} if VERSION < (0, 32) else set()
)
# Several cache groups: this vLLM could not recover from a load that failed, so the connector only saves.
ONLY_SAVED = {"gemma3", "gptoss"} if VERSION < (0, 28) else set()
loads_groups = pytest.mark.skipif(bool(ONLY_SAVED), reason="this vLLM only saves models of several cache groups")
COMMON: dict[str, Any] = {
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "block_size": 32,
    "enable_prefix_caching": False,
    "distributed_executor_backend": "uni",
    "kv_cache_memory_bytes": 64 << 20,
}


def connector(endpoint: str | None, role: str = "kv_both", policy: str = "recompute", **extra: Any) -> dict[str, Any]:
    """A ``kv_transfer_config`` that names layerflow; without an endpoint the server is embedded."""
    if endpoint is not None:
        extra["endpoint"] = endpoint
    return {
        "kv_connector": "LayerflowConnector",
        "kv_connector_module_path": "layerflow.connectors.vllm",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


def multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    """A ``kv_transfer_config`` of several connectors."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


class EngineFailed(AssertionError):
    """The engine's process raised, hung or died; the message ends with its own words."""


class Engine:
    """A vLLM in a process of its own.

    :param model: of :data:`models.MODELS`.
    :param log: takes its output.
    :param arguments: of ``vllm.LLM``, over the ones for all and for the model (``folder``: where it lies).
    :raises EngineFailed: it did not start.
    """

    #: What its process has imported when it is forked.
    preload: ClassVar[Sequence[str]] = ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "scenario")
    environment: ClassVar[Mapping[str, str]] = ENVIRONMENT
    #: Arguments of ``vllm.LLM`` for every model.
    common: ClassVar[Mapping[str, Any]] = COMMON
    #: So many times as long as others is waited for its start and its answers.
    patience: ClassVar[int] = 1
    #: What runs in the process.
    serve: ClassVar[Callable[..., None]] = staticmethod(scenario.serve)

    def __init__(self, model: str, log: Path, **arguments: Any) -> None:
        assert model in models.MODELS
        if model in UNSERVED:
            pytest.skip(f"vLLM {version('vllm')} cannot serve {model} on a CPU")
        self._log = log
        context = fork_server(self.preload, self.environment)
        self._pipe, theirs = context.Pipe()
        folder = {"model": str(arguments.pop("folder", MODELS / model))}
        merged = {**self.common, **PER_MODEL[model], **arguments, **folder}
        self.process = context.Process(target=self.serve, args=(theirs, merged, str(log)))
        self.process.start()
        theirs.close()
        try:
            self.facts: dict[str, Any] = self._hear(START_S)
        except EngineFailed:
            self.kill()
            raise

    def generate(self, *prompts: Prompt, max_tokens: int = 6, terms: Sequence[Terms] = ()) -> list[Answer]:
        """Serve prompts that arrive together, each on its terms where there are any."""
        return self._ask("generate", list(prompts), max_tokens, list(terms))

    def one(self, prompt: Prompt, max_tokens: int = 6, terms: Terms = PLAIN) -> Answer:
        """Serve one prompt."""
        return self.generate(prompt, max_tokens=max_tokens, terms=[terms])[0]

    def begin(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int,
        aborts: dict[int, int] | None = None,
        terms: Sequence[Terms] = (),
    ) -> None:
        """Serve prompts that arrive together, without waiting for the answers; some are aborted before a step."""
        self._pipe.send(("churn", (list(prompts), max_tokens, aborts or {}, list(terms))))

    def finish(self) -> list[Answer]:
        """The answers to what was begun."""
        return self._hear(ANSWER_S)

    def pool(self, *prompts: Prompt, task: str) -> list[Any]:
        """What a pooling model makes of prompts that arrive together."""
        return self._ask("pool", list(prompts), task)

    def generate_embedded(self, *prompts: Prompt, max_tokens: int = 6) -> list[tuple[int, ...]]:
        """Serve prompts that are given as embeddings: the tokens of each answer."""
        return self._ask("generate_embedded", list(prompts), max_tokens)

    def read_weights(self) -> None:
        """Let layerflow read the weights of an engine that was started with ``unread``."""
        assert self._ask("read_weights")

    def likely(self, *prompts: Prompt, max_tokens: int, within: float) -> list[list[list[int]]]:
        """The tokens of each answer; behind each, others that are less likely by no more than `within`.

        :param within: in log probability.
        """
        return self._ask("likely", list(prompts), max_tokens, within)

    def preemptions(self) -> int:
        """How often vLLM has taken a running request's blocks away."""
        return self._ask("preemptions")

    def metric(self, name: str) -> float:
        """A counter of vLLM's own, of an engine with ``disable_log_stats=False``."""
        return self._ask("metric", name)

    def loads(self) -> tuple[int, int]:
        """Requests that were loaded in their step, and in the background."""
        figures = self._ask("figures")
        return int(figures.get("step_loads", 0)), int(figures.get("background_loads", 0))

    def watch_states(self) -> tuple[dict[Any, bytes], ...]:
        """Recurrent states by object, layer and plane, since the first call.

        As saved; as loaded, when the pass begins; and as the step goes on from them.
        """
        return self._ask("watch_states")

    def reset(self, *, pool: bool = False) -> None:
        """Forget vLLM's own prefix cache, and what layerflow's pool holds if `pool`.

        :raises EngineFailed: blocks of it are still in use.
        """
        self.assert_no_block_lost()
        if not self._ask("reset", pool):
            raise EngineFailed("vLLM's prefix cache is still in use")

    def break_loads(self, share: float) -> None:
        """This share of the loads of running steps fails before its first layer."""
        self._ask("break_loads", share)

    def break_plans(self, count: int) -> None:
        """The next so many loads that vLLM was promised cannot be planned."""
        self._ask("break_plans", count)

    def reset_now(self) -> None:
        """As :meth:`reset` with the pool, whatever is under way.

        :raises EngineFailed: vLLM's own cache could not be cleared.
        """
        if not self._ask("reset", True):
            raise EngineFailed("vLLM's prefix cache is still in use")

    def sleep(self, mode: str) -> None:
        """As ``/sleep``: pause, then unmap the cache. For a :class:`sleeping_worker.SleepingWorker`."""
        self._ask("sleep", mode)

    def unmap(self) -> None:
        """Let the workers unmap their caches, as vLLM does behind a pause, without the pause."""
        self._ask("unmap")

    def wake(self) -> None:
        """As ``/wake_up``: the cache is there again, and empty."""
        self._ask("wake")

    def one_over_sleep(self, prompt: Prompt, max_tokens: int, steps: int, how: str) -> Answer:
        """Serve a prompt; after `steps` steps of it the engine sleeps, or gives its cache back, and goes on."""
        return self._ask("generate_over_sleep", prompt, max_tokens, steps, how)

    def replace_weights(self, *, loaded: bool = False) -> None:
        """Other weights in place, the same ones each time; by the model's ``load_weights`` if `loaded`."""
        self._ask("replace_weights", loaded)

    def one_with_reset(self, prompt: Prompt, max_tokens: int, steps: int) -> Answer:
        """Serve a prompt; after `steps` steps of it a reset without a pause, and new weights."""
        return self._ask("generate_over", prompt, max_tokens, steps, False)

    def one_over_a_pause(self, prompt: Prompt, max_tokens: int, steps: int) -> Answer:
        """Serve a prompt; after `steps` steps of it the engine is paused, gets new weights, and goes on."""
        return self._ask("generate_over", prompt, max_tokens, steps, True)

    def assert_no_block_lost(self) -> None:
        """Every block of vLLM's cache is free again."""
        free, total = self._ask("free_blocks")
        assert free == total, f"{total - free} of {total} blocks were never freed"

    def output(self) -> str:
        """What it has logged."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.join()
        self._pipe.close()

    def dismiss(self) -> None:
        """Let it end by itself."""
        self._pipe.close()

    def close(self) -> None:
        """Let it end by itself; make it, if it does not."""
        self.dismiss()
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _ask(self, method: str, *given: Any) -> Any:
        self._pipe.send((method, given))
        return self._hear(ANSWER_S)

    def _hear(self, timeout_s: float) -> Any:
        try:
            timeout_s *= self.patience
            if not self._pipe.poll(timeout_s):
                raise EngineFailed(f"vLLM says nothing for {timeout_s:g} s\n{self._tail()}")
            well, said = self._pipe.recv()
        except EOFError:
            self.process.join(5)
            raise EngineFailed(f"vLLM's process died, code {self.process.exitcode}\n{self._tail()}") from None
        if not well:
            raise EngineFailed(f"{self._tail()}\n{said}")
        return said

    def _tail(self) -> str:
        return "\n".join(self.output().splitlines()[-20:])


def close(engines: Collection[Engine]) -> None:
    """Close them, all at once."""
    for engine in engines:
        engine.dismiss()
    for engine in engines:
        engine.close()
