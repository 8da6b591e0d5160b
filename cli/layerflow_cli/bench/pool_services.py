"""What is behind the arena of a bench or demo: a master or MetaService of its own, or the one of a configuration."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
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

from layerflow.config import Settings
from layerflow.errors import ConfigError, LayerflowError
from layerflow.hosts.environment import environment

Kind = Literal["memory", "disk", "mooncake", "memcache"]
KINDS: tuple[Kind, ...] = ("memory", "disk", "mooncake", "memcache")
READY_S, STOP_S = 60.0, 10.0
_SAID_BYTES = 1500  # of what a service printed, in an error
_MASTER_REQUESTS = re.compile(rb"^master_(\w+)_requests_total (\d+)", re.MULTILINE)
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
    :param config: settings that name a running one; None = start one.
    :param cann_emulator: an emulated CANN's folder, for memcache.
    :raises LayerflowError: it does not start.
    """
    if kind == "memory":
        yield Behind(kind, {"pool.backend": "memory", "pool.disk.path": ""}, {}, {}, _none)
    elif kind == "disk":
        yield _disk(folder, room, config)
    elif kind == "mooncake":
        with _mooncake(folder, room, config) as found:
            yield found
    else:
        with _memcache(folder, room, config, cann_emulator) as found:
            yield found


def _none() -> int:
    return 0


def _disk(folder: Path, room: int, config: Path | None) -> Behind:
    given = Settings.load(config).pool.disk if config is not None else None
    path = Path(given.path) if given is not None and given.path else folder
    options = {"path": str(path / "tier"), "capacity": 2 * room}
    settings = {"pool.backend": "memory", **{f"pool.disk.{key}": value for key, value in options.items()}}
    return Behind("disk", settings, options, {"path": str(path / "raw")}, _none)


# Mooncake ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _mooncake(folder: Path, room: int, config: Path | None) -> Iterator[Behind]:
    if config is not None:
        options = Settings.load(config).pool.mooncake.model_dump(mode="json")
        yield _of_mooncake(options, {"port": 0})
        return
    program = Path(sys.executable).with_name("mooncake_master")
    if not program.exists():
        raise LayerflowError("Mooncake's package is not installed; run tests/backends/setup.sh, or pip install it")
    rpc, metrics, one, two = free_ports(4)
    command = [str(program), "--rpc_address=127.0.0.1", f"--rpc_port={rpc}", "--metrics_host=127.0.0.1"]
    command += [f"--metrics_port={metrics}", "--logtostderr"]
    url = f"http://127.0.0.1:{metrics}"
    # Each client writes to its own segment: what moves does not depend on where the master puts it.
    options = Settings.load(None).pool.mooncake.model_dump(mode="json") | {
        "master": f"127.0.0.1:{rpc}", "metrics": url, "hostname": "127.0.0.1", "port": one,
        "preferred_segment": f"127.0.0.1:{one}", "segment_size": max(room * 2, 64 << 20),
    }  # fmt: skip
    with _service("mooncake_master", command, {}, folder, lambda: _healthy(url)):
        yield _of_mooncake(options, {"port": two, "preferred_segment": f"127.0.0.1:{two}"})


def _of_mooncake(options: Mapping[str, Any], other: Mapping[str, Any]) -> Behind:
    settings = {"pool.backend": "mooncake", **{f"pool.mooncake.{key}": value for key, value in options.items()}}
    return Behind("mooncake", settings, options, other, lambda: _mooncake_requests(options["metrics"]))


def _mooncake_requests(url: str) -> int:
    """All but those of clients that are only alive."""
    found = _MASTER_REQUESTS.findall(_get(url, "/metrics"))
    return sum(int(count) for name, count in found if name not in _OF_LIVENESS)


# memcache ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _memcache(folder: Path, room: int, config: Path | None, cann_emulator: Path | None) -> Iterator[Behind]:
    if config is not None:
        options = Settings.load(config).pool.memcache.model_dump(mode="json")
    else:
        options = Settings.load(None).pool.memcache.model_dump(mode="json") | {"dram_size": max(room * 2, 64 << 20)}
    if cann_emulator is not None:
        options |= {"cann_emulator": str(cann_emulator.resolve()), "protocol": "host_shm"}
    hcom = free_ports(1)[0]
    remark = "CANN emulated" if options["cann_emulator"] else ""
    if config is not None:
        yield _of_memcache(options, {"hcom_url": f"tcp://127.0.0.1:{hcom}"}, remark)
        return
    meta, store, metrics, own = free_ports(4)
    options |= {
        "meta_service_url": f"tcp://127.0.0.1:{meta}", "config_store_url": f"tcp://127.0.0.1:{store}",
        "metrics_url": f"http://127.0.0.1:{metrics}", "hcom_url": f"tcp://127.0.0.1:{own}", "world_size": 8,
    }  # fmt: skip
    names = ("meta_service_url", "config_store_url", "metrics_url")
    command = [sys.executable, "-c", _META_SERVICE, *(options[name] for name in names), str(folder)]
    with _service(
        "memcache's MetaService",
        command,
        environment("memcache", options),
        folder,
        lambda: _healthy(options["metrics_url"]),
    ):
        yield _of_memcache(options, {"hcom_url": f"tcp://127.0.0.1:{hcom}"}, remark)


_META_SERVICE = """
import sys
import memcache_hybrid
config = memcache_hybrid.MetaConfig()
config.meta_service_url, config.config_store_url, config.metrics_url, config.log_path = sys.argv[1:]
config.log_level, config.log_output_target = "error", "file"
sys.exit(memcache_hybrid.MetaService.setup(config) or memcache_hybrid.MetaService.main())
"""


def _of_memcache(options: Mapping[str, Any], other: Mapping[str, Any], remark: str) -> Behind:
    settings = {"pool.backend": "memcache", **{f"pool.memcache.{key}": value for key, value in options.items()}}
    return Behind("memcache", settings, options, other, lambda: _memcache_requests(options["metrics_url"]), remark)


def _memcache_requests(url: str) -> int:
    raise NotImplementedError


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
    """Ports of this machine that nobody listens on."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
