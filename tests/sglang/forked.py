"""What a forked process does to be an SGLang server."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

IDLE_MS = 10
"""An idle scheduler looks for requests, and for what its linker has done, after so long at the latest."""


def serve(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """``python -m sglang.launch_server`` in a process group of its own.

    :param arguments: of its command line. :param log: what it writes goes there.
    """
    from sglang.srt.utils.common import kill_itself_when_parent_died

    kill_itself_when_parent_died()  # which ends with the tests' process, however that ends; SGLang's own do likewise
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.environ.update(environment)
    # Its own processes are forked, too: SGLang asks for new interpreters, which load everything again.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = _keep  # type: ignore[assignment]
    _sleep_when_idle()
    sys.argv = ["sglang.launch_server", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def _keep(method: str, force: bool = False) -> None: ...


def _sleep_when_idle() -> None:
    """Without it each idle scheduler takes a core, and with SGLang's second it ends saves a second late."""
    from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper

    def sleep(self: Any) -> None:
        self.poller.poll(IDLE_MS)

    IdleSleeper.maybe_sleep = sleep
