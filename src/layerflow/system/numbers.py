"""Numbers of what a process asks, opens and begins: each larger than the one before, as long as it lives.

Whatever carries such a number holds 64 bits without a sign: msgpack's integers, a connection's name, the nonces of
CURVE, the place of an answer in its connection (:data:`layerflow.wire.peer_link.STAMP`). Fields of 16 and 32 bits hold
only what is counted within one message or one object: positions, blocks, tokens, layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

first = 1
"""Where those that begin from now on start. A process that has run for long has come far: tests begin there."""


def ascending() -> Iterator[int]:
    """From :data:`first` on."""
    return itertools.count(first)
