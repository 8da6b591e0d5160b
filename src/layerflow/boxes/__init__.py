"""Which part of a model's cache a worker holds and an object covers, and how one is put together from others.

A box is layers x KV heads of one group, in the model's own numbers: never ranks, never sizes. Workers of any tensor and
pipeline size can then read what others stored. Nothing here knows bytes or memory.
"""

from layerflow.boxes.box import TO_THE_END, Box, Cover, Piece, Replica, cover, replica_of, worker_box
from layerflow.boxes.shard import HeadAxis, PlaneInterior, head_axis

__all__ = [
    "TO_THE_END",
    "Box",
    "Cover",
    "HeadAxis",
    "Piece",
    "PlaneInterior",
    "Replica",
    "cover",
    "head_axis",
    "replica_of",
    "worker_box",
]
