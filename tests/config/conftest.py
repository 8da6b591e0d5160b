"""What tests of the settings share: an environment without any, files that have some, and refusals."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from layerflow.config.settings import Settings
from layerflow.errors import ConfigError


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LAYERFLOW_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def toml(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a configuration file."""

    def write(text: str) -> Path:
        path = tmp_path / "layerflow.toml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def refusal() -> Callable[..., list[str]]:
    """Loads settings that must be refused; the lines of the message."""

    def load(path: Path | None = None, overrides: dict[str, object] | None = None) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            Settings.load(path, overrides or {})
        return str(caught.value).splitlines()

    return load
