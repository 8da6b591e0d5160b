"""The garbage collector in a process of layerflow's own, where a full collection would stop the loop.

A full collection visits every object: 0.9 s where the directory has a million entries, in which every lookup comes
too late. So objects that have outlived a full collection are frozen, which takes them out of the next ones, once they
are many. Each collection visits what has been made since. Frozen objects are freed when nothing refers to them, as all
are. Only a cycle that was frozen while it was in use, and is given up later, stays for good: serving makes none, for a
step of the core lets go of what refers back to it when it is over.
"""

from __future__ import annotations

import gc

FROZEN_FROM = 10_000
"""Objects that outlive a full collection before they are frozen: some 10 ms of it."""


def keep_collections_short() -> None:
    """Freeze what this process has by now, and from time to time what it has made since.

    For processes of layerflow's own, once, when they have started: it changes the collector of the whole process.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # visits nothing: a full one comes when new objects are a quarter of those, so at once from now on
    gc.set_threshold(*gc.get_threshold()[:2], 1)
    if _freeze not in gc.callbacks:
        gc.callbacks.append(_freeze)


def leave_collections() -> None:
    """Give everything back to the collector."""
    if _freeze in gc.callbacks:
        gc.callbacks.remove(_freeze)
    gc.set_threshold(*gc.get_threshold()[:2], 10)
    gc.unfreeze()


def _freeze(phase: str, info: dict[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2 and len(gc.get_objects(generation=2)) >= FROZEN_FROM:
        gc.freeze()
