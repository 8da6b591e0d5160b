"""Two vLLMs serve the same prompts, one with layerflow: tokens must not differ, and hits be what was stored."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engines import Engine
from scenario import Answer, Prompt

from layerflow.agent.observer import fetch_status
from layerflow_cli.bench.harness import ServerProcess

ANSWER_S = 30.0
SETTLE_S = 60.0
RECOVERY_S = 60.0
MAX_TOKENS = 6
ROUNDING = 1 / 8
"""By so much, in log probability, a token of a bfloat16 model must be likelier than another to stand before it whatever
the prompt is computed together with and from where on. Logits are multiples of 1/64 there."""


@dataclass(frozen=True, slots=True)
class Right:
    """What answers must be.

    :param tokens: by answer and place, the token of a vLLM without layerflow; behind it, what may stand there as well.
    """

    tokens: list[list[list[int]]]

    @classmethod
    def of(cls, plain: Engine, prompts: Sequence[Prompt], max_tokens: int, *, rounds: bool = False) -> Right:
        """Ask a vLLM without layerflow.

        :param rounds: it computes in bfloat16: tokens that are nearly as likely may change places.
        """
        if rounds:
            return cls(plain.likely(*prompts, max_tokens=max_tokens, within=ROUNDING))
        return cls([[[token] for token in each.tokens] for each in plain.generate(*prompts, max_tokens=max_tokens)])

    def wrong(self, answers: Sequence[Answer]) -> set[int]:
        """The numbers of the answers that are wrong."""
        return {
            number
            for number, (answer, right) in enumerate(zip(answers, self.tokens, strict=True))
            if not _may_be(answer.tokens, right)
        }


def _may_be(tokens: Sequence[int], right: list[list[int]]) -> bool:
    if len(tokens) != len(right):
        return False
    for made, allowed in zip(tokens, right, strict=True):
        if made != allowed[0]:
            return made in allowed  # whatever follows it is another text
    return True


@dataclass
class Comparison:
    """Serves prompts with both, and knows what is stored by now.

    :param plain: without layerflow.
    :param engine: with it.
    :param endpoint: of its server.
    :param chunk_tokens: the connector's setting.
    :param tails: partial last chunks are stored.
    :param loads: hits are loaded.
    """

    plain: Engine
    engine: Engine
    endpoint: str
    chunk_tokens: int
    tails: bool = True
    loads: bool = True
    stored: list[Prompt] = field(default_factory=list)

    def serve(self, *prompts: Prompt) -> None:
        """Serve prompts that arrive together; returns when all they computed is stored.

        :raises AssertionError: other tokens than without layerflow, or another hit than expected.
        """
        wanted = self.plain.generate(*prompts, max_tokens=MAX_TOKENS)
        answers = self.engine.generate(*prompts, max_tokens=MAX_TOKENS)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in wanted]
        block = self.engine.facts["block_size"]
        hits = [expected_hit(each, self.stored, self.chunk_tokens, self.tails, block) for each in prompts]
        hits = hits if self.loads else [0] * len(hits)
        assert [answer.cached for answer in answers] == hits
        self.engine.assert_no_block_lost()  # saves of short steps begin behind their answer
        settled(self.endpoint)
        self.stored += prompts


def prompt(seed: int, tokens: int) -> list[int]:
    """The same prompt for the same seed, everywhere; a shorter one is a prefix of a longer one."""
    source = random.Random(seed)
    return [source.randrange(10, 2000) for _ in range(tokens)]


def expected_hit(
    asked: Prompt, stored: Sequence[Prompt], chunk_tokens: int, tails: bool = True, block: int = 32
) -> int:
    """Tokens of `asked` that a pool holds after prompts `stored`.

    :param tails: partial last chunks are stored too.
    :param block: hits end at a block, or where a stored prompt does.
    """
    best = 0
    for other in stored:
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(asked, other, strict=False)))
        end = len(other) if tails else len(other) // chunk_tokens * chunk_tokens
        best = max(best, end if common >= end else common // block * block)
    return min(best, len(asked) - 1)


def loading(status: dict[str, Any]) -> bool:
    """A step has begun to load. Loads by plans are the worker's own: the core counts no bytes of theirs."""
    return bool(status["flow"]["steps"] and status["pool"]["pinned"])


def begin_to_load(engine: Engine, server: ServerProcess, prompts: Sequence[Prompt]) -> None:
    """Have prompts stored, and ask for them once more; returns while they are loaded. :meth:`Engine.finish` answers."""
    engine.generate(*prompts)
    settled(server.endpoint)
    engine.begin(prompts, MAX_TOKENS)
    until(server, loading)


def kill_amid_loads(
    engine: Engine, server: ServerProcess, prompts: Sequence[Prompt], wanted: Sequence[tuple[int, ...]]
) -> None:
    """Kill the server in the middle of loads; returns once another one is there, and has the engine's worker.

    :param wanted: tokens of each prompt.
    :raises AssertionError: other tokens, or a lost block, with the server killed or away.
    """
    begin_to_load(engine, server, prompts)
    server.kill()
    assert [answer.tokens for answer in engine.finish()] == wanted
    # Nobody is there: prompts are computed.
    answers = engine.generate(*prompts, max_tokens=MAX_TOKENS)
    assert [(answer.tokens, answer.cached) for answer in answers] == [(tokens, 0) for tokens in wanted]
    engine.assert_no_block_lost()
    server.restart()
    until(server, lambda status: any(session["memory"] for session in status["sessions"]))


def settled(endpoint: str) -> dict[str, Any]:
    """Wait until a server has no open step and no half-written object: every save has ended.

    :returns: its status then.
    """
    deadline = time.monotonic() + SETTLE_S
    while True:
        status = fetch_status(endpoint, ANSWER_S)
        if not status["flow"]["steps"] and not status["pool"]["half_written"]:
            return status
        assert time.monotonic() < deadline, f"saves that never end: {status['flow']}, {status['pool']}"
        time.sleep(0.005)


def until(server: ServerProcess, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait until a server's status says so."""
    deadline = time.monotonic() + RECOVERY_S
    while True:
        status = fetch_status(server.endpoint, ANSWER_S)
        if what(status):
            return status
        assert time.monotonic() < deadline, status
        time.sleep(0.002)
