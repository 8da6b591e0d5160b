"""The fork server of :mod:`multiprocessing`: a Python process has one, and tests want it with modules loaded ahead."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext

import pytest

_running: list[tuple[Sequence[str], Mapping[str, str]]] = []


def fork_server(preload: Sequence[str], environment: Mapping[str, str]) -> ForkServerContext:
    """A context whose processes have ``preload`` imported under ``environment``.

    A server with others, or one that was not started here, is stopped first: what it forked lives on, and its exit code
    is not seen any more.
    """
    context = multiprocessing.get_context("forkserver")
    if not _running or _running[-1] != (preload, environment):
        multiprocessing.forkserver._forkserver._stop()  # there is no public way
        _running.clear()
    context.set_forkserver_preload(list(preload))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        # The fork server does not get this process's sys.path, and would find nothing to load ahead.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        multiprocessing.forkserver.ensure_running()
    if not _running:
        _running.append((preload, environment))
    return context
