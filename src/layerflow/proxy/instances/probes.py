"""Asks each engine's ``/health`` again and again."""

from __future__ import annotations

import anyio
import httpx
import structlog

from layerflow.config.proxy import ProxySettings
from layerflow.proxy.instances.instance import Instance
from layerflow.proxy.instances.registry import Registry

_SERVER_ERROR = 500
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
    try:
        with anyio.fail_after(timeout_s):
            answer = await instance.client.get("/health")
    except TimeoutError:
        return f"no answer in {timeout_s:g} s"
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    return "" if answer.status_code < _SERVER_ERROR else f"HTTP {answer.status_code}"
