"""A client of the control protocol that knows nothing of layerflow but docs/protocol.md.

    python examples/raw_protocol_client.py ipc:///run/user/1000/layerflow-1000/control

Greets, says hello, asks for the server's status and prints it. Needs pyzmq, and msgspec for msgpack;
a message is a plain list ``[number, field, field, ...]``.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from typing import Any

import msgspec
import zmq

MAGIC, VERSION = b"LFLW", 2
FINGERPRINT = bytes.fromhex("f90faff4a6462543ae8cc77550190524")  # from docs/protocol.md
GREETING = struct.pack("<4sHH16s", MAGIC, VERSION, 0, FINGERPRINT)

HELLO, BEAT, STATUS_REQUEST, BYE = 1, 7, 8, 10
WELCOME, STATUS, PROBLEM = 101, 108, 199
TIMEOUT_MS = 2000


class Client:
    """One conversation with a server."""

    def __init__(self, endpoint: str, context: zmq.Context[Any] | None = None) -> None:
        self.socket = (context or zmq.Context.instance()).socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def receive(self) -> bytes:
        if not self.socket.poll(TIMEOUT_MS):
            raise TimeoutError("the server did not answer; is it running at that endpoint?")
        (frame,) = self.socket.recv_multipart()
        return frame

    def greet(self) -> None:
        self.socket.send(GREETING)
        answer = self.receive()
        if answer != GREETING:
            raise RuntimeError(f"the server speaks another protocol: {answer.hex()}, this client {GREETING.hex()}")

    def ask(self, message: list[Any], expected: int) -> list[Any]:
        self.socket.send(msgspec.msgpack.encode(message))
        while True:
            answer = msgspec.msgpack.decode(self.receive())
            if answer[0] == PROBLEM:
                raise RuntimeError(f"refused, {answer[2]}: {answer[3]}")
            if answer[0] == expected:
                return list(answer)

    def hello(self, engine: str = "raw") -> list[Any]:
        return self.ask([HELLO, engine, "example", os.getpid()], WELCOME)

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.ask([STATUS_REQUEST, 1], STATUS)[2]))

    def close(self) -> None:
        self.socket.send(msgspec.msgpack.encode([BYE]))
        self.socket.close(linger=100)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(
            f"usage: {sys.argv[0]} ENDPOINT, which `layerflow run` says, e.g. ipc:///run/user/1000/layerflow-1000/control"
        )
    client = Client(sys.argv[1])
    client.greet()
    _, session, version, fd_server, *_ = client.hello()
    print(f"session {session} of layerflow {version}, fd server at {fd_server}")
    print(json.dumps(client.status(), indent=2))
    client.close()


if __name__ == "__main__":
    main()
