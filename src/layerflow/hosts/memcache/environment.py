"""CANN and the packages' libraries, in the environment of a process before it starts."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerflow.errors import Unsupported

BUILD_S = 120.0
_EMULATED = {
    "HCOM_MAX_SLICE_SIZE": "131072",  # without these three, joining over host_tcp takes 40 s
    "HCOM_RECV_DATA_SIZE": "132096",
    "MF_HYBM_RDMA_SWAP_SPACE_SIZE": "128",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}


def environment(options: Mapping[str, Any]) -> dict[str, str]:
    """Variables to add to the server's own; those that are lists contain the server's. Waits for a compiler at times.

    :param options: of ``[pool.memcache]``.
    :raises Unsupported: the emulator that they name cannot be built.
    """
    variables: dict[str, str] = {}
    libraries: list[str] = []
    if options.get("cann_emulator"):
        built = emulator(Path(options["cann_emulator"]))
        libraries.append(str(built / "lib64"))
        variables |= _EMULATED | {
            "ASCEND_HOME_PATH": str(built),
            "ASCEND_OPP_PATH": str(built / "opp"),
            "CANN_EMU_VERSION_INFO": str(built / "driver" / "version.info"),
            "LD_PRELOAD": _listed([str(built / "lib64" / "libdriver_version.so")], "LD_PRELOAD"),
        }
    memfabric = importlib.util.find_spec("memfabric_hybrid")
    if memfabric is not None and memfabric.submodule_search_locations:
        # The package's libhcom.so needs its libboundscheck.so by a name that only the loader's path resolves.
        libraries.append(str(Path(memfabric.submodule_search_locations[0]) / "lib"))
    if libraries:
        variables["LD_LIBRARY_PATH"] = _listed(libraries, "LD_LIBRARY_PATH")
    return variables


def missing_cann() -> str:
    """Why this process's environment leads to no CANN; "" if it does."""
    home = os.environ.get("ASCEND_HOME_PATH", "")
    if home and (Path(home) / "lib64" / "libascendcl.so").exists():
        return ""
    return f"no lib64/libascendcl.so in ASCEND_HOME_PATH = {home}" if home else "ASCEND_HOME_PATH is not set"


def emulator(directory: Path) -> Path:
    """Where the CANN emulator of `directory` is built: there, or in the user's cache, where it is built when needed.

    :raises Unsupported: it is none, or it cannot be built.
    """
    if (directory / "lib64" / "libascendcl.so").exists():
        return directory.resolve()
    script = (directory / "build.sh").resolve()
    if not script.exists():
        raise Unsupported(
            f"pool.memcache.cann_emulator = {str(directory)!r} has neither lib64/libascendcl.so nor build.sh"
        )
    name = "cann-" + hashlib.blake2b(str(script).encode(), digest_size=6).hexdigest()
    built = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "layerflow" / name
    try:
        built.mkdir(parents=True, exist_ok=True)
        with open(built / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _build(script, built, lock.fileno())
    except (OSError, subprocess.SubprocessError) as error:
        raise Unsupported(f"the CANN emulator cannot be built: {error}; it needs bash and a C compiler") from error
    return built


def _build(script: Path, out: Path, lock: int) -> None:
    """Does nothing where nothing has changed since the last time.

    :param lock: held by the script too, which goes on should this process end.
    """
    done = subprocess.run(
        ["bash", str(script), str(out)],  # noqa: S607 - bash is where the machine has it
        capture_output=True,
        text=True,
        errors="replace",
        timeout=BUILD_S,
        check=False,
        pass_fds=(lock,),
    )
    if done.returncode != 0:
        raise OSError(f"{script} failed: {(done.stderr or done.stdout).strip()[-500:]}")


def _listed(values: list[str], variable: str) -> str:
    return ":".join([*values, *filter(None, [os.environ.get(variable)])])
