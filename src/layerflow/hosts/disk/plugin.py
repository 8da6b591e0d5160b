"""The entry point of this backend, and its section of the configuration."""

from __future__ import annotations

from layerflow.backends import Plugin
from layerflow.config.fields import BackendOptions, Size, setting


class DiskSettings(BackendOptions):
    """A persistent tier under the arena; only with ``backend = "memory"``."""

    path: str = setting("", 'Directory of the tier, of this server alone; "" = off.')
    capacity: Size = setting(64 << 30, "Most bytes of objects kept there.", unit="bytes", ge=1 << 20)


PLUGIN = Plugin(
    backend="layerflow.hosts.disk.backend:Disk",
    options=DiskSettings,
    chosen_by="path",
    examine="layerflow.hosts.disk.examine:examine",
)
