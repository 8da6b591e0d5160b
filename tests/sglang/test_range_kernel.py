"""The kernel that copies ranges, as Triton's interpreter runs it on host memory. Here, because SGLang brings Triton."""

from __future__ import annotations

import os
import subprocess
import sys

INTERPRETED = """
import numpy as np, torch
from layerflow.device.base import KERNEL_WIDTHS
from layerflow.device.range_kernel import TritonKernel
rng = np.random.default_rng(0)
for width in KERNEL_WIDTHS:
    for count in (0, 1, 5, 77):
        room = width // 8
        memory = rng.integers(1, 1 << 62, 4 * 80 * room)
        source, target = (torch.from_numpy(memory[half : half + 2 * 80 * room].copy()) for half in (0, 2 * 80 * room))
        before = target.clone()
        at, to = (rng.permutation(160)[:count].astype(np.int64) * room for _ in range(2))
        words = rng.integers(1, room // 2 + 1, count) * 2
        addresses = to * 8 + target.data_ptr(), at * 8 + source.data_ptr()
        listed = torch.from_numpy(np.concatenate((*addresses, words)).astype(np.int64))
        TritonKernel().launch(listed, count, width)
        for t, a, n in zip(to, at, words, strict=True):
            before[t : t + n] = source[a : a + n]
        assert torch.equal(target, before), (width, count)
print("equal")
"""


TRIED = """
import types
from unittest import mock
import torch
from layerflow.device import accelerator
from layerflow.device.range_kernel import TritonKernel
class Broken(TritonKernel):
    def launch(self, listed, count, width):
        super().launch(listed, count, width) if width == 512 else None
runtime = types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
stream = types.SimpleNamespace(synchronize=lambda: None)
with mock.patch.multiple(torch.cuda, cudart=lambda: runtime, current_stream=lambda _: stream):
    print(*(accelerator._copies_right(kernel(), torch.device("cpu")) for kernel in (TritonKernel, Broken)))
"""


def interpreted(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_kernel_copies_the_ranges_of_its_list_and_nothing_else() -> None:
    assert interpreted(INTERPRETED) == "equal"


def test_a_kernel_that_copies_other_bytes_is_seen_before_it_is_used() -> None:
    assert interpreted(TRIED) == "True False"
