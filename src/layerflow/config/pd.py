"""The settings of prefill and decode apart: what is kept for a decoder, and what a lookup may wait for."""

from __future__ import annotations

from typing import Literal

from layerflow.config.fields import Real, Section, setting


class PdSettings(Section):
    """Prefill and decode in engines of their own. Every key may change while the server runs."""

    follow: Literal["asked", "auto"] = setting(
        "asked",
        "Lookups hit what is still being stored where their request asks for it (a hand-off), or also where another "
        "engine is storing it and waiting is quicker than computing it.",
        live=True,
    )
    handoff_share: Real = setting(
        0.25,
        "Hand-offs keep at most this share of the arena; past it the oldest that is complete is taken back.",
        unit="of the arena",
        live=True,
        ge=0.0,
        le=0.9,
    )
    handoff_lease_s: Real = setting(
        30.0,
        "A complete hand-off is kept so long for a decoder that has not come, and after one that has.",
        unit="s",
        live=True,
        ge=0.1,
        le=3600,
    )
