"""What is behind the arena of a bench or demo: a master or MetaService of its own, or the one of a configuration."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from layerflow.config.settings import Settings
from layerflow.errors import ConfigError, LayerflowError
from layerflow.hosts.environment import environment
from layerflow.server.server import tier_of

Kind = Literal["memory", "disk", "mooncake", "memcache", "redis"]
KINDS: tuple[Kind, ...] = ("memory", "disk", "mooncake", "memcache")
READY_S, STOP_S = 60.0, 10.0
LEAST_BYTES = 64 << 20  # that a pool, or a client of one, holds
_SAID_BYTES = 1500  # of what a service printed, in an error
_MASTER_REQUESTS = re.compile(rb"^master_(\w+)_requests_total (\d+)", re.MULTILINE)
_META_REQUESTS = re.compile(rb"^memcache_(batch_\w+)_requests_total (\d+)", re.MULTILINE)
_OF_LIVENESS = (b"ping", b"fetch_tasks")


@dataclass(frozen=True)
class Behind:
    """A pool that is ready.

    :param settings: ``section.key`` to value, for the server.
    :param options: of the backend, for another client of the same pool; a port of its own is in `other`.
    :param other: what of `options` differs for that client.
    :param requests: how many metadata requests the pool has served; always 0 where there is no such thing.
    :param remark: for every table: what is emulated; ``""`` = nothing.
    """

    kind: Kind
    settings: Mapping[str, object]
    options: Mapping[str, Any]
    other: Mapping[str, Any]
    requests: Callable[[], int]
    remark: str = ""


@contextlib.contextmanager
def behind(
    kind: Kind, folder: Path, room: int, config: Path | None = None, cann_emulator: Path | None = None
) -> Iterator[Behind]:
    """A pool of `kind` for the length of a with-block.

    :param folder: of the caller, emptied by it: for logs and the disk tier.
    :param room: bytes of objects that it shall hold.
    :param config: settings that name a running one, or where the disk tier shall be; None = start one.
    :param cann_emulator: an emulated CANN's folder, for memcache.
    :raises LayerflowError: it does not start.
    """
    if kind == "memory":
        yield Behind(kind, {"pool.backend": "memory", "pool.disk.path": ""}, {}, {}, _none)
    elif kind == "disk":
        with _disk(folder, room, config) as found:
            yield found
    elif kind == "mooncake":
        with _mooncake(folder, room, config) as found:
            yield found
    elif kind == "redis":
        with _redis(folder, room, config) as found:
            yield found
    else:
        with _memcache(folder, room, config, cann_emulator) as found:
            yield found


def _none() -> int:
    return 0


def _chosen(
    kind: Kind, config: Path | None, given: Mapping[str, object], other: Mapping[str, Any], requests: Callable[[], int]
) -> Behind:
    """:param given: keys of the backend's section, over those of the configuration."""
    backend = "memory" if kind == "disk" else kind
    given = {"pool.backend": backend, **{f"pool.{kind}.{key}": value for key, value in given.items()}}
    settings = Settings.load(config, given)
    found = tier_of(settings)
    assert found is not None
    section: dict[str, object] = getattr(settings.pool, kind).model_dump(mode="json")
    told = {"pool.backend": backend, **{f"pool.{kind}.{key}": value for key, value in section.items()}}
    remark = "CANN emulated" if section.get("cann_emulator") else ""
    return Behind(kind, told, found[1], other, requests, remark)


@contextlib.contextmanager
def _disk(folder: Path, room: int, config: Path | None) -> Iterator[Behind]:
    path = Settings.load(config).pool.disk.path if config is not None else ""
    with tempfile.TemporaryDirectory(prefix="layerflow-bench-", dir=path or folder) as made:
        given = {"path": f"{made}/tier", "capacity": max(2 * room, LEAST_BYTES)}
        yield _chosen("disk", None, given, {"path": f"{made}/raw"}, _none)


@contextlib.contextmanager
def _mooncake(folder: Path, room: int, config: Path | None) -> Iterator[Behind]:
    if config is not None:
        url = Settings.load(config).pool.mooncake.metrics
        yield _chosen("mooncake", config, {}, {"port": 0}, lambda: _count(_MASTER_REQUESTS, url))
        return
    program = Path(sys.executable).with_name("mooncake_master")
    if not program.exists():
        raise LayerflowError("Mooncake's package is not installed; run tests/backends/setup.sh, or pip install it")
    rpc, metrics, one, two = free_ports(4)
    command = [str(program), "--rpc_address=127.0.0.1", f"--rpc_port={rpc}", "--metrics_host=127.0.0.1"]
    command += [f"--metrics_port={metrics}", "--logtostderr"]
    url = f"http://127.0.0.1:{metrics}"
    # Each client writes to its own segment: what moves does not depend on where the master puts it.
    given = {
        "master": f"127.0.0.1:{rpc}", "metrics": url, "hostname": "127.0.0.1", "port": one,
        "preferred_segment": f"127.0.0.1:{one}", "segment_size": max(room * 2, LEAST_BYTES),
    }  # fmt: skip
    other = {"port": two, "preferred_segment": f"127.0.0.1:{two}"}
    with _service("mooncake_master", command, {}, folder, lambda: _healthy(url)):
        yield _chosen("mooncake", None, given, other, lambda: _count(_MASTER_REQUESTS, url))


