"""What a backend needs in its process's environment before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def environment(backend: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Variables to add to the server's own. Imports nothing native.

    :param backend: the backend's name.
    :param options: its section of the configuration.
    """
    return {}
