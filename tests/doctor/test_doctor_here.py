"""What the doctor says of this machine: the program, where the server listens, memory, the disk tier."""

import errno
import os
import re
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import structlog
from e2e.known import PATIENCE_S, eventually

from layerflow import findings
from layerflow.agent.observer import fetch_status
from layerflow.config.settings import Settings
from layerflow.doctor import Finding, Severity, checks, examine, examine_backend
from layerflow.errors import ConfigError
from layerflow.findings import size_text
from layerflow.hosts.backend import Unreachable, Unusable
from layerflow.hosts.disk.folder import Folder
from layerflow.server import EmbeddedServer, Server
from layerflow.system import machine, unix_sockets


def examined(**sections) -> dict[str, Finding]:
    server = {"http_port": -1} | sections.pop("server", {})
    return {finding.check: finding for finding in examine(Settings(server=server, **sections))}


def test_a_healthy_memory_configuration_has_no_problem(tmp_path):
    found = examined(pool={"size": "1MiB"})
    assert {
        "python",
        "other containers",
        "libraries",
        "torch",
        "copy loop",
        "endpoint directory",
        "endpoint",
        "arena",
    } <= set(found)
    assert [finding for finding in found.values() if finding.state is Severity.PROBLEM] == []
    assert "pyzmq " in found["libraries"].found
    assert "will be made" in found["endpoint directory"].found
    assert list(tmp_path.iterdir()) == []


def test_every_finding_that_is_not_ok_says_what_to_do(closed_port, tmp_path):
    backends = {"mooncake": {"master": f"127.0.0.1:{closed_port}"}, "memcache": {"config_file": "/absent"}}
    for pool in ({"backend": "mooncake"}, {"backend": "memcache"}, {"size": "900TiB", "hugepages": True}):
        for finding in examined(pool={"size": "1MiB"} | backends | pool).values():
            assert (finding.advice == "") == (finding.state is Severity.OK), finding
            assert "\n" not in finding.found + finding.advice


def test_libraries_that_are_missing_or_old(monkeypatch):
    versions = {"pyzmq": None, "rich": "1.0"}
    monkeypatch.setattr(findings, "installed", lambda name: versions.get(name, "999.0"))
    found = examined(pool={"size": "1MiB"})["libraries"]
    assert found.state is Severity.PROBLEM
    assert "pyzmq is not installed" in found.found and "rich 1.0 is older than" in found.found
    assert re.fullmatch(r"pip install 'pyzmq>=[\d.]+' 'rich>=[\d.]+'", found.advice)


def test_a_kernel_that_shows_no_process_of_another_pid_namespace(monkeypatch):
    class Older(socket.socket):
        """As before Linux 6.5."""

        def getsockopt(self, level: int, option: int, *size: int) -> Any:
            if option == unix_sockets._SO_PEERPIDFD:
                raise OSError(errno.ENOPROTOOPT, "Protocol not available")
            return super().getsockopt(level, option, *size)

    monkeypatch.setattr(socket, "socketpair", lambda: (Older(), Older()))
    found = examined(pool={"size": "1MiB"})["other containers"]
    assert found.state is Severity.WARNING and "one pid namespace" in found.advice


def test_a_directory_that_others_can_write_to(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    found = examined(server={"endpoint": f"ipc://{folder}/control"}, pool={"size": "1MiB"})["endpoint directory"]
    assert found.state is Severity.PROBLEM and f"chmod 700 {folder}" in found.advice
    folder.chmod(0o700)
    found = examined(server={"endpoint": f"ipc://{folder}/control"}, pool={"size": "1MiB"})["endpoint directory"]
    assert found.state is Severity.OK


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    found = examined(server={"endpoint": f"ipc://{tmp_path}/file/control"}, pool={"size": "1MiB"})
    assert found["endpoint directory"].state is Severity.PROBLEM
    found = examined(server={"endpoint": f"ipc://{tmp_path}/file/below/control"}, pool={"size": "1MiB"})
    assert found["endpoint directory"].state is Severity.PROBLEM


def test_a_server_that_answers_already(tmp_path):
    endpoint = f"ipc://{tmp_path}/room/control"
    with EmbeddedServer(Settings(pool={"size": "1MiB"}), endpoint=endpoint):
        found = examined(server={"endpoint": endpoint}, pool={"size": "1MiB"})
    assert found["endpoint"].state is Severity.WARNING
    assert f"pid {os.getpid()}" in found["endpoint"].found
    assert found["arena"].state is Severity.OK


@pytest.mark.parametrize("with_server", [False, True])
def test_an_arena_that_the_machine_can_never_hold(tmp_path, with_server):
    """The same with and without a server at the endpoint, and as `layerflow run` says."""
    endpoint = f"ipc://{tmp_path}/room/control"
    server = EmbeddedServer(Settings(pool={"size": "1MiB"}), endpoint=endpoint) if with_server else nullcontext()
    with server:
        found = examined(server={"endpoint": endpoint}, pool={"size": "900TiB"})["arena"]
    assert found.state is Severity.PROBLEM and found.found.startswith("900 TiB; this machine, ")
    with pytest.raises(ConfigError) as caught:
        Server(Settings(pool={"size": "900TiB"}))
    assert str(caught.value) == f"pool.size = 900TiB: {found.found}; {found.advice}"


def test_what_a_running_server_has_is_free_for_its_successor(tmp_path, monkeypatch):
    endpoint = f"ipc://{tmp_path}/room/control"
    with EmbeddedServer(Settings(pool={"size": "64MiB"}), endpoint=endpoint):
        assert eventually(lambda: fetch_status(endpoint, PATIENCE_S)["arena"]["taken_bytes"] == 64 << 20)
        monkeypatch.setattr(machine, "available_bytes", lambda: 64 << 20)
        monkeypatch.setattr(machine, "cgroup_bytes", lambda: None)
        sizes = {
            size: examined(server={"endpoint": endpoint}, pool={"size": size})["arena"]
            for size in ("110MiB", "120MiB", "130MiB")
        }
    assert [found.state for found in sizes.values()] == [Severity.OK, Severity.WARNING, Severity.WARNING]
    assert all(
        "64 MiB free on this machine, and 64 MiB that the running server has" in one.found for one in sizes.values()
    )


def test_a_socket_that_somebody_else_holds_and_one_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "STATUS_TIMEOUT_S", 0.2)
    path = tmp_path / "control"
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(str(path))
        held.listen(8)
        found = examined(server={"endpoint": f"ipc://{path}"}, pool={"size": "1MiB"})["endpoint"]
        assert found.state is Severity.PROBLEM and "does not answer" in found.found
    assert path.exists()
    assert examined(server={"endpoint": f"ipc://{path}"}, pool={"size": "1MiB"})["endpoint"].state is Severity.OK


