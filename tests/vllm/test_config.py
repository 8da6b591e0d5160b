"""A config that cannot work ends vLLM's start with one line that says what to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engines import Engine, EngineFailed, connector

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"endpont": "ipc:///x"}, "unknown key 'endpont'"),
    "backend": ({"backend": "yuanrong"}, "backend = 'yuanrong': no such backend"),
    "mode": ({"mode": "fast"}, "mode = 'fast'"),
    "modes that contradict": ({"use_layerwise": True, "load_async": True}, "contradict each other"),
    "a key of another system": ({"lookup_rpc_port": 5555}, "lookup_rpc_port has no use here"),
    "shared buffers": ({"layerwise_num_shared_buffers": 2}, "layerwise_num_shared_buffers has no use here"),
    "a switch that is none": ({"discard_partial_chunks": "yes"}, "discard_partial_chunks = 'yes'"),
    "chunks that are no blocks": ({"chunk_tokens": 48}, "chunk_tokens"),
    "caps of a foreign server": ({"endpoint": "ipc:///x", "layerwise_max_transfer_blocks": 4}, "has its own settings"),
    "another machine's server": ({"endpoint": "tcp://10.0.0.1:5555"}, "on this machine"),
}


LONG = set(WRONG) - {"unknown key", "chunks that are no blocks"}  # one is found first of all, one with the caches


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.campaign] if case in LONG else []) for case in WRONG]
)
def test_wrong_config(case: str, vllm: Callable[..., Engine]) -> None:
    extra, message = WRONG[case]
    with pytest.raises(EngineFailed) as failed:
        vllm("llama", kv_transfer_config=connector(**({"endpoint": None} | extra)))
    last = str(failed.value).splitlines()[-1]
    assert last.startswith("layerflow.errors."), last
    assert message in last, last
