"""Clients that wait for a server of a busy machine as long as it takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from e2e.known import PATIENCE_S
from layerflow.agent import Control, control, observer


@contextmanager
def patient_clients() -> Iterator[None]:
    """What a test only asks is answered late rather than not at all; engines' lookups have patience of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "DEFAULT_TIMEOUT_S", PATIENCE_S)
        for ask in (Control.status, Control.purge, Control.reset, observer.Observer.status, observer.fetch_status):
            patch.setattr(ask, "__defaults__", (PATIENCE_S,))
        yield
