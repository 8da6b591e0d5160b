"""Cache kinds: what a group needs for a hit, keeps of a chunk, and how its blocks count tokens."""

from layerflow.kinds.base import Kind
from layerflow.kinds.full import Full
from layerflow.kinds.mla import Latent
from layerflow.kinds.sliding import Sliding
from layerflow.kinds.state import RecurrentState

KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in (Full, Latent, Sliding, RecurrentState)}

__all__ = ["KINDS", "Full", "Kind", "Latent", "RecurrentState", "Sliding"]
