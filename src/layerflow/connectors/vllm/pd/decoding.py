"""The decode engine's end of a hand-off: found, waited for, loaded, or lost and computed here."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import structlog

from layerflow.agent.values import Follow, Hit
from layerflow.connectors.vllm.pd.conventions import concurrent, metaserver
from layerflow.connectors.vllm.pd.conventions.parts import DecodePart, Sizes
from layerflow.connectors.vllm.pd.conventions.terms import HandoffTerms
from layerflow.connectors.vllm.pd.http_calls import HttpCall, HttpCalls
from layerflow.connectors.vllm.pd.layouts import first_difference
from layerflow.errors import InvalidTransition, ProtocolError

if TYPE_CHECKING:
    from layerflow.agent.connection.control import Control
    from layerflow.agent.connection.lookups import Lookups

log = structlog.get_logger("layerflow.vllm.pd")


class DecodeStatus(StrEnum):
    """Where a hand-off is, as its decode engine sees it."""

    SEEKING = "seeking"
    """The prefill engine's servers are not known yet."""
    WAITING = "waiting"
    """It is not open yet."""
    CLAIMED = "claimed"
    """It can be read: a load follows, or is under way."""
    LOADED = "loaded"
    LOST = "lost"
    """What is stored is loaded, the rest computed."""
    RELEASED = "released"


TRANSITIONS = {
    DecodeStatus.SEEKING: (DecodeStatus.WAITING, DecodeStatus.LOST, DecodeStatus.RELEASED),
    DecodeStatus.WAITING: (DecodeStatus.CLAIMED, DecodeStatus.LOST, DecodeStatus.RELEASED),
    DecodeStatus.CLAIMED: (DecodeStatus.WAITING, DecodeStatus.LOADED, DecodeStatus.LOST, DecodeStatus.RELEASED),
    DecodeStatus.LOADED: (DecodeStatus.RELEASED,),
    DecodeStatus.LOST: (DecodeStatus.RELEASED,),
    DecodeStatus.RELEASED: (),
}


@dataclass(slots=True)
class DecodeHandoff:
    """Of one request.

    :param until: monotonic seconds: what is not there by then is computed.
    :param servers: where it is looked for now.
    :param tried: how many of the other places have been tried.
    :param post: to the metaserver.
    :param query: for its servers.
    :param reason: why it is lost.
    :param has_loaded: all of it arrived.
    """

    part: DecodePart
    until: float
    servers: tuple[str, ...]
    status: DecodeStatus = DecodeStatus.WAITING
    tried: int = 0
    post: HttpCall | None = None
    query: HttpCall | None = None
    reason: str = ""
    has_loaded: bool = False

    @property
    def followed(self) -> bool:
        """Lookups of the request ask for the hand-off."""
        return self.status in (DecodeStatus.WAITING, DecodeStatus.CLAIMED)

    def become(self, status: DecodeStatus) -> None:
        """:raises InvalidTransition: not from here."""
        if status not in TRANSITIONS[self.status]:
            raise InvalidTransition(f"hand-off {self.part.handoff}: {self.status} cannot become {status}")
        self.status = status


