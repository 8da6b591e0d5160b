"""A request on its way through the engine, and what comes of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np


class RequestStatus(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its growing answer.

    :ivar prompt: int64 token ids (bytes), shape ``(n,)``.
    :ivar tables: per group: int64 block ids by block number; -1 = no block.
    :ivar hit: leading tokens whose KV was loaded instead of computed.
    :ivar computed: leading tokens whose KV is in the cache.
    :ivar attempt: how often it was started over because a load had failed.
    :ivar waited_s: time that its first step waited for layers to arrive.
    """

    id: str
    prompt: np.ndarray
    max_tokens: int
    submitted_s: float
    state: RequestStatus = RequestStatus.WAITING
    tables: list[np.ndarray] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    hit: int = 0
    computed: int = 0
    attempt: int = 0
    waited_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0

    @property
    def positions(self) -> int:
        """Tokens whose KV it may ever need: the last token of the answer is never read back."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def transfer_id(self) -> str:
        """Its name towards the pool. An attempt that failed is aborted there under its own name."""
        return f"{self.id}~{self.attempt}" if self.attempt else self.id

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Token ids of positions `start` to `stop`; 0 beyond the known ones."""
        known = self.prompt if stop <= len(self.prompt) else np.append(self.prompt, self.output)
        padded = np.zeros(stop - start, dtype=np.int64)
        part = known[start:stop]
        padded[: len(part)] = part
        return padded


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens ``[start, stop)`` of a request, computed in one step.

    :param load: leading tokens whose KV arrives in this step, 0 = none.
    """

    request: Request
    start: int
    stop: int
    load: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """How a request ended.

    :param tokens: the answer's token ids.
    :param cached_tokens: prompt tokens that were loaded instead of computed.
    :param ttft_s: seconds from submission to the first token; 0.0 if there is none.
    :param total_s: seconds from submission to the end.
    :param waited_s: seconds that its step waited for layers to arrive.
    :param restarts: how often a failed load made it start over.
    """

    request: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    aborted: bool
    cached_tokens: int
    ttft_s: float
    total_s: float
    waited_s: float
    restarts: int

    @property
    def text(self) -> str:
        """The answer as text; a random model writes few readable bytes."""
        return bytes(self.tokens).decode("latin-1")


def result_of(request: Request) -> Result:
    """The result of a finished or aborted request."""
    return Result(
        request=request.id,
        prompt_tokens=len(request.prompt),
        tokens=tuple(request.output),
        aborted=request.state is RequestStatus.ABORTED,
        cached_tokens=request.hit,
        ttft_s=max(0.0, request.first_token_s - request.submitted_s),
        total_s=request.finished_s - request.submitted_s,
        waited_s=request.waited_s,
        restarts=request.attempt,
    )
