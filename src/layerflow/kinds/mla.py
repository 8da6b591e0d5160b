"""Multi-head latent attention: full attention's rules on a latent plane, its rope part and side planes."""

from __future__ import annotations

from layerflow.kinds.base import Kind


class Latent(Kind):
    """One latent (and its indexer and scales) of every earlier token."""

    name = "mla"
    vllm = ("MLAAttentionSpec", "AscendMLAAttentionSpec", "AscendSFAIndexerCacheSpec")
