"""Tells routers what an engine can hit: a thread that describes chunks to the server, and reads what becomes of them.

The engine's own thread puts what it stores and hits into a list, and that is all. Every heartbeat the announcer sends
that on, reads the server's changes piece by piece, and hands on the blocks that came and went. So every engine that
shares a pool tells the same of it, whichever of them has stored it.

What is told follows the pool by a heartbeat. Where the server is lost nothing can be hit, and that is told; what a
router has missed, because it was away or because its copy was cleared, it is told again.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import structlog

from layerflow.agent.control import Control
from layerflow.connectors.common.block_ledger import BlockEvent, BlockLedger
from layerflow.errors import LayerflowError, VersionMismatch
from layerflow.system.threads import OwnedThread
from layerflow.wire.messages import ChunkChange, ChunkDescription

HEARTBEAT_S = 0.5
"""How far what is told may lag behind the pool."""

SHARE = 0.25
"""Of one core, at most, while there is much to tell: the rest is the engine's interpreter."""

MOST_WAITING = 4096
"""Requests whose chunks wait to be described; of more the oldest are dropped, and told once they are hit."""

MOST_SENT = 256
"""Descriptions of one message."""

MOST_UNREAD = 16
"""Messages of descriptions, of some 270 KB, before the server is asked something: it keeps what waits to be handled."""

MOST_REMEMBERED = 65_536
"""Chunks that are not described twice."""

PIECE_EVENTS = 64
"""Events that are handed on together."""

RESTART_S = 1.0
UPGRADE_S = 10.0
"""How often a server of an older protocol is asked again."""
JOIN_S = 5.0
ANSWER_S = 2.0
"""A server that has not answered for so long has nothing."""

log = structlog.get_logger("layerflow.events")

Describe = Callable[[], Iterable[ChunkDescription]]
"""Makes the descriptions of one request's chunks, the last one first."""


class Router(Protocol):
    """Where events go, and what is known of who hears them. Called on the announcer's thread."""

    def publish(self, events: Sequence[BlockEvent]) -> None:
        """Send events; may wait. Where it raises it has sent none of them, and is given them again."""

    def missed(self) -> bool:
        """Since the last call: has somebody connected, or forgotten everything?"""


