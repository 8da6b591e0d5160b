"""What the handlers of messages work on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerflow.config.settings import ServerSettings
from layerflow.errors import ProtocolError
from layerflow.observe.metrics import Metrics
from layerflow.observe.slow_steps import SlowSteps
from layerflow.pool.base import Pool
from layerflow.server.driver import Driver
from layerflow.server.log_limit import LogLimit
from layerflow.server.plans import Plans
from layerflow.server.sessions import ClientSession, Sessions
from layerflow.server.turns import Turns
from layerflow.wire import messages as wire
from layerflow.wire.messages import Message

if TYPE_CHECKING:
    from layerflow.server.tier.tier import Tier


class Refused(ProtocolError):
    """A well-formed message that cannot be done now; `code` is the Problem's code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class ServerContext:
    """What the handlers work on.

    :param send: queue a message for a session.
    :param lease_s: how long leases usually last.
    :param tier: what lies behind the pool; None = nothing.
    :param direct: engine workers may move bytes past the arena.
    :param draining: the server takes no new work.
    :param incarnation: names the arena.
    """

    pool: Pool
    plans: Plans
    incarnation: int
    driver: Driver
    sessions: Sessions
    metrics: Metrics
    slow_steps: SlowSteps
    send: Callable[[ClientSession, Message], None]
    terms: Callable[[], wire.Terms]
    status: Callable[[], dict[str, object]]
    arena_bytes: int
    settings: Callable[[], ServerSettings]
    lease_s: Callable[[], float]
    turns: Turns = field(default_factory=Turns)
    log_limit: LogLimit = field(default_factory=LogLimit)
    tier: Tier | None = None
    direct: bool = False
    draining: bool = False
