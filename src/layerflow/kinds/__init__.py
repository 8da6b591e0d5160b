"""Cache kinds: what a group needs for a hit, keeps of a chunk, and how its blocks count tokens.

Each module of this package but :mod:`.base` is one kind: a new file is all that a new one takes.
"""

import importlib
import pkgutil

from layerflow.kinds.base import Kind
from layerflow.kinds.full import Full
from layerflow.kinds.mla import Latent
from layerflow.kinds.sliding import Sliding
from layerflow.kinds.state import RecurrentState


def _found() -> dict[str, type[Kind]]:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return {kind.name: kind for kind in Kind.__subclasses__()}


KINDS: dict[str, type[Kind]] = _found()

__all__ = ["KINDS", "Full", "Kind", "Latent", "RecurrentState", "Sliding"]
