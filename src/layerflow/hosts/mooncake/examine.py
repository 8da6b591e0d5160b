"""A Mooncake store: the package, what it loads, its master, the segment."""

from __future__ import annotations

from collections.abc import Iterator

from layerflow import findings
from layerflow.config.settings import PoolSettings
from layerflow.findings import Finding, fits, ok, problem, warning
from layerflow.hosts.mooncake.plugin import MooncakeSettings
from layerflow.system import machine

_OLDEST = (0, 3, 13)
_INSTALL = 'pip install "layerflow[mooncake]"'
_VERBS = "import ctypes\nctypes.CDLL('libibverbs.so.1')"
_SESSIONS = """
from mooncake.store import MooncakeDistributedStore as Store
for name in ("batch_put_session_start", "batch_get_session_start", "batch_put_from_multi_buffer_ranges"):
    if not hasattr(Store, name):
        raise SystemExit(f"it has no {name}")
"""


def examine(settings: MooncakeSettings, pool: PoolSettings, running: bool) -> Iterator[Finding]:
    """Everything that `backend = "mooncake"` needs."""
    yield from _package()
    yield _master(settings)
    if settings.metrics:
        yield _health(settings)
    yield from _transport(settings)
    if settings.segment_size:
        arena = 0 if pool.hugepages else pool.size
        held = None if running else 0
        yield fits("mooncake segment", settings.segment_size, "pool.mooncake.segment_size", beside=arena, held=held)


def _package() -> Iterator[Finding]:
    check = "mooncake package"
    if not findings.has_module("mooncake"):
        yield problem(check, "not installed", _INSTALL)
        return
    name, version = findings.distribution_of("mooncake") or ("mooncake", "")
    if version and findings.release(version) < _OLDEST:
        yield problem(check, f"{name} {version} has no sessions; 0.3.13 is the first that has", f"{_INSTALL} --upgrade")
        return
    why = findings.child(_VERBS)
    if why:
        yield problem("libibverbs", f"libibverbs.so.1 cannot be loaded: {why}", "apt-get install libibverbs1")
        return
    yield ok("libibverbs", "libibverbs.so.1 can be loaded")
    why = findings.child(_SESSIONS)
    if why:
        yield problem(check, f"{name} {version} cannot be used: {why}", f"{_INSTALL} --upgrade")
    else:
        yield ok(check, f"{name} {version}, with sessions")


def _master(settings: MooncakeSettings) -> Finding:
    why = findings.connects(settings.master)
    if why:
        return problem(
            "mooncake master",
            f"{settings.master} cannot be reached: {why}",
            "start mooncake_master, or correct pool.mooncake.master",
        )
    return ok("mooncake master", f"{settings.master} accepts connections")


def _health(settings: MooncakeSettings) -> Finding:
    url = settings.metrics.rstrip("/") + "/health"
    why, _ = findings.http_get(url)
    if why:
        advice = 'look at the master\'s log, or correct pool.mooncake.metrics ("" = do not ask)'
        return problem("mooncake health", f"{url}: {why}", advice)
    return ok("mooncake health", f"{url} answers")


def _transport(settings: MooncakeSettings) -> Iterator[Finding]:
    if settings.protocol == "rdma" and not machine.rdma_devices():
        yield warning(
            "mooncake transport",
            "this machine has no RDMA device; Mooncake then silently uses TCP",
            'set pool.mooncake.protocol = "tcp", or install the device\'s driver',
        )
    else:
        yield ok("mooncake transport", settings.protocol)
