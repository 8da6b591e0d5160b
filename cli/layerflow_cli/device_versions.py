"""The versions of a device's driver and runtime, as their own files, libraries and tools tell them."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from layerflow.device import EMULATED_CANN
from layerflow.findings import Finding, installed, ok, warning

TOOL_PATIENCE_S = 10.0
_CUDA_BATCHES = 12080  # the first runtime and driver with cudaMemcpyBatchAsync
_KEYS = ("version", "package_version", "innerversion")


def examine_versions(kind: str, root: Path = Path("/")) -> Iterator[Finding]:
    """A line for the driver and one for the runtime; none for the cpu.

    :param kind: ``"cuda"``, ``"npu"`` or ``"cpu"``.
    :param root: that absolute paths of drivers and toolkits begin at.
    """
    if kind == "npu":
        yield _ascend_driver(root)
        yield _cann(root)
    elif kind == "cuda":
        yield _nvidia_driver(root)
        yield _cuda()


def _ascend_driver(root: Path) -> Finding:
    path = _ascend_home(root) / "driver" / "version.info"
    emulated = os.environ.get(EMULATED_CANN)
    if emulated:
        path = Path(emulated)
    smi = _npu_smi()
    told = _version_in(path)
    if told is None:
        return warning(
            "driver",
            f"{path} is not there or tells no version; {smi}",
            "install Ascend's driver; in a container, mount its folder and /dev/davinci*, /dev/davinci_manager, "
            "/dev/devmm_svm, /dev/hisi_hdc",
        )
    found = f"Ascend {told} ({path}); {smi}"
    if emulated:
        return warning("driver", f"{found}; CANN emulated", "what follows says nothing of a real NPU")
    return ok("driver", found)


def _cann(root: Path) -> Finding:
    told = [f"torch_npu {installed('torch_npu') or 'is not installed'}"]
    home = _toolkit(root)
    toolkit = home and next((v for path in _toolkit_files(home) if (v := _version_in(path)) is not None), None)
    told.append(f"CANN {toolkit} ({home})" if toolkit else f"no version of CANN in {home or 'its usual folders'}")
    library = _library("libascendcl.so")
    if library is None:
        told.append("libascendcl.so cannot be loaded")
        return warning(
            "runtime", "; ".join(told), "install CANN's toolkit, and source its set_env.sh before the engine starts"
        )
    numbers = tuple(ctypes.c_int32() for _ in range(3))
    refused = library.aclrtGetVersion(*map(ctypes.byref, numbers)) if hasattr(library, "aclrtGetVersion") else -1
    acl = ".".join(str(number.value) for number in numbers)
    told.append("acl runtime tells no version" if refused else f"acl runtime {acl}")
    if not hasattr(library, "aclrtMemcpyBatchAsync"):
        told.append("it copies no batches")
        return warning("runtime", "; ".join(told), "each range is a copy of its own; CANN 8.3 or newer copies batches")
    if toolkit is None:
        return warning("runtime", "; ".join(told), "set ASCEND_HOME_PATH to the toolkit's folder (its set_env.sh does)")
    return ok("runtime", "; ".join(told))


def _nvidia_driver(root: Path) -> Finding:
    path = root / "proc/driver/nvidia/version"
    told = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]*)", _text(path))
    library = _library("libcuda.so.1")
    up_to = _number(library, "cuDriverGetVersion")
    if told is None and library is None:
        return warning(
            "driver",
            f"{path} is not there and libcuda.so.1 cannot be loaded",
            "install NVIDIA's driver; in a container, start it with the NVIDIA runtime (--gpus)",
        )
    kernel = f"NVIDIA {told[1]}" if told else f"{path} tells no version"
    found = f"{kernel}, for CUDA up to {_release(up_to)}" if up_to else f"{kernel}; libcuda.so.1 tells no version"
    if up_to and up_to < _CUDA_BATCHES:
        return warning(
            "driver", found, "each range is a copy of its own; a driver for CUDA 12.8 or newer copies batches"
        )
    return ok("driver", found)


def _cuda() -> Finding:
    import torch  # noqa: PLC0415 - only its build tells which runtime it brings

    if torch.version.cuda is None:
        hip = torch.version.hip
        found = f"torch {torch.__version__} is built for {f'HIP {hip}' if hip else 'no GPU'}"
        return warning("runtime", found, "install a torch that is built for CUDA")
    name = f"libcudart.so.{torch.version.cuda.split('.')[0]}"
    version = _number(_library(name), "cudaRuntimeGetVersion")
    if not version:
        return warning("runtime", f"CUDA {torch.version.cuda}; {name} cannot be loaded", "reinstall torch")
    found = f"CUDA {_release(version)} ({name}), torch is built for {torch.version.cuda}"
    if version < _CUDA_BATCHES:
        return warning(
            "runtime", found, "each range is a copy of its own; a torch for CUDA 12.8 or newer copies batches"
        )
    return ok("runtime", found)


def _ascend_home(root: Path) -> Path:
    """Where the driver was installed, as its installer has noted."""
    noted = re.search(r"^Driver_Install_Path_Param=(\S+)", _text(root / "etc/ascend_install.info"), re.MULTILINE)
    return root / (noted[1] if noted else "/usr/local/Ascend").lstrip("/")


def _toolkit(root: Path) -> Path | None:
    named = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    if named:
        return Path(named)
    usual = (
        root / "usr/local/Ascend" / folder for folder in ("ascend-toolkit/latest", "cann", "latest", "nnrt/latest")
    )
    return next((home for home in usual if home.is_dir()), None)


def _toolkit_files(home: Path) -> Iterator[Path]:
    """Where its version stands, by release."""
    yield from sorted(home.glob("*-linux/ascend_*_install.info"))
    for folder in ("", "runtime", "toolkit", "compiler"):
        yield home / folder / "version.info"
    yield home / "version.cfg"


def _npu_smi() -> str:
    """What the driver answers to its tool."""
    tool = shutil.which("npu-smi")
    if tool is None:
        return "npu-smi is not in PATH"
    try:
        ended = subprocess.run([tool, "info"], capture_output=True, timeout=TOOL_PATIENCE_S, check=False, text=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"npu-smi info got no answer ({error})"
    told = re.search(r"Version:\s*([\w.]+)", ended.stdout)
    if ended.returncode or told is None:
        lines = (ended.stderr + ended.stdout).strip().splitlines()
        return f"npu-smi info ended with exit code {ended.returncode}: {lines[-1] if lines else 'no output'}"
    return f"npu-smi {told[1]} reaches it"


def _version_in(path: Path) -> str | None:
    """Of a file of ``key=value`` lines; version.cfg has values as ``[7.8.0.1.231:8.3.RC1]``, for each part of CANN."""
    found = dict(re.findall(r"^\s*(\w+)\s*=\s*\[?([^\s\]]+)", _text(path), re.MULTILINE))
    known = {key.lower(): value for key, value in found.items()}
    running = next((value for key, value in known.items() if key.endswith("_running_version")), None)
    told = next((known[key] for key in _KEYS if key in known), running)
    return told.split(":")[-1] if told else None


def _text(path: Path) -> str:
    """ "" where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _library(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _number(library: ctypes.CDLL | None, function: str) -> int:
    """What such a function of CUDA tells of versions, e.g. 12080; 0 = nothing."""
    version = ctypes.c_int(0)
    if library is None or not hasattr(library, function) or getattr(library, function)(ctypes.byref(version)):
        return 0
    return version.value


def _release(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
