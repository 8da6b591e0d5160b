"""Full attention: a hit needs every token before it."""

from __future__ import annotations

from layerflow.kinds.base import Kind


class Full(Kind):
    """Keys and values of every earlier token."""

    name = "full"
    vllm = ("FullAttentionSpec",)