def test_an_http_port_that_is_taken(open_port):
    found = examined(server={"http_port": open_port}, pool={"size": "1MiB"})["http port"]
    assert found.state is Severity.PROBLEM and "server.http_port" in found.advice
    assert "http port" not in examined(pool={"size": "1MiB"})


def test_a_network_endpoint_needs_its_keys(tmp_path):
    secret, allowed = tmp_path / "secret", tmp_path / "allowed"
    server = {"tcp_endpoint": "tcp://127.0.0.1:*", "curve_secret_key_file": secret, "curve_allowed_keys_file": allowed}
    wanted = Settings(server=server).server
    secret.touch(0o644)
    found = list(checks.examine_listening(wanted, None))
    assert [one.state for one in found if one.check == "network endpoint"] == [
        Severity.WARNING,
        Severity.PROBLEM,
        Severity.OK,
    ]
    secret.chmod(0o600)
    allowed.touch()
    found = list(checks.examine_listening(wanted, None))
    assert [one.state for one in found if one.check == "network endpoint"] == [Severity.OK]


def test_an_arena_larger_than_the_machine(monkeypatch):
    monkeypatch.setattr(machine, "total_bytes", lambda: 6 << 30)
    monkeypatch.setattr(machine, "available_bytes", lambda: 8 << 30)
    monkeypatch.setattr(machine, "cgroup_bytes", lambda: 4 << 30)

    def finding(size: str) -> Finding:
        (found, _, _) = checks.examine_memory(Settings(pool={"size": size}).pool, None)
        return found

    found = {size: finding(size) for size in ("7GiB", "5GiB", "3.75GiB", "1GiB")}
    assert [one.state for one in found.values()] == [Severity.PROBLEM, Severity.WARNING, Severity.WARNING, Severity.OK]
    assert "has 6 GiB in all" in found["7GiB"].found
    assert all("4 GiB left below the memory limit" in found[size].found for size in ("5GiB", "3.75GiB", "1GiB"))


def test_a_server_says_that_memory_is_short_and_starts(monkeypatch):
    monkeypatch.setattr(machine, "available_bytes", lambda: 1 << 20)
    with structlog.testing.capture_logs() as logged:
        Server(Settings(pool={"size": "8MiB", "warm": False}))
    (event,) = [event for event in logged if event["event"] == "memory_short"]
    assert event["log_level"] == "warning" and "8 MiB; 1 MiB free" in event["found"] and "pool.size" in event["advice"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 MiB"), (16 << 20, "16 MiB"), (3 << 29, "1.5 GiB"), (1023 << 30, "1,023 GiB"), (4 << 40, "4 TiB"),
     (900 << 40, "900 TiB"), (8192 << 40, "8,192 TiB")],
)  # fmt: skip
def test_sizes_are_written_without_exponents(nbytes, text):
    assert size_text(nbytes) == text


def test_huge_pages_that_are_not_reserved(monkeypatch):
    pool = Settings(pool={"size": "5MiB", "hugepages": True}).pool
    for free, state in ((4 << 20, Severity.PROBLEM), (6 << 20, Severity.OK)):
        monkeypatch.setattr(machine, "free_huge_bytes", lambda free=free: free)
        (found, _, _) = checks.examine_memory(pool, None)
        assert found.state is state
        assert found.check == "huge pages" and ("vm.nr_hugepages=3" in found.advice) == (state is Severity.PROBLEM)


