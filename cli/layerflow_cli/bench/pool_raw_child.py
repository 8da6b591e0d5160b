"""The process behind :class:`layerflow_cli.bench.pool_raw.RawPool`: ``python -m ... SOCKET``.

Lines of JSON: first what to open, then calls; each is answered with the seconds it took.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from layerflow_cli.bench.pool_raw_memcache import RawMemcache
from layerflow_cli.bench.pool_raw_mooncake import RawMooncake
from layerflow_cli.bench.pool_raw_plain import Raw, RawDisk, RawMemory, Shape

KINDS: dict[str, Callable[[dict[str, Any], Shape], Raw]] = {
    "memory": RawMemory,
    "disk": RawDisk,
    "mooncake": RawMooncake,
    "memcache": RawMemcache,
}


def main(fd: int) -> None:
    """Until the other end hangs up."""
    connection = socket.socket(fileno=fd)
    lines = connection.makefile("rb")
    opened: Raw | None = None
    for line in lines:
        message = json.loads(line)
        try:
            if opened is None:
                opened = KINDS[message["kind"]](message["options"], Shape(*message["shape"]))
                seconds = 0.0
            else:
                call = getattr(opened, message["call"])
                began = time.perf_counter()
                call(message["names"])
                seconds = time.perf_counter() - began
            answer: dict[str, Any] = {"seconds": seconds}
        except Exception as error:  # noqa: BLE001 - whatever it is, it is for the other end to tell
            answer = {"error": f"{type(error).__name__}: {error}"}
        connection.sendall(json.dumps(answer).encode() + b"\n")
    if opened is not None:
        opened.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)  # libraries abort when the interpreter is taken down around them
