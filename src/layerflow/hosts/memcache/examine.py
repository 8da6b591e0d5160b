"""memcache_hybrid: its packages, CANN, the MetaService, the transport."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from layerflow import findings
from layerflow.config.fields import is_loopback
from layerflow.config.settings import PoolSettings, parse_size
from layerflow.errors import ConfigError, Unsupported
from layerflow.findings import Finding, fits, ok, problem, warning
from layerflow.hosts.memcache.environment import emulator, missing_cann
from layerflow.hosts.memcache.metaservice import ready
from layerflow.hosts.memcache.plugin import EMULATED, META_KEY, MemcacheSettings
from layerflow.system import machine

_INSTALL = 'pip install "layerflow[ascend]"'
_OLDEST, _BEFORE = (1, 3), (1, 4)
_HOST = ("host_rdma", "host_urma", "host_tcp", "host_shm")
_DEVICE = ("device_rdma", "device_urma", "device_uboe", "device_sdma")
_IMPORT = """
from memcache_hybrid import DistributedObjectStore as Store
for name in ("batch_alloc", "batch_copy", "batch_write_finish", "batch_add_lease"):
    if not hasattr(Store, name):
        raise SystemExit(f"it has no {name}")
"""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What counts: the settings, or the package's own file where one is given."""

    meta: str
    store: str
    protocol: str
    dram: int


def examine(settings: MemcacheSettings, pool: PoolSettings, running: bool) -> Iterator[Finding]:
    """Everything that `backend = "memcache"` needs."""
    yield from _packages()
    yield _cann(settings)
    wanted = _wanted(settings)
    if wanted is None:
        yield problem(
            "memcache file",
            f"{settings.config_file} cannot be read, or sets no {META_KEY}",
            "correct pool.memcache.config_file; the package brings config/mmc-local.conf as an example",
        )
        return
    yield from _meta_service(settings, wanted)
    yield _transport(settings, wanted)
    yield from _clients(settings)
    if wanted.dram:
        arena = 0 if pool.hugepages else pool.size
        held = None if running else 0
        yield fits("memcache memory", wanted.dram, "pool.memcache.dram_size", beside=arena, held=held)


def _packages() -> Iterator[Finding]:
    check = "memcache packages"
    versions = {name: findings.installed(name) for name in ("memcache_hybrid", "memfabric_hybrid")}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        yield problem(check, f"not installed: {', '.join(missing)}", _INSTALL)
        return
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    releases = {findings.release(version or "") for version in versions.values()}
    if len(releases) > 1:
        yield problem(check, f"{found}: these do not work together", "install the same version of both")
    elif not _OLDEST <= min(releases)[:2] < _BEFORE:
        yield problem(check, f"{found}: layerflow works with 1.3", _INSTALL)
    elif why := findings.child(_IMPORT):
        yield problem(check, f"{found} cannot be used: {why}", f"{_INSTALL} --force-reinstall")
    else:
        yield ok(check, found)


def _clients(settings: MemcacheSettings) -> Iterator[Finding]:
    """This machine's clients: the server's host, and with `direct` one engine worker for each NPU."""
    here = 1 + (len(machine.devices("davinci[0-9]*")) if settings.direct else 0)
    if settings.world_size < here:
        yield problem(
            "memcache clients",
            f"world_size = {settings.world_size}, and this machine alone may have {here}: the server and, with "
            f"direct = true, one worker for each NPU",
            "raise pool.memcache.world_size on all machines of the pool, and start the MetaService anew",
        )


def _cann(settings: MemcacheSettings) -> Finding:
    check = "cann"
    if settings.cann_emulator:
        try:
            built = emulator(Path(settings.cann_emulator))
        except Unsupported as error:
            return problem(check, str(error), 'correct it, or set pool.memcache.cann_emulator = "" for the real CANN')
        return warning(check, f"emulated: {built}", "for tests and demos only; no NPU is used")
    if found := missing_cann():
        return problem(check, found, "install CANN and source its set_env.sh before the server starts")
    return ok(check, os.environ["ASCEND_HOME_PATH"])


def _wanted(settings: MemcacheSettings) -> _Wanted | None:
    if not settings.config_file:
        return _Wanted(settings.meta_service_url, settings.config_store_url, settings.protocol, settings.dram_size)
    try:
        keys = settings.file_keys()
    except (OSError, UnicodeDecodeError):
        return None
    local = "ock.mmc.local_service."
    if META_KEY not in keys:
        return None
    try:
        dram = parse_size(keys.get(f"{local}dram.size", "0"))
    except ConfigError:
        dram = 0  # the package knows more spellings than layerflow; its own check comes at start
    protocol = keys.get(f"{local}protocol", settings.protocol)
    return _Wanted(keys[META_KEY], keys.get(f"{local}config_store_url", ""), protocol, dram)


def _meta_service(settings: MemcacheSettings, wanted: _Wanted) -> Iterator[Finding]:
    for check, url, key in (
        ("memcache meta service", wanted.meta, "meta_service_url"),
        ("memcache config store", wanted.store, "config_store_url"),
    ):
        why = findings.connects(url) if url else ""
        if why:
            advice = f"start the MetaService, or correct {key}"
            yield problem(check, f"{url} cannot be reached: {why}", advice)
        elif url:
            yield ok(check, f"{url} accepts connections")
    if settings.metrics_url and not settings.config_file:
        yield _health(settings.metrics_url.rstrip("/") + "/health")


def _health(url: str) -> Finding:
    why, body = findings.http_get(url)
    if not why and not ready(body):
        why = f"not ready: {body[:120].decode(errors='replace')!r}"
    if why:
        advice = 'look at the MetaService\'s log, or correct pool.memcache.metrics_url ("" = do not ask)'
        return problem("memcache health", f"{url}: {why}", advice)
    return ok("memcache health", f"{url} answers")


def _transport(settings: MemcacheSettings, wanted: _Wanted) -> Finding:
    check, protocol = "memcache transport", wanted.protocol
    if protocol not in (*_HOST, *_DEVICE):
        return problem(check, f"{protocol!r} is none", f"choose one of {', '.join((*_HOST, *_DEVICE))}")
    if settings.cann_emulator and protocol not in EMULATED:
        return problem(check, f"{protocol} does not work with the emulator", "choose host_tcp or host_shm")
    if protocol in _DEVICE and not machine.devices(f"davinci{settings.device_id}"):
        return problem(
            check, f"{protocol}: no /dev/davinci{settings.device_id}", "correct device_id, or choose host_tcp"
        )
    if protocol == "host_rdma" and not machine.rdma_devices():
        return problem(
            check, "host_rdma: this machine has no RDMA device", "choose host_tcp, or host_shm on one machine"
        )
    if protocol == "host_shm" and not is_loopback(wanted.meta):
        return warning(
            check,
            "host_shm reaches processes of this machine only, and the MetaService is elsewhere",
            "choose host_rdma or host_tcp to share objects between machines",
        )
    return ok(check, protocol)
