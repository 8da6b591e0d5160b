"""What the doctor says of Mooncake and memcache. Their packages are simulated: they need not be installed."""

from pathlib import Path

import pytest

from layerflow import findings
from layerflow.config.settings import Settings
from layerflow.doctor import Finding, Severity, examine_backend
from layerflow.errors import Unsupported
from layerflow.hosts.environment import environment
from layerflow.system import machine


@pytest.fixture
def packages(monkeypatch) -> dict[str, str]:
    """Installed distributions and their versions; `children` in it is what every child process says."""
    found = {"mooncake-transfer-engine": "0.3.13.post1", "memcache_hybrid": "1.3.0", "memfabric_hybrid": "1.3.0"}

    def distribution_of(module: str) -> tuple[str, str] | None:
        name = "mooncake-transfer-engine"
        return (name, found[name]) if name in found else None

    monkeypatch.setattr(findings, "installed", found.get)
    monkeypatch.setattr(findings, "distribution_of", distribution_of)
    monkeypatch.setattr(findings, "has_module", lambda name: "mooncake-transfer-engine" in found)
    monkeypatch.setattr(findings, "child", lambda code: "")
    return found


@pytest.fixture(autouse=True)
def _plain_machine(monkeypatch) -> None:
    monkeypatch.setattr(machine, "rdma_devices", lambda: [])
    monkeypatch.setattr(machine, "devices", lambda pattern: [])
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)


def mooncake(pool: dict | None = None, **keys) -> dict[str, Finding]:
    settings = Settings(
        pool={"backend": "mooncake", "size": "1MiB", "mooncake": {"segment_size": 0} | keys} | (pool or {})
    )
    return {finding.check: finding for finding in examine_backend(settings.pool, running=False)}


def memcache(**keys) -> dict[str, Finding]:
    settings = Settings(pool={"backend": "memcache", "size": "1MiB", "memcache": {"dram_size": 0} | keys})
    return {finding.check: finding for finding in examine_backend(settings.pool, running=False)}


def test_a_mooncake_that_works(packages, open_port, health):
    found = mooncake(master=f"127.0.0.1:{open_port}", metrics=health(200, b"OK") + "/", segment_size="16MiB")
    assert {finding.state for finding in found.values()} == {Severity.OK}, found
    assert {"mooncake package", "libibverbs", "mooncake master", "mooncake health", "mooncake segment"} <= set(found)


def test_a_mooncake_master_that_is_away(packages, closed_port):
    found = mooncake(master=f"127.0.0.1:{closed_port}", metrics=f"http://127.0.0.1:{closed_port}")
    assert found["mooncake master"].state is Severity.PROBLEM
    assert "start mooncake_master" in found["mooncake master"].advice
    assert found["mooncake health"].state is Severity.PROBLEM
    assert "mooncake health" not in mooncake(master=f"127.0.0.1:{closed_port}", metrics="")


def test_a_mooncake_master_that_is_not_well(packages, open_port, health):
    found = mooncake(master=f"127.0.0.1:{open_port}", metrics=health(503, b""))["mooncake health"]
    assert found.state is Severity.PROBLEM and "answered 503" in found.found


def test_mooncake_is_not_installed_or_too_old(packages, open_port):
    master = {"master": f"127.0.0.1:{open_port}", "metrics": ""}
    packages["mooncake-transfer-engine"] = "0.3.12.post1"
    assert "0.3.13 is the first" in mooncake(**master)["mooncake package"].found
    del packages["mooncake-transfer-engine"]
    found = mooncake(**master)["mooncake package"]
    assert (found.state, found.found) == (Severity.PROBLEM, "not installed")
    assert "layerflow[mooncake]" in found.advice


