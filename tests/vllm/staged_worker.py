"""A worker with which vLLM runs pipeline stages on a CPU without compiling the model.

vLLM makes the buffers that a stage receives into when it warms up, which it skips there.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class StagedWorker(CPUWorker):  # type: ignore[misc]
    """Makes these buffers with the model."""

    def load_model(self, *given: Any, **named: Any) -> None:
        """As vLLM's."""
        super().load_model(*given, **named)
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=self.scheduler_config.max_num_batched_tokens,
                dtype=self.model_config.dtype,
                device=self.device,
            )
