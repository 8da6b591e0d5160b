"""A process that writes objects until it is killed: ``disk_writer.py FOLDER NONCE SEED``.

Says ``.`` before and after each call, and ``c`` when an object is complete; each is waited for once :data:`SIGNS_BYTES`
of them are unread.
"""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path

from hosts.disk_bench import DiskBench
from layerflow_testing import OK, outcomes, put, soon

SIGNS_BYTES = 4096
CAPACITY = 64 << 20
"""More than it writes until then: who kills it late has lost nothing either."""


def main(folder: str, nonce: str, seed: int) -> None:
    bench = DiskBench(Path(folder), CAPACITY)
    bench.nonce = bytes.fromhex(nonce)
    backend = bench.first.backend
    for i in count():
        thing = bench.thing((seed, i), blocks=1 + i % 5, layers=6)
        put(bench, [thing], [0])
        place = [thing.at(bench.first, 0)]
        assert outcomes(backend.open_write(place, soon())) == [OK]
        for layer in range(6):
            os.write(1, b".")
            assert outcomes(backend.write(place, layer, layer + 1, soon())) == [OK]
        os.write(1, b".")
        assert outcomes(backend.commit(place, soon())) == [OK]
        os.write(1, b"c")


if __name__ == "__main__":
    sys.stdout = sys.stderr  # the log's; the pipe is for signs of progress
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
