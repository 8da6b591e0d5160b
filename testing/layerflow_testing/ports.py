"""A port for a process that has to be told one: bound here for as long as it may be used, never guessed.

Where a process can choose its port (0) and tell it, or take a socket by inheritance, do that instead.
"""

from __future__ import annotations

import socket


class HeldPort:
    """A TCP port of this machine's loopback that nobody else is given while it is held.

    It is bound and does not listen: connections are refused, and the kernel gives the port to nobody who asks for any.
    A server that is told the number may still bind it, which servers do with SO_REUSEADDR or SO_REUSEPORT, and may end
    and bind it again.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((host, 0))
        self.number = int(self._socket.getsockname()[1])

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<HeldPort {self.address}>"

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"{self._host}:{self.number}"

    @property
    def url(self) -> str:
        """``http://host:port``."""
        return f"http://{self.address}"

    def release(self) -> None:
        """Let others have it."""
        self._socket.close()


_HELD: list[HeldPort] = []


def held_ports(count: int) -> list[int]:
    """So many ports that are held until this process ends, for programs that it starts."""
    held = [HeldPort() for _ in range(count)]
    _HELD.extend(held)
    return [port.number for port in held]
