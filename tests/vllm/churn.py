"""Many requests in a cache for a few, some of them aborted, over and over: what tests of faults have in common."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from comparison import prompt, settled, until
from engines import Engine
from scenario import Answer

from layerflow_cli.bench.harness import ServerProcess

ROUNDING = 1 / 8
"""By so much, in log probability, a token of a bfloat16 model must be likelier than any other to be the one whatever
the prompt is computed together with and from where on. Logits are multiples of 1/64 there."""

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
        self._right: list[list[tuple[int, float]]] = []

    def learn(self, plain: Engine, *, rounds: bool = False) -> None:
        """What the tokens must be: those of a vLLM without layerflow.

        :param rounds: of one that computes in bfloat16: tokens are sure only where they are likely enough.
        """
        if rounds:
            self._right = plain.margins(*self.prompts, max_tokens=self._max_tokens)
        else:
            answers = plain.generate(*self.prompts, max_tokens=self._max_tokens)
            self._right = [[(token, math.inf) for token in answer.tokens] for answer in answers]

    def serve(self, server: ServerProcess, engine: Engine, *, aborting: bool = True) -> list[Answer]:
        """Serve all of them; afterwards vLLM's own prefix cache is empty.

        :raises AssertionError: a wrong token, a block that was lost, or something that stays pinned.
        """
        aborts = self.aborts if aborting else {}
        engine.begin(self.prompts, self._max_tokens, aborts)
        answers = engine.finish()
        wrong = [
            number
            for number, answer in enumerate(answers)
            if not (answer.reason == "abort" and number in aborts) and self._is_wrong(number, answer.tokens)
        ]
        assert not wrong
        engine.reset()
        settled(server.endpoint)
        until(server, lambda status: status["pool"]["pinned"] == 0)
        return answers

    def _is_wrong(self, number: int, tokens: Sequence[int]) -> bool:
        right = self._right[number]
        if len(tokens) != len(right):
            return True
        # Behind another token than the right one, all that follows is another text.
        margins = (margin for (token, margin), made in zip(right, tokens, strict=True) if made != token)
        return next(margins, 0.0) > ROUNDING