class Announcer:
    """Of one engine and model; its thread runs from :meth:`start` on.

    :param connect: makes a client of the server, attached with the model's spec.
    :param ledger: of the engine's blocks.
    :param router: takes the events.

    :ivar dropped: requests that were not described, because too many waited.
    """

    def __init__(
        self,
        connect: Callable[[], Control],
        ledger: BlockLedger,
        router: Router,
        *,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._connect = connect
        self._ledger = ledger
        self._router = router
        self._heartbeat_s = heartbeat_s
        self._control: Control | None = None
        self._next: tuple[Callable[[], Control], BlockLedger] | None = None
        self._withdrawn = False  #: nothing can be hit until the next model is known
        self._waiting: deque[tuple[Describe, bool]] = deque()
        self._described: OrderedDict[bytes, None] = OrderedDict()
        self._lost_chunks: list[ChunkDescription] = []
        self._stale: set[bytes] = set()
        self._again: Iterator[list[BlockEvent]] | None = None
        self._unsent: list[BlockEvent] = []  #: the ledger is ahead of routers by these, in this order
        self._epoch = self._after = self._begun = 0
        self._retry_at = 0.0
        self._is_silent = False  #: the server is of a version that cannot tell
        self._closing = threading.Event()
        self._thread = OwnedThread("layerflow-events", self._run, restart_s=RESTART_S)
        self.dropped = 0

    def start(self) -> Announcer:
        """Begin."""
        self._thread.start()
        return self

    def stored(self, describe: Describe) -> None:
        """A request stores chunks. Any thread; nothing is described here."""
        self._put(describe, False)

    def found(self, describe: Describe) -> None:
        """A request has hit chunks: those that are not told are described, whoever has stored them."""
        self._put(describe, True)

    def replace(self, connect: Callable[[], Control], ledger: BlockLedger) -> None:
        """The engine's keys are others from here on: what was told can be hit no more. Any thread; returns at once."""
        self._waiting.clear()
        self._next, self._withdrawn = (connect, ledger), False

    def withdraw(self) -> None:
        """What was told can be hit no more, nor anything else until :meth:`replace`. Any thread; returns at once."""
        self._next, self._withdrawn = None, True

    def close(self) -> None:
        """End."""
        self._closing.set()
        self._thread.join(JOIN_S)
        self._hang_up()

    def turn(self) -> None:
        """One heartbeat."""
        if (model := self._next) is not None:
            self._next = None
            self._forget_all()
            self._connect, self._ledger = model
        if self._withdrawn:
            self._waiting.clear()
            self._forget_all()
            self._hand_on()
            return
        self._hand_on()
        if self._router.missed():
            log.info("router_told_again", chunks=len(self._ledger))
            self._again = self._ledger.again()
        # Before what is new, which may follow what such a router has still to hear of.
        if self._again is not None and self._tell_again(self._again, time.monotonic() + self._heartbeat_s):
            self._again = None
        if time.monotonic() < self._retry_at:
            self._waiting.clear()
            return
        if self._control is None:
            self._control = self._connect()
        try:
            self._read(self._control)  # first: descriptions are left out that this very server has
            if self._describe(self._control):
                self._read(self._control)
        except VersionMismatch as error:
            self._server_is_older(error)
        except LayerflowError as error:
            self._server_lost(error)
        self._hand_on()

    def _put(self, describe: Describe, hit: bool) -> None:
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append((describe, hit))

    def _run(self) -> None:
        dropped = 0
        while not self._closing.wait(self._heartbeat_s):
            self.turn()
            if self.dropped > dropped:
                log.warning("chunks_not_described", requests=self.dropped - dropped, effect="told once they are hit")
                dropped = self.dropped

    # To the server ---------------------------------------------------------------------------------

    def _describe(self, control: Control) -> bool:
        """Describe what waits now, the oldest request first. Whether there was anything."""
        sent, waiting = 0, len(self._waiting)
        while self._lost_chunks and not self._closing.is_set():
            self._send(control, self._lost_chunks[:MOST_SENT])
            del self._lost_chunks[:MOST_SENT]
            sent += 1
            if sent % MOST_UNREAD == 0:
                self._read(control)
        for _ in range(waiting):
            try:
                describe, hit = self._waiting.popleft()
            except IndexError:  # emptied meanwhile: the keys are others
                break
            began = time.monotonic()
            self._send(control, [chunk for chunk in describe() if self._is_news(chunk.digest, hit)])
            if self._rest(time.monotonic() - began):
                break
        return bool(sent or waiting)

    def _is_news(self, digest: bytes, hit: bool) -> bool:
        if digest in self._ledger or (not hit and digest in self._described):
            return False
        self._described[digest] = None
        if len(self._described) > MOST_REMEMBERED:
            self._described.popitem(last=False)
        return True

    def _send(self, control: Control, chunks: Sequence[ChunkDescription]) -> None:
        for at in range(0, len(chunks), MOST_SENT):
            control.describe_chunks(chunks[at : at + MOST_SENT], ANSWER_S)

    # From the server -------------------------------------------------------------------------------

    def _read(self, control: Control) -> None:
        """Read until there is nothing more."""
        while True:
            began = time.monotonic()
            read = control.read_chunks(self._epoch, self._after, self._begun, ANSWER_S)
            if read.epoch != self._epoch or not self._after or not read.upto:
                self._start_over(read.epoch)
            for change in read.chunks:
                self._unsent += self._told(change)
            if not read.more:
                for digest in self._stale:
                    self._unsent += self._ledger.gone(digest)
                self._stale = set()
            # Last: what raises before is read again.
            self._after, self._begun, self._is_silent = read.upto, read.begun, False
            worked_s = time.monotonic() - began
            self._hand_on()
            if self._rest(worked_s) or not read.more:
                return

    def _told(self, change: ChunkChange) -> list[BlockEvent]:
        self._stale.discard(change.digest)
        if not any(change.states):
            self._described.pop(change.digest, None)  # whoever stores it again describes it again
        return self._ledger.apply(change)

    def _start_over(self, epoch: int) -> None:
        """Another server answers, or one that has forgotten what was not read: all is told anew."""
        if epoch != self._epoch:
            self._described.clear()
            self._keep_descriptions()
        self._epoch, self._after, self._begun = epoch, 0, 0
        self._stale = self._ledger.known()

    def _server_lost(self, error: LayerflowError) -> None:
        """Nothing can be hit. What is known is described to the server that comes: it may still have it on disk."""
        if self._epoch:
            log.warning("events_interrupted", reason=str(error), chunks=len(self._ledger), effect="told as gone")
        self._keep_descriptions()
        lost = self._lost_chunks
        self._forget_all()
        self._lost_chunks = lost

    def _keep_descriptions(self) -> None:
        """For a server that has none of them, beside those that it was still to be told."""
        lost = {each.digest: each for each in self._lost_chunks}
        for each in reversed(self._ledger.chunks()):
            lost.setdefault(each.digest, ChunkDescription(each.digest, each.parent, each.tokens, each.extra))
        self._lost_chunks = list(lost.values())

    def _server_is_older(self, error: VersionMismatch) -> None:
        """Tell nothing until it is upgraded. What is stored meanwhile is told once it is hit."""
        if not self._is_silent:
            log.warning("routers_not_told", reason=str(error), effect="until the server is upgraded")
        self._is_silent = True
        self._retry_at = time.monotonic() + UPGRADE_S
        self._waiting.clear()
        self._forget_all()

    def _forget_all(self) -> None:
        """Nothing can be hit any more."""
        self._epoch = self._after = self._begun = 0
        self._described.clear()
        self._lost_chunks = []
        self._stale = set()
        self._again = None
        for piece in self._ledger.clear():
            self._unsent += piece
        self._hang_up()

    def _hang_up(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    # To routers ------------------------------------------------------------------------------------

    def _tell_again(self, pieces: Iterator[list[BlockEvent]], until: float) -> bool:
        """Hand these on; False where `until` (monotonic seconds) has come before their end."""
        began = time.monotonic()
        for piece in pieces:
            self._unsent += piece
            if len(self._unsent) >= PIECE_EVENTS:
                worked_s = time.monotonic() - began
                self._hand_on()
                self._rest(worked_s)
                if (began := time.monotonic()) >= until:
                    return False
        self._hand_on()
        return True

    def _hand_on(self) -> None:
        """Tell the router what it has still to hear. What it raises on stays, and is told first of all."""
        while self._unsent:
            began = time.monotonic()
            self._router.publish(self._unsent[:PIECE_EVENTS])
            del self._unsent[:PIECE_EVENTS]
            self._rest(time.monotonic() - began)

    def _rest(self, worked_s: float) -> bool:
        """Leave the interpreter to the engine for a while; True = the announcer is closing."""
        return self._closing.wait(worked_s * (1 / SHARE - 1))