class Decoding:
    """One per scheduler's side, for its thread.

    :param control: releases what is known only when its request is over, on any thread.
    :param layout: this engine's, see :mod:`.layouts`.
    :param incarnation: of this engine.
    """

    def __init__(
        self, lookups: Lookups, control: Control, *, layout: dict[str, str], sizes: Sizes, incarnation: str
    ) -> None:
        self._lookups, self._control = lookups, control
        self._layout = layout
        self._sizes = sizes
        self._incarnation = incarnation
        self._calls = HttpCalls()

    def begin(self, part: DecodePart, request: str) -> DecodeHandoff:
        """Start the prefill where this engine is the one to do so. Returns at once.

        :param request: vLLM's id.
        """
        handoff = DecodeHandoff(part, time.monotonic() + part.deadline_s, part.servers)
        told = part.prefiller.layout if part.prefiller is not None else {}
        if why := first_difference(self._layout, told):
            self.lose(handoff, f"it cannot be read: {why}")
            return handoff
        if part.metaserver:
            terms = HandoffTerms(
                handoff=part.handoff,
                incarnation=self._incarnation,
                layout=self._layout,
                prompt=part.prompt,
                deadline_s=part.deadline_s,
            )
            body = metaserver.body(request, terms, self._sizes)
            handoff.post = self._calls.post(part.handoff, part.metaserver, body, handoff.until)
        elif part.bootstrap:
            handoff.status = DecodeStatus.SEEKING
            handoff.query = self._calls.get(part.bootstrap)
        return handoff

    def seeks(self, handoff: DecodeHandoff) -> bool:
        """Must the lookup wait until the hand-off's servers are known?"""
        query = handoff.query
        if handoff.status is not DecodeStatus.SEEKING or query is None:
            return False
        if not query.done and time.monotonic() < handoff.until:
            return True
        try:
            handoff.servers = _found(handoff.part, query)
        except ProtocolError as error:
            self.lose(handoff, str(error))
        else:
            handoff.become(DecodeStatus.WAITING)
        return False

    def follow(self, handoff: DecodeHandoff) -> Follow | None:
        """What the request's next lookup asks for; None = what is stored."""
        if not handoff.followed:
            return None
        return Follow(handoff.until, handoff.part.handoff, handoff.servers)

    def refused(self, handoff: DecodeHandoff) -> bool:
        """Has the metaserver said that there will be no prefill? Then the hand-off is lost, before its deadline."""
        if handoff.status is not DecodeStatus.WAITING or handoff.post is None or not handoff.post.error:
            return False
        self.lose(handoff, handoff.post.error)
        return True

    def answered(self, handoff: DecodeHandoff, hit: Hit) -> bool:
        """The lookup that asked for the hand-off has its answer; False: ask again, elsewhere.

        A hit with a reason is of what is stored: the hand-off cannot be read, and the reason says why.
        """
        if not handoff.followed:
            return True
        if not hit.reason and hit.tokens:
            if handoff.status is DecodeStatus.WAITING:
                handoff.become(DecodeStatus.CLAIMED)
            return True
        if handoff.tried < len(handoff.part.otherwise) and time.monotonic() < handoff.until:
            handoff.servers = handoff.part.otherwise[handoff.tried]
            handoff.tried += 1
            if handoff.status is DecodeStatus.CLAIMED:
                handoff.become(DecodeStatus.WAITING)
            return False
        self.lose(handoff, hit.reason or "its server does not answer")
        return True

    def loaded(self, handoff: DecodeHandoff, *, shared: bool) -> None:
        """All of it has arrived.

        :param shared: other requests read the same hand-off.
        """
        if handoff.status is DecodeStatus.CLAIMED:
            handoff.become(DecodeStatus.LOADED)
            handoff.has_loaded = True
            if not shared:
                self.release(handoff)

    def lose(self, handoff: DecodeHandoff, reason: str) -> None:
        """It will not be loaded; what is stored, and the request's own computing, make up for it."""
        if handoff.status in (DecodeStatus.LOADED, DecodeStatus.LOST, DecodeStatus.RELEASED):
            return
        handoff.become(DecodeStatus.LOST)
        handoff.reason = reason
        log.warning("handoff_lost", handoff=handoff.part.handoff, reason=reason)

    def release(self, handoff: DecodeHandoff) -> None:
        """This engine needs nothing of it any more: the prefill's side need not keep it, nor go on with it."""
        if handoff.status is DecodeStatus.RELEASED:
            return
        handoff.become(DecodeStatus.RELEASED)
        self._calls.forget(handoff.part.handoff)
        self._lookups.release_handoff(handoff.part.handoff, _keepers(handoff.part, handoff.servers))
        if handoff.query is not None and not handoff.servers:
            self._release_once_found(handoff.part, handoff.query)

    def forsake(self, part: DecodePart) -> None:
        """A hand-off that this engine was told of and has no use for."""
        self._lookups.release_handoff(part.handoff, _keepers(part))
        if part.bootstrap:
            self._release_once_found(part, self._calls.get(part.bootstrap))

    def _release_once_found(self, part: DecodePart, query: HttpCall) -> None:
        """The prefill engine's servers are told too, when they are known: the scheduler may call nothing by then."""

        def release() -> None:
            try:
                servers = _found(part, query)
            except ProtocolError as error:
                log.warning("handoff_not_released", handoff=part.handoff, server=part.bootstrap, reason=str(error))
            else:
                if servers:
                    self._control.release_handoff(part.handoff, servers)

        query.when_done(release)

    def close(self) -> None:
        """End what is under way."""
        self._calls.close()


def _found(part: DecodePart, query: HttpCall) -> tuple[str, ...]:
    """The servers that the prefill engine has named.

    :raises ProtocolError: it has named none that can be used.
    """
    if not query.done:
        raise ProtocolError(f"{part.bootstrap} has not told within the hand-off's deadline which servers keep it")
    if query.error:
        raise ProtocolError(query.error)
    return concurrent.servers_in(query.answer, part.engine)


def _keepers(part: DecodePart, learned: Iterable[str] = ()) -> tuple[str, ...]:
    """Every server that may keep it: a router's address may lead to none of them."""
    return tuple(dict.fromkeys([*learned, *part.servers, *itertools.chain.from_iterable(part.otherwise)]))


def summary_of(handoff: DecodeHandoff) -> dict[str, Any]:
    """For the response."""
    if handoff.has_loaded:
        return {"handoff": "loaded"}
    return {"handoff": "lost", "lost": handoff.reason} if handoff.reason else {"handoff": "released"}
