"""vLLM-Ascend in a process of its own, and what tests ask of it beside what they ask of any vLLM."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import engines
import scenario

BLOCK = 128
"""vLLM-Ascend's block size, in tokens."""
PER_MODEL: dict[str, dict[str, Any]] = {
    # vLLM-Ascend's latent attention computes in bfloat16 whatever the model does, and brings its own rotary operators.
    "mla": {"dtype": "bfloat16", "compilation_config": {}}
}
"""Arguments of ``vllm.LLM`` in place of those of vLLM on a CPU."""
STAND_IN = Path(__file__).parent / "standin"

Hooks = list[dict[str, Counter[str]]]
"""By forward pass: by hook, how often it was called for each layer."""


def ascend_store(**extra: Any) -> dict[str, Any]:
    """A ``kv_transfer_config`` that names vLLM-Ascend's own pool, layer by layer, over memcache."""
    given = {"backend": "memcache", "use_layerwise": True, "lookup_rpc_port": "0"} | extra
    return {"kv_connector": "AscendStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": given}


class AscendScenario(scenario.Scenario):
    """One vLLM-Ascend, its kernels computed on the host. Watches the connector's hooks from the start."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__(arguments)
        self._passes: Hooks = []
        if "kv_transfer_config" in arguments:
            self._watch()

    def believe_misses(self, for_s: float) -> None:
        """For so long AscendStoreConnector believes that a block is not stored; of itself for 30 s."""
        scheduler = self._core.scheduler.connector.connector_scheduler
        scheduler._lw_hit_cache_ttl = for_s
        scheduler._lw_block_hit_cache.clear()

    def wipe(self) -> int:
        """Fill the whole KV cache with NaN: what is not loaded afterwards spoils the answer. Returns its tensors."""
        from host_arithmetic import on_host

        self.reset(False)
        runner = self._core.model_executor.driver_worker.worker.model_runner
        tensors = [on_host(part) for layer in runner.kv_caches for part in layer]
        for tensor in tensors:
            tensor.fill_(float("nan"))
        return len(tensors)

    def layers(self) -> list[str]:
        """The names of the layers that have a KV cache."""
        groups = self._core.scheduler.kv_cache_config.kv_cache_groups
        return [name for group in groups for name in group.layer_names]

    def hooks(self) -> Hooks:
        """The hooks of each pass since the last call."""
        seen, self._passes[:] = list(self._passes), []
        return seen

    def stand_in_copies(self) -> dict[str, int]:
        """What AscendStoreConnector has moved to and from the store that stands in for memcache."""
        return dict(sys.modules["memcache_hybrid"].COPIES)

    def _watch(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector, passes = get_kv_transfer_group(), self._passes

        def count(name: str) -> None:
            method = getattr(connector, name)

            def counted(*given: Any, **named: Any) -> Any:
                if name == "bind_connector_metadata":
                    passes.append({"wait_for_layer_load": Counter(), "save_kv_layer": Counter()})
                else:
                    passes[-1][name][given[0]] += 1
                return method(*given, **named)

            setattr(connector, name, counted)

        for name in ("bind_connector_metadata", "wait_for_layer_load", "save_kv_layer"):
            count(name)


def serve(pipe: Any, arguments: dict[str, Any], log: str) -> None:
    """As :func:`scenario.serve`."""
    import machine  # noqa: F401  before vLLM
    from host_arithmetic import HostArithmetic

    sys.path.insert(0, str(STAND_IN))
    with HostArithmetic():
        scenario.serve(pipe, arguments, log, AscendScenario)


class AscendEngine(engines.Engine):
    """See :class:`engines.Engine`."""

    preload = ("machine", "vllm.entrypoints.llm", "vllm_ascend.patch.worker", "scenario")
    patience = 10  # its kernels are computed on the host
    common: ClassVar[Mapping[str, Any]] = {
        **engines.COMMON,
        "block_size": BLOCK,
        "max_num_seqs": 8,
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "additional_config": {"enable_cpu_binding": False},
    }
    serve = staticmethod(serve)

    def wipe(self) -> None:
        """Leave nothing in the KV cache but NaN."""
        self.assert_no_block_lost()
        assert self._ask("wipe")

    def layers(self) -> list[str]:
        """The names of the layers that have a KV cache."""
        return self._ask("layers")

    def hooks(self) -> Hooks:
        """See :meth:`AscendScenario.hooks`."""
        return self._ask("hooks")

    def believe_misses(self, for_s: float) -> None:
        """See :meth:`AscendScenario.believe_misses`."""
        self._ask("believe_misses", for_s)

    def failed_loads(self) -> int:
        """Requests of which a load has failed, by layerflow's count."""
        return int(self._ask("figures").get("failed_loads", 0))

    def stand_in_copies(self) -> dict[str, int]:
        """See :meth:`AscendScenario.stand_in_copies`."""
        return self._ask("stand_in_copies")
