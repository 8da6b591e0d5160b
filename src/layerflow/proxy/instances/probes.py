"""Asks each engine's ``/health`` again and again."""

from __future__ import annotations

import anyio
import httpx
import structlog

from layerflow.config.proxy import ProxySettings
from layerflow.proxy.instances.instance import Instance
from layerflow.proxy.instances.registry import Registry

_SERVER_ERROR = 500
_BODY_BYTES = 1 << 16  # of a health's answer: more is not read
_SLICES = 10  # of a probe's time-out
_LATE_S = 0.05
_MOST_LATE = 10
_log = structlog.get_logger("layerflow.proxy")


async def probe_all(registry: Registry, settings: ProxySettings) -> None:
    """Probe every engine until cancelled, each in its own time: one that hangs holds up no other's probe."""
    probed: set[Instance] = set()
    async with anyio.create_task_group() as tasks:
        while True:
            probed &= set(registry.all)
            for instance in registry.all:
                if instance not in probed:
                    probed.add(instance)
                    tasks.start_soon(_probe, registry, instance, settings)
            await registry.close_retired()
            await anyio.sleep(settings.probe_interval_s)


async def _probe(registry: Registry, instance: Instance, settings: ProxySettings) -> None:
    failed = 0
    while instance in registry.all:
        reason = await _ask(instance, settings.probe_timeout_s)
        failed = failed + 1 if reason else 0
        if failed >= settings.probe_failures and not instance.down:
            _log.warning("instance_down", role=instance.role.value, url=instance.url, reason=reason, probes=failed)
            instance.went_down()
        elif not failed and instance.down:
            _log.info("instance_up", role=instance.role.value, url=instance.url)
            instance.down = False
        await anyio.sleep(settings.probe_interval_s)


async def _ask(instance: Instance, timeout_s: float) -> str:
    """Why the engine is not well; empty if it is. One without ``/health`` (404) answers, and so is up."""
    found: str | None = None

    async def ask() -> None:
        nonlocal found
        try:
            answer, _ = await instance.fetch("GET", "/health", _BODY_BYTES)
            found = "" if answer.status_code < _SERVER_ERROR else f"HTTP {answer.status_code}"
        except httpx.HTTPError as error:
            found = f"{type(error).__name__}: {error}"
        waiting.cancel_scope.cancel()

    async with anyio.create_task_group() as waiting:
        waiting.start_soon(ask)
        await sleep_on_time(timeout_s)
        waiting.cancel_scope.cancel()
    return f"no answer in {timeout_s:g} s" if found is None else found


async def sleep_on_time(duration_s: float) -> None:
    """Sleep, and longer by what the event loop was late.

    An answer that came while the loop was busy with something else lies in its socket until the loop comes to it: that
    time is not the engine's. A loop that is always late counts all the same, after ten times `duration_s`.
    """
    slice_s = duration_s / _SLICES
    ends_at = anyio.current_time() + _MOST_LATE * duration_s
    slept = 0
    while slept < _SLICES and anyio.current_time() < ends_at:
        began = anyio.current_time()
        await anyio.sleep(slice_s)
        if anyio.current_time() - began - slice_s <= max(slice_s, _LATE_S):
            slept += 1
