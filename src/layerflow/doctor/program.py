"""The program itself: Python, its libraries, the C copy loop."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Iterator

from layerflow.findings import Finding, ok, probes, problem, warning

_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:>=\s*([\d.]+))?")
_REINSTALL = "pip install --upgrade layerflow"


def examine_program() -> Iterator[Finding]:
    """Python, libraries, torch, the C copy loop."""
    yield _python()
    yield _libraries()
    yield _torch()
    yield _copy_loop()


def _python() -> Finding:
    return ok("python", f"Python {platform.python_version()} on {platform.system()} {platform.release()}")


def _libraries() -> Finding:
    try:
        requirements = importlib.metadata.requires("layerflow") or []
    except importlib.metadata.PackageNotFoundError:
        return warning("libraries", "layerflow runs from a source tree; its libraries are not listed", "pip install .")
    found, missing = [], []
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if "extra ==" in requirement or match is None or match[1] == "torch":
            continue
        version = probes.installed(match[1])
        if version is None:
            missing.append(f"{match[1]} is not installed")
        elif match[2] and probes.release(version) < probes.release(match[2]):
            missing.append(f"{match[1]} {version} is older than {match[2]}")
        else:
            found.append(f"{match[1]} {version}")
    if missing:
        return problem("libraries", "; ".join(missing), _REINSTALL)
    return ok("libraries", ", ".join(sorted(found)))


def _torch() -> Finding:
    version = probes.installed("torch")
    return ok("torch", version or "not installed; only engines and `layerflow demo` need it")


def _copy_loop() -> Finding:
    if importlib.util.find_spec("layerflow.ops._copy") is None:
        return warning(
            "copy loop",
            "the C loop is not built; copies on cpu are slower",
            f"install a C compiler and Python's headers, then {_REINSTALL} --no-binary layerflow",
        )
    return ok("copy loop", "built")
