"""A cache kind is one file of ``layerflow/kinds``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import layerflow

KIND = """
from layerflow.kinds.base import Kind

class EveryOther(Kind):
    name = "every_other"
    vllm = ("EveryOtherSpec",)

    @property
    def entries(self) -> int:
        return self.block_size // 2
"""
USE = """
from layerflow.connectors.vllm.reuse import kind_of
from layerflow_engine.config import GQA
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard

group = GroupSpec("every_other", 16, (0, 1), (Plane("k", "float16", (64,)),))
print(group.entries, group.bytes_per_block, group.rules.need(512, 256), kind_of(type("EveryOtherSpec", (), {})()))
"""


def test_a_made_up_kind_takes_one_file(tmp_path: Path) -> None:
    """A copy of the package, of links, where the file is the only thing added."""
    [source] = layerflow.__path__
    copy = tmp_path / "layerflow"
    for folder in (copy, copy / "kinds"):
        folder.mkdir()
        for file in Path(source, folder.relative_to(copy)).iterdir():
            if file.name not in ("kinds", "__pycache__"):
                (folder / file.name).symlink_to(file)
    (copy / "kinds" / "every_other.py").write_text(KIND)
    done = subprocess.run(
        [sys.executable, "-c", USE],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "8 1024 range(0, 2) every_other\n", done.stderr
