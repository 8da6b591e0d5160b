"""Lets PyPI's torchvision, which is built for CUDA, be imported beside a torch for the CPU.

Its Python code looks two operators up that only its compiled part declares. They are declared here, right before it is
imported, and stay without an implementation: calling one raises. SGLang imports torchvision for images; the tests'
models read text.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any

_libraries: list[Any] = []  # torch forgets what a library has declared when that is collected


class _DeclareFirst(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)


sys.meta_path.insert(0, _DeclareFirst())
