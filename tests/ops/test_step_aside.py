"""A copy that leaves its core to the engine's thread may use every core again afterwards, whatever the kernel says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHIM = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
static int calls;
int sched_setaffinity(pid_t pid, size_t size, const cpu_set_t *set) {
    if (++calls == 2) { errno = EINVAL; return -1; }
    return (int)syscall(SYS_sched_setaffinity, pid, size, set) < 0 ? -1 : 0;
}
"""

COPY = """
import os, threading
import numpy as np
from layerflow.ops._copy import copy_batches
before, one = os.sched_getaffinity(0), np.zeros(1, np.int64)
memory = np.zeros(64, np.uint8)
at = memory.ctypes.data
args = (at + 32, at, one, one, one + 8, one + 1, np.zeros(1), np.zeros(1, np.uint8))
copy_batches(*args, threading.get_native_id())
assert os.sched_getaffinity(0) == before, (os.sched_getaffinity(0), before)
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a single core")
def test_a_lane_is_not_left_narrowed(tmp_path: Path) -> None:
    source, shim = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(SHIM)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", shim, source], check=True)
    subprocess.run([sys.executable, "-c", COPY], check=True, env=os.environ | {"LD_PRELOAD": str(shim)})
