"""The prefill engine's end of its hand-offs: opened with a prompt's first batch, saved layer by layer, ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from layerflow.agent.values import StepRequest
from layerflow.connectors.common.guard import tell
from layerflow.connectors.sglang.batch_saves import DRAIN_S, BatchSaves
from layerflow.connectors.sglang.layout import PoolLayout

if TYPE_CHECKING:
    from layerflow.agent import Agent
    from layerflow.agent.client import HandoffInquiry
    from layerflow.agent.lookups import Lookups
    from layerflow.keys import HashedChain

TURN_S = 2e-3
"""How long it waits at once: a batch ends with one request's slots before it ends with the others'."""

PAUSE_S = 5e-4

LOST = "its layerflow server was lost, or away"
NONE_FAILED: Mapping[int, str] = {}

log = structlog.get_logger("layerflow.sglang")


def handoff_name(room: int, attempt: int = 0) -> str:
    """What both engines call a request's hand-off: by SGLang's room, which the router has made up for it.

    :param attempt: how often decode has asked prefill to compute the request once more, which keeps its room.
    """
    return f"sglang-{room}-{attempt}" if attempt else f"sglang-{room}"


class PollPause:
    """How long polls may let go of the interpreter: SGLang's loops ask without a pause, about each request in turn, and
    the lanes need it for a moment each time. One poll waits :data:`PAUSE_S`, and for as long after it none does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_at = -math.inf

    def take(self) -> float:
        """Seconds that this poll may wait."""
        now = self._clock()
        if now < self._next_at:
            return 0.0
        self._next_at = now + 2 * PAUSE_S
        return PAUSE_S


@dataclass(frozen=True, slots=True)
class PromptPart:
    """What one batch computes of a prompt.

    :param hashes: of all of the prompt's pages, the last of which may be a part of one.
    :param end: pages that are whole once the batch has run.
    :param slots: by pool: the slots of these pages, of states the one behind the prompt's last token.
    :param loads: the batch loads some of it. Whether what it computes is sound is known once that load has ended.
    :param attempt: see :func:`handoff_name`.
    """

    room: int
    hashes: Sequence[str]
    end: int
    slots: Mapping[str, np.ndarray]
    loads: bool = False
    attempt: int = 0

    @property
    def name(self) -> str:
        """Of the prompt's hand-off."""
        return handoff_name(self.room, self.attempt)


@dataclass(slots=True)
class _Prompt:
    """A prompt that is being computed.

    :param name: of its hand-off.
    :param attachment: the agent's, by number, to the server that its hand-off was opened at; 0 = it was away.
    :param opened: None = another rank has opened it.
    :param blocks: of the engine, by group: those that are saved, or were.
    :param saved: pages that have been saved, or are. :param over: no more of it is.
    :param refusal: why its reader gets nothing.
    """

    name: str
    chain: HashedChain
    attachment: int
    opened: HandoffInquiry | None = None
    blocks: Sequence[np.ndarray] = ()
    saved: int = 0
    over: bool = False
    refusal: str = ""