def test_small_pages_of_a_large_arena_cost_a_gpu_memory(monkeypatch):
    monkeypatch.setattr(machine, "devices", lambda pattern: ["nvidia0"] if pattern.startswith("nvidia") else [])

    def advice(**pool: Any) -> list[str]:
        found = checks.examine_memory(Settings(pool=pool).pool, None)
        return [one.advice for one in found if one.check == "pinned pages"]

    assert "pool.hugepages = true" in advice(size="200GiB")[0]
    assert not advice(size="200GiB", hugepages=True)
    assert not advice(size="4GiB")


def test_a_limit_for_pinned_memory_matters_with_a_device(monkeypatch):
    monkeypatch.setattr(machine, "lockable_bytes", lambda: 8 << 20)
    pool = Settings(pool={"size": "16MiB"}).pool
    for devices, state in (([], Severity.OK), (["nvidia0"], Severity.WARNING)):
        monkeypatch.setattr(machine, "devices", lambda pattern, devices=devices: devices)
        monkeypatch.setattr(machine, "rdma_devices", lambda: [])
        (_, _, found) = checks.examine_memory(pool, None)
        assert found.state is state


def disk_of(path: Path, capacity: str = "1MiB") -> dict[str, Finding]:
    wanted = Settings(pool={"disk": {"path": str(path), "capacity": capacity}}).pool
    return {finding.check: finding for finding in examine_backend(wanted, running=False)}


def test_a_disk_that_can_be_used(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "file_system", lambda path: "ext4")
    found = disk_of(tmp_path / "tier")
    assert [finding.state for finding in found.values()] == [Severity.OK] * 3
    assert "will be made" in found["disk path"].found
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room(tmp_path):
    found = disk_of(tmp_path, "8192TiB")["disk room"]
    assert found.state is Severity.PROBLEM and "capacity" in found.advice


def test_what_the_tier_holds_already_counts_as_room(tmp_path):
    (tmp_path / "objects").write_bytes(bytes(3 << 20))
    assert "3 MiB held already" in disk_of(tmp_path)["disk room"].found


@pytest.mark.parametrize("kind", ["tmpfs", "overlay", "nfs4"])
def test_a_disk_that_is_none(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(machine, "file_system", lambda path: kind)
    found = disk_of(tmp_path)["disk kind"]
    assert found.state is Severity.WARNING and kind in found.found


def test_a_disk_path_that_cannot_be_used_or_is_open_to_others(tmp_path):
    (tmp_path / "file").touch()
    missing = tmp_path / "no" / "tier"
    for path in (tmp_path / "file", tmp_path / "file" / "below", missing, Path("/proc/tier")):
        assert disk_of(path)["disk path"].state is Severity.PROBLEM
        with pytest.raises((Unusable, Unreachable)) as caught:  # as `layerflow run` finds it
            Folder.open(path, 0.0, create=True)
        assert disk_of(path)["disk path"].found in str(caught.value)
    assert "no does not exist" in disk_of(missing)["disk path"].found and not missing.parent.exists()
    tmp_path.chmod(0o755)
    assert disk_of(tmp_path)["disk path"].state is Severity.WARNING


def test_a_disk_path_of_another_server(tmp_path):
    folder = Folder.open(tmp_path / "tier", 0.0, create=True)
    try:
        found = disk_of(tmp_path / "tier")["disk path"]
        assert found.state is Severity.PROBLEM and f"process {os.getpid()}" in found.found
        wanted = Settings(pool={"disk": {"path": str(tmp_path / "tier"), "capacity": "1MiB"}}).pool
        assert next(examine_backend(wanted, running=True)).state is Severity.OK
    finally:
        folder.close()
    assert disk_of(tmp_path / "tier")["disk path"].state is Severity.OK


def test_models_that_only_their_tensor_size_can_read_are_named():
    bound = {"memory": True, "fingerprint": "aa", "model": "qwen", "tp": "1/4", "bound_to_size": ["group 1 (state): x"]}
    cut = {"memory": True, "fingerprint": "bb", "model": "llama", "tp": "0/2", "bound_to_size": []}
    looks_up = bound | {"memory": False, "fingerprint": "cc"}
    first, second = checks.examine_sharing({"sessions": [bound, bound, cut, looks_up]})
    assert first.check == "model qwen" and first.state is Severity.WARNING
    assert "tensor size 4" in first.found and "group 1 (state)" in first.found
    assert second.check == "model llama" and second.state is Severity.OK
    assert list(checks.examine_sharing(None)) == []


def test_the_arenas_node_is_shown_and_one_that_is_not_there_is_a_problem(monkeypatch):
    monkeypatch.setattr(machine, "memory_nodes", lambda: (0, 1))
    monkeypatch.setattr(machine, "device_nodes", lambda: iter((1,)))
    for setting, state, said in (("auto", Severity.OK, "node 1"), ("3", Severity.PROBLEM, "there are: 0, 1")):
        pool = Settings(pool={"size": "16MiB", "numa": setting}).pool
        (_, found, _) = checks.examine_memory(pool, None)
        assert found.check == "memory node" and found.state is state and said in found.found