def test_mooncake_libraries_that_cannot_be_loaded(packages, open_port, monkeypatch):
    master = {"master": f"127.0.0.1:{open_port}", "metrics": ""}
    monkeypatch.setattr(findings, "child", lambda code: "it has no sessions" if "mooncake" in code else "")
    found = mooncake(**master)
    assert found["libibverbs"].state is Severity.OK and "no sessions" in found["mooncake package"].found
    assert found["mooncake package"].state is Severity.PROBLEM
    monkeypatch.setattr(findings, "child", lambda code: "OSError: libibverbs.so.1")
    found = mooncake(**master)
    assert found["libibverbs"].state is Severity.PROBLEM and "mooncake package" not in found


def test_mooncake_transport_hostname_and_segment(packages, monkeypatch):
    monkeypatch.setattr(findings, "connects", lambda address: "")
    found = mooncake(master="store:50051", metrics="", protocol="rdma")
    assert found["mooncake transport"].state is Severity.WARNING
    assert found["mooncake address"].state is Severity.PROBLEM
    assert "mooncake address" not in mooncake(master="store:50051", metrics="", hostname="10.0.0.2")
    assert "mooncake segment" not in found
    monkeypatch.setattr(machine, "available_bytes", lambda: 64 << 20)
    monkeypatch.setattr(machine, "cgroup_bytes", lambda: None)
    pool = {"size": "40MiB"}
    assert mooncake(pool, metrics="", segment_size="20MiB")["mooncake segment"].state is Severity.WARNING
    assert mooncake(pool, metrics="", segment_size="30MiB")["mooncake segment"].state is Severity.WARNING
    monkeypatch.setattr(machine, "total_bytes", lambda: 64 << 20)
    assert mooncake(pool, metrics="", segment_size="30MiB")["mooncake segment"].state is Severity.PROBLEM


def urls(port: int) -> dict[str, str]:
    return {"meta_service_url": f"tcp://127.0.0.1:{port}", "config_store_url": f"tcp://127.0.0.1:{port}"}


def test_a_memcache_that_works(packages, open_port, health, tmp_path, monkeypatch):
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libascendcl.so").touch()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    well = health(200, b'{"status":"ok","service_ready":true}')
    found = memcache(**urls(open_port), metrics_url=well, protocol="host_tcp", dram_size="2MiB")
    assert {finding.state for finding in found.values()} == {Severity.OK}, found
    assert {"memcache packages", "cann", "memcache meta service", "memcache health", "memcache memory"} <= set(found)


def test_a_memcache_client_that_others_cannot_reach(packages, monkeypatch):
    monkeypatch.setattr(findings, "connects", lambda address: "")
    away = {"meta_service_url": "tcp://10.0.0.1:5000", "metrics_url": ""}
    assert memcache(**away)["memcache address"].state is Severity.PROBLEM
    assert "memcache address" not in memcache(**away, hcom_url="tcp://10.0.0.2:7000")
    assert "memcache address" not in memcache(**away, protocol="host_shm")


def test_memcache_workers_count_as_clients(packages, monkeypatch):
    monkeypatch.setattr(findings, "connects", lambda address: "")
    monkeypatch.setattr(machine, "devices", lambda pattern: ["davinci0", "davinci1"])
    assert "memcache clients" not in memcache(world_size=2)
    direct = {"direct": True, "metrics_url": "http://127.0.0.1:8000"}
    assert memcache(world_size=2, **direct)["memcache clients"].state is Severity.PROBLEM
    assert "memcache clients" not in memcache(world_size=3, **direct)


def test_a_meta_service_that_is_away_or_not_ready(packages, closed_port, health):
    found = memcache(**urls(closed_port), metrics_url=health(200, b'{"status":"ok","service_ready":false}'))
    assert found["memcache meta service"].state is Severity.PROBLEM
    assert found["memcache config store"].state is Severity.PROBLEM
    assert found["memcache health"].state is Severity.PROBLEM and "not ready" in found["memcache health"].found
    assert (
        memcache(**urls(closed_port), metrics_url=health(200, b"<html>"))["memcache health"].state is Severity.PROBLEM
    )


