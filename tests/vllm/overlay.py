"""Put a vLLM's Python code in the place of another one's, whose compiled libraries stay: ``overlay.py WHEEL PACKAGES``.

A release comes for GPUs first. Its scheduler, its KV cache manager, its connectors' life cycle and its engine are
Python; what a CPU computes with is in the libraries of the release before.
"""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path


def overlay(wheel: Path, packages: Path) -> None:
    """Unpack the wheel's ``vllm`` without its libraries, which are for GPUs.

    Nothing is written in place: the files may be links of another environment's.
    """
    package, before = packages / "vllm", packages / "vllm.before"
    if not before.exists():
        package.rename(before)
    shutil.rmtree(package, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("vllm/") and not name.endswith(".so")]
        archive.extractall(packages, names)
    for library in before.rglob("*.so"):
        kept = package / library.relative_to(before)
        kept.parent.mkdir(parents=True, exist_ok=True)
        library.rename(kept)
    shutil.rmtree(before)


if __name__ == "__main__":
    overlay(Path(sys.argv[1]), Path(sys.argv[2]))