@dataclass(slots=True)
class PrefillSide:
    """Of one worker, on its scheduler's thread.

    :param lookups: of the same engine. One rank opens and ends hand-offs; what the others save belongs to them too.
    :param saves: of this worker's batches.
    :param leads: this is that rank.

    :ivar _loading: rooms of the running batch of which it loads some.
    """

    agent: Agent
    lookups: Lookups
    layout: PoolLayout
    saves: BatchSaves
    leads: bool
    pause: PollPause = field(default_factory=PollPause)
    _prompts: dict[int, _Prompt] = field(default_factory=dict)
    _loading: set[int] = field(default_factory=set)

    def begin(self, parts: Sequence[PromptPart]) -> None:
        """A batch is about to run."""
        self.saves.drop()
        self.end_batch(dict.fromkeys(self._loading, "its batch was not ended"))
        requests, held = [], []
        for part in parts:
            prompt = self._prompt(part)
            if part.end <= prompt.saved or prompt.over:
                continue
            try:
                tables = self.layout.tables(part.end, part.slots)
            except Exception as error:  # noqa: BLE001 - told, and this prompt's reader is
                tell("run_batch", part.name, error)
                self._refuse(part.room, f"its saves could not begin: {error}")
                continue
            prompt.blocks = self.layout.blocks(tables)
            page = prompt.chain.chunk_tokens
            request = StepRequest(part.name, prompt.chain, tables, save=(prompt.saved * page, part.end * page))
            prompt.saved = part.end
            if part.loads:
                self._loading.add(part.room)
                held.append(request)
            else:
                requests.append(request)
        try:
            self.saves.begin(lambda: (requests, held))
        except Exception as error:  # noqa: BLE001 - told; decode is told by the hand-off's end
            tell("run_batch", None, error)
            for part in parts:
                self._refuse(part.room, f"its saves could not begin: {error}")

    def _prompt(self, part: PromptPart) -> _Prompt:
        """A prompt's state; its hand-off is opened with its first batch."""
        prompt = self._prompts.get(part.room)
        if prompt is None or prompt.name != part.name:
            chain = self.agent.hashed_chain([each.encode() for each in part.hashes])
            prompt = self._prompts[part.room] = _Prompt(part.name, chain, self._attachment)
            if self.leads:
                prompt.opened = self.lookups.open_handoff(part.name, chain, len(part.hashes) * chain.chunk_tokens)
        self._check_server(part.room, prompt)
        return prompt

    def end_batch(self, failed: Mapping[int, str] = NONE_FAILED) -> None:
        """The batch has run, or has been given to the device.

        :param failed: rooms whose loads have failed on some rank, and why: what was computed on them is given up.
        """
        self.saves.end(lambda: {prompt.name for room in failed if (prompt := self._prompts.get(room)) is not None})
        self._loading.clear()
        for room, reason in failed.items():
            self.give_up(room, reason, sound=False)
        self._take_ended()

    def end(self, room: int) -> None:
        """All of a prompt is computed."""
        prompt = self._prompts.get(room)
        if prompt is not None:
            self._check_server(room, prompt)
        if prompt is None or prompt.over:
            return
        prompt.over = True
        if self.leads:
            self.lookups.end_handoff(prompt.name, tokens=prompt.saved * prompt.chain.chunk_tokens)

    def undecided(self, room: int) -> bool:
        """Has the server not said yet whether it keeps a prompt for its reader? It is away once it is late."""
        prompt = self._prompts.get(room)
        return (
            prompt is not None
            and not prompt.refusal
            and prompt.opened is not None
            and self.lookups.handoff(prompt.opened, 0.0) is None
        )

    def refusal(self, room: int) -> str:
        """Why the server does not keep a prompt for its reader; "" = it does, or has not answered yet."""
        prompt = self._prompts.get(room)
        if prompt is None or prompt.opened is None or prompt.refusal:
            return prompt.refusal if prompt is not None else ""
        state = self.lookups.handoff(prompt.opened, 0.0)
        if state is not None and not state and state.state not in ("released", "announced"):
            prompt.refusal = f"{state.state}: {state.reason}" if state.reason else state.state
        return prompt.refusal

    def saving(self, room: int) -> bool:
        """May a save still read a prompt's slots? Where one does, this waits for it as a :class:`PollPause` allows."""
        prompt = self._prompts.get(room)
        if prompt is None:
            return False
        return self.agent.busy(prompt.name) and not self.agent.wait_idle(prompt.name, self.pause.take())

    def give_up(self, room: int, reason: str, *, sound: bool = True) -> None:
        """A prompt is not computed any further; nothing reads its slots when this returns.

        What it has computed is stored all the same: hand-offs that share pages with it wait for that.

        :param sound: else nothing of it is to be stored.
        """
        prompt = self._prompts.get(room)
        if prompt is None:
            return
        name = prompt.name
        if not prompt.over and self.leads:
            self.lookups.end_handoff(name, tokens=0, reason=reason)
        prompt.over = True
        if sound and self._wait_unread(name):
            return
        self.agent.abort(name)
        if not self._wait_unread(name):
            cut = self.agent.reclaim(prompt.blocks, 0.0)
            log.warning("handoff_cut", handoff=name, steps=cut)

    def let_go(self, pages: Sequence[Any]) -> None:
        """SGLang gives pages to other requests: when this returns no save reads them; see :meth:`.BatchSaves.let_go`.

        :param pages: tensors of page numbers, on the device.
        """
        if cut := self.saves.let_go(pages):
            log.warning("handoff_cut", handoff="", steps=cut)

    def forget(self, room: int) -> None:
        """SGLang has let go of a request."""
        self._prompts.pop(room, None)

    def _wait_unread(self, name: str) -> bool:
        """Wait until no save reads a prompt's slots; False after :data:`DRAIN_S`."""
        until = time.monotonic() + DRAIN_S
        while self.agent.saving(name):
            if time.monotonic() >= until:
                return False
            self.agent.wait_idle(name, TURN_S)
        return True

    def _take_ended(self) -> None:
        """The agent keeps what it has to tell until it is asked. Of saves that have failed the server tells decode."""
        for name, reason in self.agent.poll().failed_saves:
            log.debug("save_failed", handoff=name, reason=reason)

    def _check_server(self, room: int, prompt: _Prompt) -> None:
        """A server that has come after a prompt's hand-off was opened knows nothing of it."""
        if not prompt.over and (not prompt.attachment or self._attachment != prompt.attachment):
            self._refuse(room, LOST)

    @property
    def _attachment(self) -> int:
        return self.agent.statistics().attachments if self.agent.attached else 0

    def _refuse(self, room: int, reason: str) -> None:
        """The reader gets nothing; see :meth:`refusal`."""
        self._prompts[room].refusal = reason
        self.give_up(room, reason)
