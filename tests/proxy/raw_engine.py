"""An engine of bytes: it answers every POST with the bytes that it was given, whatever a decent server would say."""

import contextlib
import socket
import threading
from collections.abc import Sequence

_PIECE = b"100000\r\n" + bytes(1 << 20) + b"\r\n"


def raw_answer(
    body: bytes, *, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = (), length: int | None = None
) -> bytes:
    """The head and the body of an HTTP response.

    :param length: that it promises, if not the true one.
    """
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n" % status
    for name, value in headers:
        head += name + b": " + value + b"\r\n"
    return head + b"content-length: %d\r\n\r\n" % (len(body) if length is None else length) + body


class RawEngine:
    """Serves on threads. ``/health`` is always well.

    :param answer: what it sends to every other request; see :func:`raw_answer`.
    :param endless: send a chunked body without an end instead of the answer's.
    """

    def __init__(self, answer: bytes, *, endless: bool = False) -> None:
        self._answer, self._endless = answer, endless
        self.heads: list[bytes] = []
        self.sent = 0  #: bytes of endless bodies
        self._open: list[socket.socket] = []

    def __enter__(self) -> "RawEngine":
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._open.append(client)
                self._threads.append(threading.Thread(target=self._serve, args=(client,), daemon=True))
                self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            while head := self._request(client):
                self.heads.append(head)
                if b" /health " in head:
                    client.sendall(raw_answer(b""))
                elif self._endless:
                    head, _, _ = self._answer.partition(b"content-length")
                    client.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
                    while True:
                        client.sendall(_PIECE)
                        self.sent += len(_PIECE)
                else:
                    client.sendall(self._answer)

    def _request(self, client: socket.socket) -> bytes:
        """The head of the next one, whose body has come; empty where there is none."""
        data = b""
        while b"\r\n\r\n" not in data:
            if not (more := client.recv(65536)):
                return b""
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        left = (int(lengths[0].partition(b":")[2]) if lengths else 0) - len(body)
        while left > 0:
            left -= len(client.recv(65536)) or left
        return head + b"\r\n"
