"""A bar for memory whose pages are being taken from the machine: the arena, and a segment given to a shared pool."""

from __future__ import annotations

from typing import Protocol

import anyio
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from layerflow_cli.output import console

LOOK_S = 0.2


class Warming(Protocol):
    """What knows how far it is; see :meth:`layerflow.server.Server.warmth`."""

    def warmth(self) -> dict[str, tuple[int, int]]: ...


async def show_warming(server: Warming) -> None:
    """On a terminal, until everything is warm; nothing elsewhere: metrics and status say it too."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        return
    what = TextColumn("taking memory: {task.description}")
    columns = (what, BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        tasks = {}
        while True:
            warmth = server.warmth()
            for name, (done, total) in warmth.items():
                if name not in tasks:
                    tasks[name] = bar.add_task(name, total=total)
                bar.update(tasks[name], completed=done, total=total)
            if all(done >= total for done, total in warmth.values()):
                return
            await anyio.sleep(LOOK_S)
