"""Reads everything that a folder of the disk tier lists, as its host would, and says what it found. A process."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from layerflow.hosts.backend import OK, ObjectLocation, ObjectResult
from layerflow.hosts.disk.backend import Disk
from layerflow.objects import HEADER_BYTES, check_header
from layerflow.system.memfd import SharedMemory

CAPACITY = 1 << 40
PATIENCE_S = 60.0


def main(folder: Path, layers: int, block_bytes: int) -> None:
    """:param block_bytes: of one block in one layer."""
    bad: list[str] = []
    with SharedMemory.create(16 << 20) as arena:
        disk = Disk({"path": str(folder), "capacity": CAPACITY})
        index = disk.attach(arena, lambda keys: None).index
        assert index is not None
        for entry in index:
            layer_bytes = entry.blocks * block_bytes
            place = ObjectLocation(
                entry.key, 0, arena.address, layer_bytes, layers, entry.blocks, entry.tokens, entry.parent
            )
            until = time.monotonic() + PATIENCE_S
            bad += worst(disk.open_fetch([place], until))
            bad += worst(disk.fetch([place], 0, layers, until))
            check_header(arena.view[:HEADER_BYTES], entry.key, entry.blocks)
            disk.close_fetch([place])
        disk.close()
    print(json.dumps({"objects": len(index), "bad": bad}))


def worst(verdicts: Sequence[ObjectResult]) -> list[str]:
    """What is not well about them."""
    return [f"{verdict.outcome.name}: {verdict.reason}" for verdict in verdicts if verdict is not OK]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
