"""Which caches can be cut between heads, and by what a group is divided where they cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class PlaneInterior(NamedTuple):
    """How one plane's block lies in a worker's memory.

    :param name: the plane's.
    :param heads: KV heads along its head axis; 0 = it has none.
    :param packing: physical order of a block's axes, outermost first, those of one element left out: H heads,
        N tokens, any others. ``"HND"`` is head-major. "" = known to its attention backend only.
    """

    name: str
    heads: int
    packing: str


class HeadAxis(NamedTuple):
    """What the heads of a group's boxes are.

    :param heads: of the whole model. Where heads cannot be cut, each tensor rank's share counts as one head.
    :param refusal: why heads cannot be cut, for log, metric and doctor; "" = they can. Then any tensor size reads what
        any other stored. Layers can be cut in either case.
    """

    heads: int
    refusal: str = ""


def head_axis(kind: str, planes: Sequence[PlaneInterior], model_heads: int, tp_size: int) -> HeadAxis:
    """Apply the rule of cutting to one group, as one of its workers registered it.

    :param kind: the group's cache kind.
    :param planes: all of the group's.
    :param model_heads: KV heads of the model in this group's layers, before they are spread over ranks.
    """
    without = [plane.name for plane in planes if not plane.heads]
    if kind != "state" and len(without) == len(planes):
        return HeadAxis(1)  # every rank holds the same bytes
    refusal = _refusal(kind, planes, without, model_heads, tp_size)
    return HeadAxis(tp_size, refusal) if refusal else HeadAxis(model_heads)


def _refusal(kind: str, planes: Sequence[PlaneInterior], without: list[str], model_heads: int, tp_size: int) -> str:
    if kind == "state":
        return "recurrent state is divided inside its tensors, so it serves the tensor size that stored it"
    if without:
        return (
            f"planes {without} have no head axis and the group's others do; declare them as two groups, so that "
            "what all ranks hold alike is stored once"
        )
    wanted = {model_heads // tp_size, -(-model_heads // tp_size)}
    for plane in planes:
        if plane.heads not in wanted:
            return (
                f"plane {plane.name!r} holds {plane.heads} heads where {model_heads} heads of the model over {tp_size} "
                f"tensor ranks make {max(wanted)}, so its head axis is not the model's KV heads"
            )
        if not plane.packing:
            return f"plane {plane.name!r} is packed in a way that only its attention backend knows"
        if plane.heads > 1 and not plane.packing.startswith("H"):
            return (
                f"plane {plane.name!r} is packed {plane.packing}: tokens outside of heads; ask the engine for a "
                "head-major layout (HND)"
            )
    return ""
