"""The exporter of a server: its process, and the leases that it was told of."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import structlog

from layerflow.config.fields import is_loopback
from layerflow.config.settings import Settings
from layerflow.links import links
from layerflow.server.tier.process import HostProcess
from layerflow.wire.host_messages import Extend, Lend, ToServer, Up, Withdraw, Withdrawn
from layerflow.wire.messages import INCARNATION_BYTES, PeerEndpoint
from layerflow.wire.peer_link import LINK_KEY_BYTES, reader_key_of

EXPORTER = "layerflow.hosts.peer.exporter"
WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - recognised, not listened on

log = structlog.get_logger("layerflow.server.peers")


def listen_address(settings: Settings) -> tuple[str, int]:
    """Where the exporter listens: host and port, 0 = any."""
    given = settings.peers.link_address
    if not given:
        host = settings.server.tcp_endpoint.removeprefix("tcp://").rpartition(":")[0]
        return {"*": "0.0.0.0", "": "127.0.0.1"}.get(host, host.strip("[]")), 0  # noqa: S104 - where control listens
    host, _, port = given.rpartition(":")
    return host.strip("[]"), int(port)


class Exporting:
    """Keeps an exporter running.

    :param arena: descriptor and size.
    :param changed: told that its endpoints have changed.
    :param withdrawn: told of each lease that was withdrawn, once nothing of it is read any more.
    :param lost: told that the process is dead: nothing of any lease is read any more, and all of them are over.
    """

    def __init__(
        self,
        settings: Settings,
        arena: tuple[int, int],
        *,
        changed: Callable[[], None],
        withdrawn: Callable[[int], None],
        lost: Callable[[], None],
    ) -> None:
        self._changed, self._withdrawn, self._lost = changed, withdrawn, lost
        host, port = listen_address(settings)
        self._link, self._advertise = settings.peers.link, settings.peers.link_advertise
        shown = self._advertise.rpartition(":")[0].strip("[]") or ("" if host in WILDCARDS else host)
        self._options: dict[str, Any] = {"host": host, "port": port, "link": self._link, "shown": shown}
        self._renew()
        mapped = links()[self._link].maps_arena
        self.host = HostProcess("exporter", self._options, *arena, self, module=EXPORTER, mapped=mapped)
        self.address = ""  #: where it is reached; "" = there is none

    def start(self) -> None:
        """Start the process, on the running loop."""
        self.host.start()

    async def close(self) -> bool:
        """Whether it is dead."""
        return await self.host.close()

    def send(self, message: Lend | Extend | Withdraw) -> bool:
        """False: there is no process, and so nobody who reads."""
        return self.host.send(message)

    def endpoints(self, reader: bytes) -> list[PeerEndpoint]:
        """Where a reader of this name on the link reads; none while there is no exporter."""
        if not self.address:
            return []
        incarnation, key = (bytes.fromhex(self._options[name]) for name in ("incarnation", "key"))
        return [PeerEndpoint(self._link, self.address, incarnation, reader, reader_key_of(key, reader))]

    @property
    def shown(self) -> list[str]:
        """For people: ``link://host:port``."""
        return [f"{self._link}://{self.address}"] if self.address else []

    @property
    def alive(self) -> bool:
        """There is a process, which may be reading."""
        return self.host.state.pid != 0

    def _renew(self) -> None:
        """The next process is another exporter: who looks for the one before must not read from it."""
        self._options["incarnation"] = secrets.token_hex(INCARNATION_BYTES)
        self._options["key"] = secrets.token_hex(LINK_KEY_BYTES)

    def host_said(self, message: ToServer) -> None:
        """News from the process."""
        match message:
            case Up():
                host = str(self._options["host"])
                shown = "" if host in WILDCARDS else host
                where = f"[{shown}]:{message.details['port']}" if ":" in shown else f"{shown}:{message.details['port']}"
                where = self._advertise or where
                self.address = where
                log.info("exporter_up", link=self._link, address=where, loopback=is_loopback(where))
                self._changed()
            case Withdrawn():
                self._withdrawn(message.lease)
            case _:
                pass

    def host_stuck(self, why: str) -> None:
        """It was killed and does not die; it only reads, and what it may read stays as it is until it does."""
        self.address = ""
        self._changed()

    def host_lost(self, why: str) -> None:
        """It is dead."""
        self.address = ""
        self._renew()
        self._lost()
        self._changed()
