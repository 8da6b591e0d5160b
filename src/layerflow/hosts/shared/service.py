"""A store's metadata service, as seen without the store's library: is it up, is it well, is it still the same one?

The libraries cannot be asked. While Mooncake's master is dead its ``health_check()`` stays 0 and calls block for
seconds; while memcache's MetaService hangs each call blocks for a minute. And a service that was started again knows
of no lease and of no allocation: its predecessor's memory is given to other objects.
"""

from __future__ import annotations

from collections.abc import Callable

from layerflow.hosts.backend import Unreachable
from layerflow.hosts.shared.monitor import HttpProbe, ServiceMonitor


class Service:
    """One metadata service's addresses.

    :param whose: for messages, e.g. ``Mooncake's master``.
    :param monitor: of the port whose connection tells when the service ends.
    :param http: the service's HTTP.
    :param held: the connection is kept. False: :meth:`check` only knocks, and :attr:`generation` never changes.
    :param ready: whether the body of ``/health`` says that the service is well.
    """

    def __init__(
        self,
        whose: str,
        monitor: ServiceMonitor,
        http: HttpProbe,
        *,
        held: bool = True,
        ready: Callable[[bytes], bool] = lambda _: True,
    ) -> None:
        self._whose, self._monitor, self._http, self._held, self._ready = whose, monitor, http, held, ready
        self._illness: tuple[int, str] = (-1, "")  # the generation in which the last check failed, and why

    @property
    def lost(self) -> int:
        """How often the service was found to have ended."""
        return self._monitor.lost if self._held else 0

    @property
    def generation(self) -> int:
        """A number that changes when the service ends or is lost; 0 = it is not there now. Sends nothing."""
        return self._monitor.generation if self._held else 1

    @property
    def ill(self) -> str:
        """Why the last check failed, until the next one passes or the service is another; empty = it is well.

        A call to a service that hangs would block its lane for seconds, and each job behind it as long again.
        """
        generation, why = self._illness
        return why if why and generation == self.generation else ""

    def reach(self) -> int:
        """The :attr:`generation`, after connecting again where that is needed.

        :raises Unreachable: it does not accept a connection.
        """
        return self._monitor.reach() if self._held else 1

    def check(self, probe: Callable[[], None] = lambda: None) -> None:
        """Look; what was found decides over :attr:`ill`.

        :param probe: what else must get through.
        :raises Unreachable: it accepts no connection, its HTTP does not say that it is well, or the probe says so.
        """
        try:
            self._look()
            probe()
        except Unreachable as error:
            self._illness = (self.generation, str(error))
            raise
        self._illness = (-1, "")

    def largest_segment(self) -> int:
        """See :meth:`HttpProbe.largest_segment`."""
        return self._http.largest_segment()

    def close(self) -> None:
        """Drop the connection."""
        self._monitor.close()

    def _look(self) -> None:
        self._monitor.reach()
        if not self._held:
            self._monitor.close()
            return
        body = self._http.get("/health")
        if not self._ready(body):
            raise Unreachable(f"{self._whose} is not ready: {body[:200].decode(errors='replace')}")
