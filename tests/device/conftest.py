"""What tests of simulated devices share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from layerflow.system.memfd import SharedMemory


@pytest.fixture
def arena() -> Iterator[SharedMemory]:
    arena = SharedMemory.create(1 << 20)
    yield arena
    arena.close()
