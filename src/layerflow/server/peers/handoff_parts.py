"""Hand-offs of engines whose ranks are attached to several servers: each server keeps the part of its own workers.

The server of the engine's scheduler opens all parts, and ends them. The first one that fails takes the others with it:
a reader that has asked all of them hears of it from each at once.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from layerflow.errors import shortened
from layerflow.server.handoffs.handoff import HandoffRecord, HandoffStatus
from layerflow.server.handoffs.registry import Handoffs
from layerflow.server.peers.attachment import PeerAttachment
from layerflow.wire import messages as wire
from layerflow.wire.messages import Message

PART_ANSWER_S = 0.15
"""A server that has not opened its part after so long refuses: the prompt's first step waits for it."""


@dataclass(slots=True, eq=False)
class _Parts:
    """One hand-off's parts at other servers.

    :param on_done: told why it is refused, or that it is open (empty). None = it has been told.
    :param at: by the number of its question, who keeps each part. :param waiting: numbers without an answer.
    :param complete: numbers of parts of which everything is stored.
    """

    handoff: HandoffRecord
    on_done: Callable[[str], None] | None
    at: dict[int, PeerAttachment] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    complete: set[int] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None


class HandoffParts:
    """The parts of this server's hand-offs that other servers keep.

    :param numbers: of everything that peers are asked.
    """

    def __init__(self, handoffs: Handoffs, numbers: Iterator[int]) -> None:
        self._handoffs, self._numbers = handoffs, numbers
        self._by_number: dict[int, _Parts] = {}
        self._by_name: dict[str, _Parts] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def open(
        self,
        handoff: HandoffRecord,
        opening: wire.OpenHandoff,
        servers: Sequence[PeerAttachment],
        on_done: Callable[[str], None],
    ) -> None:
        """Ask these to keep their parts of a hand-off that has just been opened here.

        :param on_done: told once, within :data:`PART_ANSWER_S`: why it is refused; empty = all parts are open.
        """
        parts = _Parts(handoff, on_done)
        handoff.parts = len(servers)
        self._by_name[handoff.name] = parts
        self._handoffs.watch(handoff, functools.partial(self._changed, parts))
        for peer in servers:
            number = next(self._numbers)
            parts.at[number] = peer
            self._by_number[number] = parts
            parts.waiting.add(number)
        for number, peer in list(parts.at.items()):
            question = wire.PeerOpenHandoff(
                number, peer.welcome.incarnation if peer.welcome is not None else b"", handoff.engine, handoff.name,
                opening.root, opening.digests, opening.tokens, opening.tail, opening.lease_ms, opening.timeout_ms,
            )  # fmt: skip
            if not peer.up or not peer.send(question):
                self._fail(
                    parts, f"its part at {peer.target.name} cannot be opened: {peer.reason or 'it does not read'}"
                )
                return
        parts.timer = asyncio.get_running_loop().call_later(
            PART_ANSWER_S, self._fail, parts, "a server that keeps a part of it has not answered in time"
        )

    def ended(self, message: wire.EndHandoff, engine: str) -> None:
        """Note that an engine computes nothing more of a hand-off; of another engine's, it ends nothing."""
        parts = self._by_name.get(message.handoff)
        if parts is not None and parts.handoff.engine == engine:
            self._tell(parts, wire.PeerEndHandoff(engine, message.handoff, message.tokens, message.reason))

    def part_answered(self, peer: PeerAttachment, message: wire.PeerHandoffState) -> None:
        """What became of a part."""
        parts = self._by_number.get(message.id)
        if parts is None or parts.at[message.id] is not peer:
            return
        parts.waiting.discard(message.id)
        if message.state == HandoffStatus.COMPLETE.value and message.id not in parts.complete:
            parts.complete.add(message.id)
            self._handoffs.part_stored(parts.handoff)
        elif message.state == HandoffStatus.RELEASED.value:
            # A release goes to all servers that keep a part, and may come there before it comes here.
            self._answer(parts, "it is released")
            self._handoffs.part_released(parts.handoff)
            return
        elif message.state not in (HandoffStatus.OPEN.value, HandoffStatus.COMPLETE.value):
            story = f"{message.state}: {message.reason}" if message.reason else message.state
            self._fail(parts, f"its part at {peer.target.name} is {shortened(story)}")
            return
        if not parts.waiting:
            self._answer(parts, "")

    def refused(self, peer: PeerAttachment, number: int, why: str) -> None:
        """A server does not keep its part."""
        parts = self._by_number.get(number)
        if parts is not None and parts.at[number] is peer:
            self._fail(parts, f"its part at {peer.target.name} is refused: {why}")

    def lost(self, peer: PeerAttachment, why: str) -> None:
        """Nothing of what it keeps can be read."""
        for parts in list(self._by_name.values()):
            if peer in parts.at.values():
                self._fail(parts, f"its part at {peer.target.name} is lost: {why}")

    def kept_at(self, peer: PeerAttachment) -> bool:
        """Does this peer keep a part of a hand-off?"""
        return any(peer in parts.at.values() for parts in self._by_name.values())

    # ---------------------------------------------------------------------------------------------

    def _answer(self, parts: _Parts, why: str) -> None:
        if parts.timer is not None:
            parts.timer.cancel()
            parts.timer = None
        on_done, parts.on_done = parts.on_done, None
        if on_done is not None:
            on_done(why)

    def _fail(self, parts: _Parts, why: str) -> None:
        """Fail the whole hand-off, for one server's part has failed; closing it tells the other servers."""
        self._answer(parts, why)
        self._handoffs.give_up(parts.handoff, why)

    def _changed(self, parts: _Parts, handoff: HandoffRecord) -> None:
        if handoff.status.readable:
            self._handoffs.watch(handoff, functools.partial(self._changed, parts))
            return
        if handoff.status is HandoffStatus.RELEASED:
            self._tell(parts, wire.PeerReleaseHandoff(handoff.name))
        else:
            self._tell(parts, wire.PeerEndHandoff(handoff.engine, handoff.name, 0, handoff.story()))
        if self._by_name.get(handoff.name) is parts:
            del self._by_name[handoff.name]
        for number in parts.at:
            del self._by_number[number]

    def _tell(self, parts: _Parts, message: Message) -> None:
        for peer in parts.at.values():
            if peer.up:
                peer.send(message)
