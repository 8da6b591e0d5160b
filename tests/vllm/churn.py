"""Many requests in a cache for a few, some of them aborted, over and over: what tests of faults have in common."""

from __future__ import annotations

import random

from comparison import Right, prompt, settled, until
from engines import Engine
from scenario import Answer

from layerflow_cli.bench.harness import ServerProcess

HEADS = 10


class Churn:
    """Prompts that share beginnings, in an order that every machine has.

    :param count: of the prompts.
    :param shared: how many tokens of its beginning a prompt shares with others.
    :param aborted: how many are aborted, before one of the first `steps` steps.
    """

    def __init__(self, count: int, max_tokens: int, *, shared: range, aborted: int, steps: int, seed: int = 11) -> None:
        source = random.Random(seed)
        heads = [prompt(number, shared[-1]) for number in range(HEADS)]
        self.prompts = [
            source.choice(heads)[: source.choice(shared)] + prompt(100 + number, source.randrange(1, 120))
            for number in range(count)
        ]
        self.aborts = {number: source.randrange(0, steps) for number in source.sample(range(count), aborted)}
        self._max_tokens = max_tokens
        self._right = Right([])

    def learn(self, plain: Engine, *, rounds: bool = False) -> None:
        """What the tokens must be: those of a vLLM without layerflow, see :meth:`comparison.Right.of`."""
        self._right = Right.of(plain, self.prompts, self._max_tokens, rounds=rounds)

    def serve(self, server: ServerProcess, engine: Engine, *, aborting: bool = True) -> list[Answer]:
        """Serve all of them; afterwards vLLM's own prefix cache is empty.

        :raises AssertionError: a wrong token, a block that was lost, or something that stays pinned.
        """
        aborts = self.aborts if aborting else {}
        engine.begin(self.prompts, self._max_tokens, aborts)
        answers = engine.finish()
        ended = {number for number, answer in enumerate(answers) if answer.reason == "abort" and number in aborts}
        assert not self._right.wrong(answers) - ended
        engine.reset()
        settled(server.endpoint)
        until(server, lambda status: status["pool"]["pinned"] == 0)
        return answers
