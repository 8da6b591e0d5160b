"""What the weights are called after a reset, where their operator names them."""

from __future__ import annotations

import structlog

from layerflow.connectors.vllm.identity.identity import name_of
from layerflow.content import name_in
from layerflow.errors import ConfigError

log = structlog.get_logger("layerflow.vllm")


class Weights:
    """The name in a file, read again in the first step after each reset.

    vLLM resets when it pauses: the new weights, and their name, come between that and the next step.

    :param written: ``model_content`` of the connector's options; only ``@FILE`` can name other weights.
    """

    def __init__(self, written: str) -> None:
        self._written = written
        self._last = ""
        self.unnamed = False

    def replaced(self, content: str) -> None:
        """The weights are being replaced; `content` is what the old ones are called in keys."""
        if not self._written.startswith("@"):
            return
        self.unnamed = True
        self._last = name_in(content)

    def name(self) -> str:
        """The present weights' name; "" where they have none of their own: the old one would bring back old KV."""
        self.unnamed = False
        try:
            name = name_of(self._written)
        except ConfigError as error:
            log.warning("weights_not_named", error=str(error))
            return ""
        if name == self._last:
            log.warning("weights_not_named", error=f"{self._written} still holds {name!r}, the name of the old ones")
            return ""
        return name
