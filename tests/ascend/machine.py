"""Lets vLLM-Ascend start on a machine that has neither an NPU nor CANN: what it imports and calls there, in its place.

Over the emulated CANN, with operators by :mod:`host_arithmetic` and :mod:`kernels`. All else is vLLM-Ascend's and
torch_npu's own code. All of it is in place once this is imported, which must be before vLLM is.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import Any

import recurrent
import sparse  # noqa: F401  has operators
import torch
import torch_npu  # noqa: F401  makes the device
from kernels import SlotMapping, slots_of_groups

SOURCE = Path(importlib.util.find_spec("vllm_ascend").submodule_search_locations[0])  # type: ignore[union-attr, index]
# Models that see import torchvision, which has no build for CPUs beside this torch. The patch of Qwen3.5 is that of all
# gated delta nets, too.
SKIPPED_PATCHES = {"vllm_ascend.patch.worker.patch_qwen3vl"}
SEEING = {f"vllm.model_executor.models.{name}" for name in ("qwen3_5", "qwen3_5_mtp")}


class _Missing:
    """Something of a package that only Ascend machines have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self._name} needs an Ascend machine, and nothing stands in for it here")


class _StandInPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """pyACL, flash-linear-attention-npu, vLLM-Ascend's compiled extension, and what cannot be imported of models."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in ("acl", "fla_npu") or name in SKIPPED_PATCHES | SEEING | {
            "vllm_ascend.vllm_ascend_C"
        }:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        if name == "acl.rt":
            module.memcpy = lambda to, _room, of, size, _kind: ctypes.memmove(to, of, size) and 0  # type: ignore[attr-defined]
        elif name == "vllm_ascend.vllm_ascend_C":
            _define_operators()
        elif name == "vllm.model_executor.models.qwen3_5":
            module.Qwen3_5DecoderLayer = type("Qwen3_5DecoderLayer", (torch.nn.Module,), {})  # type: ignore[attr-defined]
        elif name.split(".")[0] == "fla_npu":
            module.__getattr__ = lambda asked: _missing(f"{name}.{asked}")  # type: ignore[method-assign]


def _missing(name: str) -> _Missing:
    if name.rpartition(".")[2].startswith("__"):
        raise AttributeError(name)
    return _Missing(name)


_defined: list[torch.library.Library] = []


def _define_operators() -> None:
    """Declare the operators of the compiled extension; :data:`host_arithmetic.STAND_INS` has what computes some."""
    library = torch.library.Library("_C_ascend", "DEF")
    text = (SOURCE.parent / "csrc" / "torch_binding.cpp").read_text()
    text = text[text.rindex("TORCH_LIBRARY_EXPAND") :]  # the last of them is for all chips but the 310P
    for pieces in re.findall(r'ops\.def\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)\)', text):
        library.define("".join(re.findall(r'"((?:[^"\\]|\\.)*)"', pieces)).replace('\\"', '"'))
    _defined.append(library)


def _prepare() -> None:
    sys.meta_path.insert(0, _StandInPackages())
    import torch_npu.op_plugin.atb._atb_ops as atb

    atb._register_atb_extensions = lambda: None  # libatb.so is CANN's
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm_ascend.worker import (
        block_table,
        worker,
    )

    worker.NPUWorker._warm_up_atb = lambda _self: None
    block_table._compute_slot_mapping_kernel = SlotMapping()  # Triton compiles for no NPU here
    block_table.compute_slot_mapping_fused_groups = slots_of_groups
    recurrent.install()
    distribute = worker.init_distributed_environment

    def by_gloo(*given: Any, **named: Any) -> Any:
        """One rank: its group has nobody to talk to, and HCCL is not emulated."""
        given = tuple("gloo" if each == "hccl" else each for each in given)
        return distribute(*given, **{key: "gloo" if each == "hccl" else each for key, each in named.items()})

    worker.init_distributed_environment = by_gloo


_prepare()
