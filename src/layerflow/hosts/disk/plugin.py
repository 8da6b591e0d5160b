"""The entry point of this backend, and its section of the configuration."""

from __future__ import annotations

import tempfile
from pathlib import Path

from layerflow.backends import LEAST_TRIAL_BYTES, Plugin, Trial
from layerflow.config.fields import BackendOptions, PathText, Size, setting


class DiskSettings(BackendOptions):
    """A persistent tier under the arena: with ``backend = "disk"``, or with ``path`` alone."""

    path: PathText = setting("", 'Directory of the tier, of this server alone; "" = off.')
    capacity: Size = setting(64 << 30, "Most bytes of objects kept there.", unit="bytes", ge=1 << 20)


_ROUNDS = 64


def trial(options: DiskSettings, folder: Path, nbytes: int, running: bool) -> Trial:
    """See :class:`layerflow.backends.Plugin`. A folder within that of the user: what is in theirs stays as it is."""
    made = tempfile.mkdtemp(prefix="trial-", dir=options.path if running and options.path else folder)
    # Only the tier removes its files, so there is room for those of many rounds.
    given = {"path": f"{made}/tier", "capacity": max(_ROUNDS * nbytes, LEAST_TRIAL_BYTES)}
    return Trial(options=given, other={"path": f"{made}/raw"}, made=Path(made))


PLUGIN = Plugin(
    backend="layerflow.hosts.disk.backend:Disk",
    options=DiskSettings,
    chosen_by="path",
    examine="layerflow.hosts.disk.examine:examine",
    trial="layerflow.hosts.disk.plugin:trial",
)
