"""Speculative decoding in tests. The draft model is the model itself: what a right cache makes it guess is accepted."""

from __future__ import annotations

from typing import Any

import pytest
from engines import MODELS, VERSION, Engine

needs_drafts = pytest.mark.skipif(VERSION < (0, 32), reason="this vLLM runs no draft model on a CPU")
DRAFTED: dict[str, Any] = {
    "speculative_config": {"method": "draft_model", "model": str(MODELS / "llama"), "num_speculative_tokens": 2},
    "disable_log_stats": False,
}
_ACCEPTED, _GUESSED = "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens"


class Guesses:
    """What an engine's draft model has guessed since this was made."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = self._counts()

    def share(self) -> float:
        """How many of them were accepted, of all."""
        accepted, guessed = (now - before for now, before in zip(self._counts(), self._before, strict=True))
        return accepted / guessed

    def _counts(self) -> tuple[float, float]:
        return self._engine.metric(_ACCEPTED), self._engine.metric(_GUESSED)
