"""Clients of embedded servers, which share this process's interpreter with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.patience import patient_clients


@pytest.fixture(autouse=True)
def _patient() -> Iterator[None]:
    with patient_clients():
        yield
