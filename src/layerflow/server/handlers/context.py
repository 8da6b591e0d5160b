"""What the handlers of messages work on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerflow.config.settings import PdSettings, ServerSettings
from layerflow.observe.logs import LogRateLimiter
from layerflow.observe.metrics import Metrics
from layerflow.observe.slow_steps import SlowSteps
from layerflow.pool.base import Pool
from layerflow.server.chunk_journal import ChunkJournal
from layerflow.server.clients import AnySession, ClientSession, Sessions
from layerflow.server.driver import Driver
from layerflow.server.handoffs.registry import Handoffs
from layerflow.server.leases import Leases
from layerflow.server.mailboxes import Mailboxes
from layerflow.server.plans import PinnedHits
from layerflow.server.recorder import Recorder
from layerflow.server.spans import SpanQuestions
from layerflow.server.trial import Trials
from layerflow.wire import messages as wire
from layerflow.wire.messages import Message

if TYPE_CHECKING:
    from layerflow.server.peers.peers import Peers
    from layerflow.server.sources import ObjectSources


@dataclass(slots=True)
class ServerContext:
    """What the handlers work on.

    :param send: queue a message for a session.
    :param hang_up: end a client's connection, for this reason; False: it is one of this process's own, which has none.
    :param journal: what engines have said of their chunks, and what became of these.
    :param handoffs: what is kept for decode engines.
    :param pd: the settings of prefill and decode apart.
    :param leases: what lookups have leased.
    :param recorder: takes notes of what happens, while a recording is wanted.
    :param trials: settings that a client tries.
    :param span_questions: what workers are asked of their last steps.
    :param sources: where objects come from that are not in the pool; None = nowhere.
    :param peers: servers that read here, and that are read from; None = there are none.
    :param direct: engine workers may move bytes past the arena.
    :param draining: the server takes no new work.
    :param incarnation: names the arena.
    """

    pool: Pool
    plans: PinnedHits
    incarnation: int
    driver: Driver
    sessions: Sessions
    metrics: Metrics
    slow_steps: SlowSteps
    send: Callable[[ClientSession, Message], None]
    hang_up: Callable[[AnySession, str], bool]
    terms: Callable[[], wire.Terms]
    status: Callable[[], dict[str, object]]
    arena_bytes: int
    settings: Callable[[], ServerSettings]
    journal: ChunkJournal
    handoffs: Handoffs
    pd: Callable[[], PdSettings]
    leases: Leases
    mailboxes: Mailboxes
    recorder: Recorder
    trials: Trials
    span_questions: SpanQuestions
    log_limit: LogRateLimiter = field(default_factory=LogRateLimiter)
    sources: ObjectSources | None = None
    peers: Peers | None = None
    direct: bool = False
    draining: bool = False
