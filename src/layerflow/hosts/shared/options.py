"""What a backend is made from in its host process: its section of the configuration, and how long a call may take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import ValidationError

from layerflow.config.fields import BackendOptions
from layerflow.hosts.backend import Unusable


class HostOptions(BackendOptions):
    """Beside a backend's own section, as a second base class.

    :ivar timeout_ms: what a native call may take.
    """

    timeout_ms: int = 5000

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Self:
        """:raises Unusable: an option is unknown, or cannot be meant."""
        try:
            return cls.model_validate(dict(options))
        except ValidationError as error:
            wrong = (
                f"{'.'.join(map(str, each['loc']))}: {each['msg'].removeprefix('Value error, ')}"
                for each in error.errors(include_url=False)
            )
            raise Unusable(f"its section of [pool] cannot be used: {'; '.join(wrong)}") from None
