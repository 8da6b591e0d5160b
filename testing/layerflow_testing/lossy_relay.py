"""A relay before an HTTP server that loses questions and answers: cut at a chosen place, or kept for ever."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Callable
from enum import StrEnum

from layerflow_testing.tcp_relay import TcpRelay

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_END = b"\r\n\r\n"


class Loss(StrEnum):
    """What is lost of each question and its answer."""

    POST = "the post"
    POST_CUT = "half of the post"
    ANSWER = "the answer"
    ANSWER_HEAD_CUT = "half of the answer's head"
    ANSWER_CUT = "half of the answer's body"
    RESET = "the connection, while the answer is waited for"
    POST_KEPT = "the post; the connection stays open"
    ANSWER_KEPT = "the answer; the connection stays open"


HANGS = (Loss.POST_KEPT, Loss.ANSWER_KEPT)
"""Nothing tells the asker of these but its own deadline."""
UNHEARD = (Loss.POST, Loss.POST_CUT, Loss.POST_KEPT)
"""The server never hears the whole question."""


class LossyRelay(TcpRelay):
    """See the module.

    :param target: ``host:port`` of the server.
    :param loss: None = passes everything.
    :param asked: is what the server does with a question under way? A connection is reset no earlier.
    """

    def __init__(self, target: str, loss: Loss | None, asked: Callable[[], object] = lambda: True) -> None:
        self.loss, self._asked = loss, asked
        self.questions = 0
        """How many have come."""
        self._closing = threading.Event()
        super().__init__(target)

    def __enter__(self) -> LossyRelay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closing.set()
        super().close()

    def _serve(self, near: socket.socket) -> None:
        while (question := _message(near)) and self._exchange(near, question):
            pass

    def _exchange(self, near: socket.socket, question: bytes) -> bool:
        """Pass one question on, and its answer, as far as they go; whether the connection stays."""
        self.questions += 1
        loss = self.loss
        if loss is Loss.POST_KEPT:
            self._closing.wait()
        if loss in (Loss.POST, Loss.POST_KEPT):
            return False
        with self._connect() as far:
            far.sendall(question[: len(question) // 2] if loss is Loss.POST_CUT else question)
            if loss is Loss.POST_CUT:
                return False
            if loss is Loss.RESET:
                while not (self._asked() or self._closing.wait(0.002)):
                    pass
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return False
            answer = _message(far)
        if loss is Loss.ANSWER_KEPT:
            self._closing.wait()
        head = answer.index(_END) + len(_END) if answer else 0
        passed = {
            None: len(answer),
            Loss.ANSWER_HEAD_CUT: head // 2,
            Loss.ANSWER_CUT: (head + len(answer)) // 2,
        }.get(loss, 0)
        near.sendall(answer[:passed])
        return loss is None


def _message(sock: socket.socket) -> bytes:
    """A whole HTTP message with a content-length; empty where the other end has hung up."""
    data = b""
    while _END not in data:
        more = sock.recv(1 << 16)
        if not more:
            return b""
        data += more
    found = _LENGTH.search(data[: data.index(_END)])
    whole = data.index(_END) + len(_END) + (int(found[1]) if found else 0)
    while len(data) < whole:
        more = sock.recv(1 << 16)
        if not more:
            return b""
        data += more
    return data
