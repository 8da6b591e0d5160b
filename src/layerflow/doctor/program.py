"""The program itself: Python, its libraries, the C copy loop."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Iterator

from layerflow.findings import Finding, ok, probes, problem, warning
from layerflow.system import peer

_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:>=\s*([\d.]+))?")


def examine_program() -> Iterator[Finding]:
    """Python, the kernel, libraries, torch, the C copy loop."""
    yield _python()
    yield _other_containers()
    yield _libraries()
    yield _torch()
    yield _copy_loop()


def _python() -> Finding:
    return ok("python", f"Python {platform.python_version()} on {platform.system()} {platform.release()}")


def _other_containers() -> Finding:
    check = "other containers"
    if peer.sees_other_namespaces():
        return ok(check, "the death of an engine is seen in any pid namespace")
    return warning(
        check,
        f"Linux {platform.release()} shows no process of another pid namespace: there a hang-up counts as a death",
        "matters where engines and server run in containers: give them one pid namespace, or use Linux 6.5",
    )


def _libraries() -> Finding:
    try:
        requirements = importlib.metadata.requires("layerflow") or []
    except importlib.metadata.PackageNotFoundError:
        return warning("libraries", "layerflow runs from a source tree; its libraries are not listed", "pip install .")
    found, missing, wanted = [], [], []
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if "extra ==" in requirement or match is None:
            continue
        version = probes.installed(match[1])
        if version is not None and not (match[2] and probes.release(version) < probes.release(match[2])):
            found.append(f"{match[1]} {version}")
            continue
        wanted.append(f"'{requirement}'")
        if version is None:
            missing.append(f"{match[1]} is not installed")
        else:
            missing.append(f"{match[1]} {version} is older than {match[2]}")
    if missing:
        return problem("libraries", "; ".join(missing), f"pip install {' '.join(wanted)}")
    return ok("libraries", ", ".join(sorted(found)))


def _torch() -> Finding:
    version = probes.installed("torch")
    return ok("torch", version or "not installed; only engines, `layerflow demo` and most of `layerflow bench` need it")


def _copy_loop() -> Finding:
    if importlib.util.find_spec("layerflow.ops._copy") is None:
        return warning(
            "copy loop",
            "the C loop is not built; copies on cpu are slower",
            "install a C compiler and Python's headers, then, in layerflow's source tree, "
            "pip install --force-reinstall --no-deps .",
        )
    return ok("copy loop", "built")
