"""Both sides of the vLLM connector without vLLM: where it is missing, its base classes are stood in for."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest

PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1"
CLASSES = {
    "base": ("KVConnectorHandshakeMetadata", "KVConnectorMetadata", "KVConnectorWorkerMetadata"),
    "metrics": ("KVConnectorPromMetrics", "KVConnectorStats"),
}


def import_without_vllm(*modules: str) -> None:
    """Import modules that take nothing but base classes from vLLM; nobody else sees the stand-ins."""
    parts = PACKAGE.split(".")
    with pytest.MonkeyPatch.context() as patch:
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            patch.setitem(sys.modules, name, ModuleType(name))
        for file, classes in CLASSES.items():
            stand_in = ModuleType(f"{PACKAGE}.{file}")
            for name in classes:
                setattr(stand_in, name, type(name, (), {}))
            patch.setitem(sys.modules, stand_in.__name__, stand_in)
        for module in modules:
            importlib.import_module(module)


_vllm = find_spec("vllm")  # a package without a file is the tests' own folder of that name
if _vllm is None or _vllm.origin is None:
    import_without_vllm("layerflow.connectors.vllm.scheduler.scheduler", "layerflow.connectors.vllm.worker.worker")