def test_memcache_packages_must_be_there_and_match(packages, closed_port):
    def found() -> Finding:
        return memcache(**urls(closed_port), metrics_url="")["memcache packages"]

    assert found().state is Severity.OK
    packages["memfabric_hybrid"] = "1.3.1"
    assert found().state is Severity.PROBLEM and "do not work together" in found().found
    packages |= {"memcache_hybrid": "1.2.1", "memfabric_hybrid": "1.2.1"}
    assert found().state is Severity.PROBLEM and "works with 1.3" in found().found
    del packages["memcache_hybrid"]
    assert found().found == "not installed: memcache_hybrid" and "layerflow[ascend]" in found().advice


def test_cann_real_emulated_and_absent(packages, closed_port, tmp_path, monkeypatch):
    def found(**keys) -> Finding:
        return memcache(**urls(closed_port), metrics_url="", **keys)["cann"]

    assert found().found == "ASCEND_HOME_PATH is not set"
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert found().state is Severity.PROBLEM and str(tmp_path) in found().found
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libascendcl.so").touch()
    assert found().state is Severity.OK
    emulated = found(cann_emulator=str(tmp_path))
    assert emulated.state is Severity.WARNING and "no NPU" in emulated.advice


@pytest.mark.parametrize(
    ("name", "text", "usable"),
    [
        ("lib64/libascendcl.so", "", True),
        ("libascendcl.so", "", False),
        ("build.sh", 'mkdir -p "$1/lib64"', True),
        ("build.sh", "echo no compiler >&2; exit 1", False),
    ],
)
def test_an_emulator_is_judged_as_the_host_judges_it(packages, closed_port, tmp_path, monkeypatch, name, text, usable):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "emulator" / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    options = {"cann_emulator": str(tmp_path / "emulator")}
    found = memcache(**urls(closed_port), metrics_url="", **options)["cann"]
    if usable:
        built = environment("memcache", options)["ASCEND_HOME_PATH"]
        assert (found.state, found.found) == (Severity.WARNING, f"emulated: {built}") and Path(built, "lib64").is_dir()
    else:
        with pytest.raises(Unsupported) as refused:
            environment("memcache", options)
        assert (found.state, found.found) == (Severity.PROBLEM, str(refused.value))


@pytest.mark.parametrize(
    ("keys", "state", "words"),
    [
        ({"protocol": "carrier_pigeon"}, Severity.PROBLEM, "host_rdma, host_urma"),
        ({"protocol": "host_rdma"}, Severity.PROBLEM, "host_tcp"),
        ({"protocol": "host_tcp"}, Severity.OK, ""),
        ({"protocol": "device_sdma", "device_id": 3}, Severity.PROBLEM, "device_id"),
        ({"protocol": "host_rdma", "cann_emulator": "/emulator"}, Severity.PROBLEM, "host_tcp or host_shm"),
        ({"protocol": "host_shm", "meta_service_url": "tcp://store:5000"}, Severity.WARNING, "between machines"),
    ],
)
def test_memcache_transports(packages, monkeypatch, keys, state, words):
    monkeypatch.setattr(findings, "connects", lambda address: "")
    found = memcache(metrics_url="", **keys)["memcache transport"]
    assert found.state is state and words in found.advice


def test_the_packages_own_file_replaces_the_keys(packages, open_port, closed_port, tmp_path):
    path = Path(tmp_path / "mmc-local.conf")
    path.write_text(
        f"# ock.mmc.meta_service_url = tcp://nowhere:1\nock.mmc.meta_service_url = tcp://127.0.0.1:{open_port}\n"
        f"ock.mmc.local_service.config_store_url = tcp://127.0.0.1:{closed_port}\n"
        "ock.mmc.local_service.protocol = host_tcp\nock.mmc.local_service.dram.size = 2MB\n"
    )
    found = memcache(**urls(closed_port), config_file=str(path))
    assert found["memcache meta service"].state is Severity.OK
    assert found["memcache config store"].state is Severity.PROBLEM
    assert found["memcache transport"].found == "host_tcp"
    assert "memcache memory" in found and "memcache health" not in found
    assert memcache(config_file=str(tmp_path / "absent"))["memcache file"].state is Severity.PROBLEM
