"""A disk tier whose folder is read slowly, for a host process to find by the name :data:`NAME`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from layerflow.hosts.disk.backend import Disk

NAME = "hosts.slow_disk:SlowDisk"


class SlowDisk(Disk):
    """:param options: of the disk tier, and ``gate``: a FIFO from which listing the last shard takes a byte."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        real = os.scandir

        def scandir(path: str) -> Any:
            if str(path).endswith("/ff"):
                with open(options["gate"], "rb", buffering=0) as gate:
                    gate.read(1)
            return real(path)

        os.scandir = scandir  # type: ignore[assignment]
