"""What ``layerflow doctor --device`` tells of drivers and runtimes, from made-up folders, tools and libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from layerflow.findings import Finding, Severity
from layerflow_cli import device_versions
from layerflow_cli.device_check import examine_device
from layerflow_cli.device_versions import examine_versions

DRIVER_INFO = """Version=24.1.rc3
ascendhal_version=7.35.23
Innerversion=V100R001C20SPC001B228
compatible_version=[V100R001C13],[V100R001C15]
package_version=24.1.rc3
"""
NVIDIA = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 12.2.0\n"
SMI = "| npu-smi 24.1.rc3                 Version: 24.1.rc3                       |"


class Library:
    """A driver's or runtime's library, whose functions give numbers."""

    def __init__(self, **numbers: tuple[int, ...]) -> None:
        for name, values in numbers.items():
            setattr(self, name, self._giving(values))

    @staticmethod
    def _giving(values: tuple[int, ...]) -> Callable[..., int]:
        def call(*places: object) -> int:
            for place, value in zip(places, values, strict=True):
                place._obj.value = value  # type: ignore[attr-defined]
            return 0

        return call


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Library]:
    """Nothing is installed but what the test puts there: tools in ``bin``, libraries by name."""
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "CANN_EMU_VERSION_INFO"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    libraries: dict[str, Library] = {}
    monkeypatch.setattr(device_versions, "_library", libraries.get)
    return libraries


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def tool(folder: Path, script: str) -> None:
    put(folder / "bin" / "npu-smi", f"#!/bin/sh\n{script}\n")
    (folder / "bin" / "npu-smi").chmod(0o755)


def examined(kind: str, root: Path) -> tuple[Finding, Finding]:
    driver, runtime = examine_versions(kind, root)
    assert (driver.check, runtime.check) == ("driver", "runtime")
    return driver, runtime


def test_nothing_is_there_and_each_line_says_what_to_do(tmp_path: Path) -> None:
    for finding in (*examined("npu", tmp_path), examined("cuda", tmp_path)[0]):
        assert finding.state is Severity.WARNING and finding.found and finding.advice
    driver, runtime = examined("npu", tmp_path)
    assert str(tmp_path / "usr/local/Ascend/driver/version.info") in driver.found
    assert "npu-smi is not in PATH" in driver.found and "/dev/davinci" in driver.advice
    assert "libascendcl.so cannot be loaded" in runtime.found and "set_env.sh" in runtime.advice


def test_the_cpu_has_neither(tmp_path: Path) -> None:
    assert list(examine_versions("cpu", tmp_path)) == []


def test_an_ascend_driver_where_it_was_installed_to(tmp_path: Path) -> None:
    put(tmp_path / "etc/ascend_install.info", "UserName=HwHiAiUser\nDriver_Install_Path_Param=/opt/Ascend\n")
    put(tmp_path / "opt/Ascend/driver/version.info", DRIVER_INFO)
    tool(tmp_path, f"echo '{SMI}'")
    driver, _ = examined("npu", tmp_path)
    assert driver.state is Severity.OK
    assert "Ascend 24.1.rc3" in driver.found and "npu-smi 24.1.rc3 reaches it" in driver.found


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo 'dcmi model initialized failed, because the device is used'; exit 255", "exit code 255: dcmi model"),
        ("exit 1", "exit code 1: no output"),
        ("echo hello", "exit code 0: hello"),
    ],
)
def test_a_tool_that_does_not_reach_the_driver_is_quoted(tmp_path: Path, script: str, told: str) -> None:
    put(tmp_path / "usr/local/Ascend/driver/version.info", "Innerversion=V100R001C23SPC005B219\n")
    tool(tmp_path, script)
    driver, _ = examined("npu", tmp_path)
    assert "Ascend V100R001C23SPC005B219" in driver.found and told in driver.found


def test_a_tool_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_versions, "TOOL_PATIENCE_S", 0.05)
    tool(tmp_path, "exec /bin/sleep 60")
    assert "npu-smi info got no answer" in examined("npu", tmp_path)[0].found


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("aarch64-linux/ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=8.3.RC1\n"),
        ("runtime/version.info", "Version=8.3.RC1\nversion_dir=8.3.RC1\n"),
        ("version.cfg", "# version: 1.0\nruntime_running_version=[7.8.0.1.231:8.3.RC1]\n"),
    ],
)
def test_cann_by_each_of_the_files_that_its_releases_have(
    tmp_path: Path, machine: dict[str, Library], file: str, text: str
) -> None:
    put(tmp_path / "usr/local/Ascend/ascend-toolkit/latest" / file, text)
    machine["libascendcl.so"] = Library(aclrtGetVersion=(1, 14, 0), aclrtMemcpyBatchAsync=())
    _, runtime = examined("npu", tmp_path)
    assert runtime.state is Severity.OK, runtime
    assert "CANN 8.3.RC1" in runtime.found and "acl runtime 1.14.0" in runtime.found and "torch_npu" in runtime.found


def test_a_cann_without_batches_is_told(tmp_path: Path, machine: dict[str, Library]) -> None:
    machine["libascendcl.so"] = Library(aclrtGetVersion=(1, 11, 0))
    _, runtime = examined("npu", tmp_path)
    assert runtime.state is Severity.WARNING
    assert "no version of CANN" in runtime.found and "copies no batches" in runtime.found and "8.3" in runtime.advice


def test_the_environment_names_the_toolkit(
    tmp_path: Path, machine: dict[str, Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "mine"))
    machine["libascendcl.so"] = Library(aclrtMemcpyBatchAsync=())
    _, runtime = examined("npu", tmp_path)
    assert runtime.state is Severity.WARNING and f"no version of CANN in {tmp_path / 'mine'}" in runtime.found
    assert "acl runtime tells no version" in runtime.found


def test_an_emulated_cann_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "emulated.info", "Innerversion=V100R001C23SPC005B219\n")
    monkeypatch.setenv("CANN_EMU_VERSION_INFO", str(tmp_path / "emulated.info"))
    driver, _ = examined("npu", tmp_path)
    assert driver.state is Severity.WARNING and "CANN emulated" in driver.found and "real NPU" in driver.advice


def test_a_cuda_that_copies_batches(
    tmp_path: Path, machine: dict[str, Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "proc/driver/nvidia/version", NVIDIA)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    machine["libcuda.so.1"] = Library(cuDriverGetVersion=(12080,))
    machine["libcudart.so.12"] = Library(cudaRuntimeGetVersion=(12080,))
    driver, runtime = examined("cuda", tmp_path)
    assert (driver.state, runtime.state) == (Severity.OK, Severity.OK)
    assert driver.found == "NVIDIA 570.86.15, for CUDA up to 12.8" and "CUDA 12.8" in runtime.found


def test_a_cuda_that_is_too_old_for_batches(
    tmp_path: Path, machine: dict[str, Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    machine["libcuda.so.1"] = Library(cuDriverGetVersion=(12040,))
    machine["libcudart.so.12"] = Library(cudaRuntimeGetVersion=(12040,))
    for finding in examined("cuda", tmp_path):
        assert finding.state is Severity.WARNING and "12.4" in finding.found and "12.8" in finding.advice


def test_a_torch_for_no_gpu_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert "built for no GPU" in examined("cuda", tmp_path)[1].found


def test_a_device_that_is_not_there_still_tells_the_versions() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    found = {finding.check: finding.state for finding in examine_device("cuda")}
    assert list(found) == ["driver", "runtime", "device"] and found["device"] is Severity.PROBLEM
