"""The process behind :class:`layerflow_cli.bench.pool.raw.process.RawPool`: ``python -m ... SOCKET``.

Lines of JSON: first what to open, then calls; each is answered with the seconds it took.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from typing import Any

from layerflow.config.pool import MEMORY
from layerflow_cli.bench.pool.raw.plain import Raw, RawMemory, Shape
from layerflow_cli.bench.pool.raw.process import module_of


def make(kind: str, options: dict[str, Any], shape: Shape) -> Raw:
    """Nothing is imported of the other kinds: each has a module and a class of its name."""
    if kind == MEMORY:
        return RawMemory(options, shape)
    module = importlib.import_module(module_of(kind))
    made: Raw = getattr(module, f"Raw{kind.capitalize()}")(options, shape)
    return made


def main(fd: int) -> None:
    """Until the other end hangs up."""
    connection = socket.socket(fileno=fd)
    lines = connection.makefile("rb")
    opened: Raw | None = None
    for line in lines:
        message = json.loads(line)
        try:
            if opened is None:
                opened = make(message["kind"], message["options"], Shape(*message["shape"]))
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
