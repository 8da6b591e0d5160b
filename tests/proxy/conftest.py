"""What several tests of the proxy ask for."""

import pytest

from layerflow.proxy import legs


@pytest.fixture
def prefills_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that counts tokens waits for its prefill's, however late that is.

    Side by side a decoder may answer first; its request would then end before the prefill has, or has even arrived.
    """
    monkeypatch.setattr(legs, "_WAIT_S", 60.0)
