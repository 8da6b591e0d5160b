"""What tests of simulated devices share. What they leave pinned is no other test's: addresses come back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from layerflow.device import accelerator
from layerflow.system.memfd import SharedMemory


@pytest.fixture(autouse=True)
def nothing_pinned() -> Iterator[None]:
    yield
    accelerator._pins.clear()


@pytest.fixture
def arena() -> Iterator[SharedMemory]:
    arena = SharedMemory.create(1 << 20)
    yield arena
    arena.close()
