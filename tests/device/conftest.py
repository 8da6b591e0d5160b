"""What tests of simulated devices leave pinned is no other test's: addresses come back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from layerflow.device import accelerator


@pytest.fixture(autouse=True)
def nothing_pinned() -> Iterator[None]:
    yield
    accelerator._pins.clear()
