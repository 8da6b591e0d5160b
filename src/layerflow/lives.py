"""The life of a record: its states, what each of them means, and which may follow which."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from layerflow.errors import InvalidTransition

State = TypeVar("State", bound=enum.Enum)


class Life(Generic[State]):
    """A table of legal transitions. The first state is the one that every record begins in.

    :param record: what lives, as a reader calls it.
    :param states: by state, what it means and what may follow it; nothing = the record's life is over.
    :raises ValueError: for a table that leaves a state out, or has one that cannot be reached.
    """

    def __init__(self, record: str, states: Mapping[State, tuple[str, Sequence[State]]]) -> None:
        self.record = record
        self.first = next(iter(states))
        self._meaning = {state: meaning for state, (meaning, _) in states.items()}
        self._next = {state: tuple(follows) for state, (_, follows) in states.items()}
        named = set(type(self.first)) == states.keys()
        self._reached = {state: self._reached_from(state) for state in states} if named else {}
        if not named or self._reached[self.first] != states.keys():
            raise ValueError(f"{record}: its table must have every state, each reached from the first")

    def check(self, before: State, after: State, name: str) -> None:
        """:raises InvalidTransition: where `after` may not follow `before`.

        :param name: of the record.
        """
        if after not in self._next[before]:
            raise InvalidTransition(f"{self.record} {name} is {before.name.lower()} and cannot become {after.name}")

    def leads(self, before: State, after: State) -> bool:
        """Whether a record can come from one state to the other, by any number of transitions, or by none."""
        return after in self._reached[before]

    def drawn(self) -> str:
        """The table, as the documentation shows it."""
        lines = ["| state | what it means | what may follow |", "|---|---|---|"]
        for state, meaning in self._meaning.items():
            follows = ", ".join(_shown(each) for each in self._next[state]) or "nothing: it is over"
            lines.append(f"| **{_shown(state)}** | {meaning} | {follows} |")
        return "\n".join(lines)

    def _reached_from(self, state: State) -> set[State]:
        reached, look = {state}, [state]
        while look:
            fresh = set(self._next[look.pop()]) - reached
            reached |= fresh
            look += fresh
        return reached


def _shown(state: enum.Enum) -> str:
    return state.name.lower().replace("_", " ")
