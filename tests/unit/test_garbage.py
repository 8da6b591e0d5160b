"""Collections of the server's process visit what is new, and cycles of what is new are still collected."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from layerflow.system.garbage import FROZEN_FROM, keep_collections_short

class Cyclic:
    live = 0
    def __init__(self):
        Cyclic.live += 1
        self.own = self
    def __del__(self):
        Cyclic.live -= 1

visited = []
gc.callbacks.append(
    lambda phase, info: visited.append(len(gc.get_objects(generation=2)))
    if phase == "start" and info["generation"] == 2 else None
)
keep_collections_short()
keep_collections_short()
assert len(gc.callbacks) == 2, "asked twice, it freezes once"
visited.clear()
kept = [[number] for number in range(600_000)]
assert visited, "full collections go on"
assert max(visited) < 5 * FROZEN_FROM, f"a full collection visited {max(visited)} old objects of {len(kept)}"
assert gc.get_freeze_count() > 500_000
del kept
assert gc.get_freeze_count() < 500_000, "frozen objects are freed as all are"
for _ in range(50_000):
    Cyclic()
gc.collect()
assert Cyclic.live == 0, "cycles are collected"
"""


def test_full_collections_stay_short_while_the_process_grows() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)
