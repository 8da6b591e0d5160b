"""The pool that the demo runs on, and loads that truly come from behind the arena."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from layerflow.config.pool import MEMORY
from layerflow.errors import LayerflowError
from layerflow.spec import ModelSpec
from layerflow_cli.bench.harness import PATIENT, ServerProcess
from layerflow_cli.bench.pool.services import behind, emulated
from layerflow_cli.bench.pool.tier import Tier
from layerflow_cli.demo.engines import Served

WRITE_TIMEOUT_S = 60.0


@dataclass(slots=True)
class PoolUsed:
    """Where the demo's objects lie.

    :param endpoint: of the server.
    :param kind: what is behind its arena; ``memory`` = nothing, or the demo does not know.
    :param remark: what of it is emulated; ``""`` = nothing.
    :param tier: behind the arena; None = loads come from the arena.
    :ivar fetched: objects that loads have brought from there.
    """

    endpoint: str
    kind: str = MEMORY
    remark: str = ""
    tier: Tier | None = None
    fetched: int = field(default=0, init=False)

    @contextlib.contextmanager
    def loading(self, served: Served, tokens: int) -> Iterator[None]:
        """A hit of so many tokens is loaded inside: from behind the arena, if there is anything.

        :raises LayerflowError: what was saved is not written, or the hit's objects were not fetched.
        """
        if self.tier is None:
            yield
            return
        if not self.tier.wait_idle(WRITE_TIMEOUT_S):
            raise LayerflowError(f"{self.kind} has not written what was saved; {self.tier.story()}")
        self.tier.empty_arena()
        before = self.tier.fetched
        yield
        came, wanted = self.tier.fetched - before, objects_of(served.agent.spec, tokens)
        if came != wanted:
            raise LayerflowError(
                f"a hit of {tokens} tokens brought {came} objects from {self.kind} where it needs {wanted}; "
                f"{self.tier.story()}"
            )
        self.fetched += came

    def story(self) -> str:
        """What may be wrong, for an error."""
        return "is the pool too small or the machine stalled?" if self.tier is None else self.tier.story()

    @property
    def title(self) -> str:
        """For the head of every table; ``""`` where the arena is all there is."""
        if self.tier is None:
            return ""
        return f" on {self.kind}" + (f", {self.remark}" if self.remark else "")


def objects_of(spec: ModelSpec, tokens: int) -> int:
    """How many objects a hit of full chunks loads, all groups together."""
    return sum(len(group.rules.need(tokens, spec.chunk_tokens)) for group in spec.groups)


@contextlib.contextmanager
def pool_of(
    kind: str, room: int, settings: Mapping[str, object], cann_emulator: Path | None = None
) -> Iterator[PoolUsed]:
    """A `layerflow run` and what is behind its arena, for the length of a with-block.

    :param room: bytes of objects.
    :param settings: further ones of the server.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="layerflow-demo-")))
        found = stack.enter_context(behind(kind, folder, room, given=emulated(cann_emulator)))
        # A busy machine may answer a lookup late; a miss for that would be no fault of what is shown here.
        server = ServerProcess({**PATIENT, **found.settings, "pool.lookup_timeout_ms": 10_000, **settings})
        stack.callback(server.close)
        if kind == MEMORY:
            yield PoolUsed(server.endpoint)
            return
        tier = stack.enter_context(Tier(server.endpoint))
        tier.wait_ready()
        yield PoolUsed(server.endpoint, kind, found.remark, tier)
