"""Reading the kernel's files."""

import os
from pathlib import Path

from layerflow import findings
from layerflow.system import machine


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_memory_that_is_available(tmp_path):
    assert machine.available_bytes(tmp_path) is None
    write(tmp_path / "meminfo", "MemTotal: 100 kB\nMemAvailable:      64 kB\n")
    assert machine.available_bytes(tmp_path) == 64 << 10


def test_the_tightest_control_group_decides_and_file_cache_can_go(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    assert machine.cgroup_bytes(proc, groups) is None
    write(proc / "self" / "cgroup", "0::/slice/service\n")
    write(groups / "slice" / "service" / "memory.max", "max\n")
    write(groups / "slice" / "service" / "memory.current", "100\n")
    assert machine.cgroup_bytes(proc, groups) is None
    write(groups / "slice" / "memory.max", "1000\n")
    write(groups / "slice" / "memory.current", "400\n")
    assert machine.cgroup_bytes(proc, groups) == 600
    write(groups / "slice" / "memory.stat", "anon 1\ninactive_file 150\n")
    assert machine.cgroup_bytes(proc, groups) == 750


def test_a_container_sees_its_group_at_the_root(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "self" / "cgroup", "9:cpu:/a\n4:memory:/docker/of/the/host\n")
    write(groups / "memory" / "memory.limit_in_bytes", "5000\n")
    write(groups / "memory" / "memory.usage_in_bytes", "6000\n")
    assert machine.cgroup_bytes(proc, groups) == 0


def test_huge_pages_that_are_claimed_are_not_free(tmp_path):
    assert machine.free_huge_bytes(tmp_path) == 0
    write(tmp_path / "free_hugepages", "5\n")
    write(tmp_path / "resv_hugepages", "2\n")
    assert machine.free_huge_bytes(tmp_path) == 3 << 21


def test_who_may_pin_without_limit(tmp_path):
    write(tmp_path / "self" / "status", "Name: x\nCapEff:\t0000000000004000\n")
    assert machine.lockable_bytes(tmp_path) is None


def test_the_file_system_of_the_nearest_mount(tmp_path):
    lines = ["1 0 8:1 / / rw - ext4 /dev/sda rw", f"2 1 0:5 / {tmp_path}/in\\040memory rw shared:1 - tmpfs none rw"]
    write(tmp_path / "self" / "mountinfo", "\n".join(lines))
    inside = tmp_path / "in memory" / "below"
    inside.mkdir(parents=True)
    assert machine.file_system(inside, tmp_path) == "tmpfs"
    assert machine.file_system(tmp_path, tmp_path) == "ext4"


def test_the_nearest_directory_that_exists(tmp_path):
    assert machine.existing(tmp_path / "a" / "b") == tmp_path
    assert machine.existing(tmp_path) == tmp_path


def test_a_child_that_gets_through_fails_dies_or_hangs():
    assert findings.child("import sys, os; sys.exit(os.environ['GIVEN'] != 'x')", {"GIVEN": "x"}) == ""
    assert findings.child("raise ImportError('libx.so: no such file')") == "ImportError: libx.so: no such file"
    assert findings.child("import os; os.kill(os.getpid(), 11)") == "died of SIGSEGV"
    assert findings.child("import sys; sys.exit(3)") == "ended with exit code 3"
    assert findings.child("import threading; threading.Event().wait()", timeout_s=0.1) == "did not finish in 0.1 s"


def test_packages_are_looked_up_without_importing_them():
    assert findings.installed("pytest") and findings.installed("layerflow-no-such-package") is None
    assert findings.has_module("json") and not findings.has_module("layerflow_no_such_module")
    assert findings.distribution_of("pydantic")[0] == "pydantic"
    assert findings.distribution_of("layerflow_no_such_module") is None
    assert findings.release("0.3.13.post1") == (0, 3, 13) and findings.release("1.10") > findings.release("1.9.9")


def test_addresses():
    assert findings.host_and_port("store:50051") == ("store", 50051)
    assert findings.host_and_port("tcp://[::1]:5000") == ("::1", 5000)
    assert machine.devices("null", Path(os.devnull).parent) == ["null"]
