"""The vLLM connector's scheduler side without vLLM: where it is missing, its base classes are stood in for."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
CLASSES = ("KVConnectorHandshakeMetadata", "KVConnectorMetadata", "KVConnectorWorkerMetadata")


def import_without_vllm(module: str) -> None:
    """Import a module that takes nothing but base classes from vLLM; nobody else sees the stand-ins."""
    parts = BASE.split(".")
    stand_in = ModuleType(BASE)
    for name in CLASSES:
        setattr(stand_in, name, type(name, (), {}))
    with pytest.MonkeyPatch.context() as patch:
        for end in range(1, len(parts)):
            name = ".".join(parts[:end])
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, BASE, stand_in)
        importlib.import_module(module)


_vllm = find_spec("vllm")  # a package without a file is the tests' own folder of that name
if _vllm is None or _vllm.origin is None:
    import_without_vllm("layerflow.connectors.vllm.scheduler")