@contextlib.contextmanager
def _redis(folder: Path, room: int, config: Path | None) -> Iterator[Behind]:
    if config is not None:
        yield _chosen("redis", config, {}, {}, _none)
        return
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise LayerflowError("there is no redis-server and no valkey-server here; install one, or name a running one")
    path = folder / "redis.sock"
    command = [program, "--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"]
    command += ["--maxmemory", str(max(2 * room, LEAST_BYTES)), "--maxmemory-policy", "allkeys-lru"]
    with _service(Path(program).name, command, {}, folder, lambda: _accepts(path)):
        yield _chosen("redis", None, {"url": f"unix://{path}"}, {}, _none)


@contextlib.contextmanager
def _memcache(folder: Path, room: int, config: Path | None, cann_emulator: Path | None) -> Iterator[Behind]:
    hcom, other_hcom, meta, store, http_port = free_ports(5)
    # Of all memory in the pool the host's is there first: a client may not reach at once what others bring later.
    other = {"hcom_url": f"tcp://127.0.0.1:{other_hcom}", "dram_size": 0}
    given: dict[str, object] = {}
    if cann_emulator is not None:
        given |= {"cann_emulator": str(cann_emulator.resolve()), "protocol": "host_shm"}
    if config is not None:
        url = Settings.load(config).pool.memcache.metrics_url
        yield _chosen("memcache", config, given, other, lambda: _count(_META_REQUESTS, url))
        return
    nbytes = max(room * 2, LEAST_BYTES)
    url = f"http://127.0.0.1:{http_port}"
    urls = {
        "meta_service_url": f"tcp://127.0.0.1:{meta}", "config_store_url": f"tcp://127.0.0.1:{store}",
        "metrics_url": url,
    }  # fmt: skip
    given |= urls | {
        "hcom_url": f"tcp://127.0.0.1:{hcom}", "world_size": 8, "dram_size": nbytes, "max_dram_size": nbytes,
    }  # fmt: skip
    made = _chosen("memcache", None, given, other, lambda: _count(_META_REQUESTS, url))
    command = [sys.executable, "-c", _META_SERVICE, *urls.values(), str(folder)]
    with _service(
        "memcache's MetaService", command, environment("memcache", made.options), folder, lambda: _healthy(url)
    ):
        yield made


_META_SERVICE = """
import sys
import memcache_hybrid
config = memcache_hybrid.MetaConfig()
config.meta_service_url, config.config_store_url, config.metrics_url, config.log_path = sys.argv[1:]
config.log_level, config.log_output_target = "error", "file"
sys.exit(memcache_hybrid.MetaService.setup(config) or memcache_hybrid.MetaService.main())
"""


def _count(pattern: re.Pattern[bytes], url: str) -> int:
    """Requests served, but for those of clients that are only alive."""
    return sum(int(count) for name, count in pattern.findall(_get(url, "/metrics")) if name not in _OF_LIVENESS)


# Processes ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _service(
    name: str, command: list[str], variables: Mapping[str, str], folder: Path, ready: Callable[[], bool]
) -> Iterator[None]:
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=os.environ | variables, cwd=folder
        )
        try:
            until = time.monotonic() + READY_S
            while not ready():
                if process.poll() is not None or time.monotonic() > until:
                    said.seek(0)
                    printed = said.read()[-_SAID_BYTES:].decode(errors="replace").strip()
                    raise LayerflowError(f"{name} did not start; it printed:\n{printed}")
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _healthy(url: str) -> bool:
    try:
        _get(url, "/health")
    except (OSError, http.client.HTTPException):
        return False
    return True


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return not probe.connect_ex(str(path))


def _get(url: str, path: str) -> bytes:
    place = urlsplit(url)
    if place.hostname is None:
        raise ConfigError(f"{url!r}: the bench counts metadata requests there; give the service's HTTP address")
    asked = http.client.HTTPConnection(place.hostname, place.port, timeout=5)
    try:
        asked.request("GET", path)
        answer = asked.getresponse()
        body = answer.read()
        if answer.status != http.HTTPStatus.OK:
            raise ConnectionError(f"{url}{path}: {answer.status}")
        return body
    finally:
        asked.close()


def free_ports(count: int) -> list[int]:
    """Free ports of this machine."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
