"""An engine worker with paged memory and no model: the KV of every token is known from the prompt alone."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layerflow.agent import MISS, Agent, Hit, LoadResult, Step, StepRequest
from layerflow.keys import Chain
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard

POISON = 0xEE  #: what lies in a block before anything is loaded into it
AFTER = 0x5A  #: what the engine writes into a block whose load has failed
LOOKUP_S = 5.0
"""How long a lookup of a test may take: a late answer is a miss, and a busy machine's answers may be late."""
PATIENCE_S = 30.0
"""How long a test waits for what happens at once on an idle machine."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def small_spec(
    layers: int = 4,
    block_size: int = 4,
    chunk_tokens: int = 16,
    row: int = 32,
    window: int = 0,
    content: str = "known",
    shard: Shard | None = None,
) -> ModelSpec:
    """K and V rows of `row` bytes; with a window, every other layer belongs to a sliding group."""
    planes = (Plane("k", "uint8", (row,)), Plane("v", "uint8", (row,)))
    if window:
        groups = (
            GroupSpec("full", block_size, tuple(range(0, layers, 2)), planes),
            GroupSpec("sliding", block_size, tuple(range(1, layers, 2)), planes, window=window),
        )
    else:
        groups = (GroupSpec("full", block_size, tuple(range(layers)), planes),)
    return ModelSpec("known", content, groups, shard=shard or Shard(), chunk_tokens=chunk_tokens)


def kv_bytes(tokens: np.ndarray, layer: int, plane: int, row: int) -> np.ndarray:
    """uint8 ``(n, row)``: depends on every token up to each position, as a causal model's KV does."""
    odd = np.arange(len(tokens), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    with np.errstate(over="ignore"):
        prefix = np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * odd * _GOLDEN, dtype=np.uint64)
        x = prefix[:, None] + np.uint64(layer * 1009 + plane * 31 + 7) * _GOLDEN
        x = x + np.arange(-(-row // 8), dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.uint8).reshape(len(tokens), -(-row // 8) * 8)[:, :row]


@dataclass
class Run:
    """One request: its prompt, its hit and its block tables (one per group)."""

    name: str
    chain: Chain
    hit: Hit
    tables: tuple[np.ndarray, ...]
    failed: dict[int, set[int]] = field(default_factory=dict)
    reasons: set[str] = field(default_factory=set)

    @property
    def tokens(self) -> np.ndarray:
        return self.chain.tokens

    def request(self, *, save: bool = True, load: bool = True) -> StepRequest:
        """This request's part in a step that computes all of it."""
        start = self.hit.tokens if load else 0
        saving = (start, len(self.chain)) if save else (0, 0)
        return StepRequest(self.name, self.chain, self.tables, (0, start), self.hit, saving, tail=save)


class KnownWorker:
    """See the module. `blocks` are the blocks of every group.

    :param tensors: uint8, by layer and plane, to use instead of new ones.
    :param aliased: all groups share their memory, as in vLLM's packed layout: a block id is one group's at a time, and
        a request has only the blocks that its layers can read or that are kept of a chunk.
    """

    _names = itertools.count()

    def __init__(
        self,
        endpoint: str,
        spec: ModelSpec | None = None,
        blocks: int = 256,
        engine: str = "e2e",
        tensors: dict[int, dict[str, torch.Tensor]] | None = None,
        aliased: bool = False,
        **more: Any,
    ) -> None:
        self.spec = spec or small_spec()
        self.block_size = self.spec.groups[0].block_size
        self.blocks = blocks
        self.tensors = tensors or {
            layer: {
                plane.name: torch.full((blocks, group.entries, plane.shape[0]), POISON, dtype=torch.uint8)
                for plane in group.planes
            }
            for layer, group in enumerate(self.spec.groups[number] for number, _ in self.spec.layer_places())
        }
        self._arrays = {
            layer: [tensor.numpy() for tensor in tensors.values()] for layer, tensors in self.tensors.items()
        }
        self._places = self.spec.layer_places()
        self._random = np.random.default_rng(11)
        self._free = [list(self._random.permutation(blocks)) for _ in self.spec.groups]
        if aliased:
            self._free = [self._free[0]] * len(self.spec.groups)
        self._aliased = aliased
        patience = {"wait_s": PATIENCE_S, "lookup_timeout_s": LOOKUP_S}
        self.agent = Agent(endpoint, self.spec, self.tensors, engine, **(patience | more))

    def __enter__(self) -> KnownWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.agent.close()

    # -- requests ---------------------------------------------------------------------------------

    def prompt(self, tokens: int, like: Chain | None = None, shared: int = 0) -> Chain:
        """Random tokens; the first `shared` of them are those of `like`."""
        ids = self._random.integers(0, 1 << 40, tokens)
        if like is not None:
            ids[:shared] = like.tokens[:shared]
        return self.agent.chain(ids)

    def admit(self, chain: Chain, *, look: bool = True, planned: bool = True) -> Run:
        """Look the prompt up, give it blocks, and poison them.

        :param planned: the hit keeps the plan that it brought; without, the server is asked for one.
        """
        name = f"request-{next(self._names)}"
        hit = self.agent.lookup(name, chain) if look else MISS
        if not planned:
            hit = replace(hit, plan=None)
        tables = tuple(self._table(group, chain, hit) for group in range(len(self.spec.groups)))
        run = Run(name, chain, hit, tables)
        for layer in range(self.spec.num_layers):
            self.fill(run, layer, range(len(tables[self._places[layer][0]])), POISON)
        return run

    def _table(self, number: int, chain: Chain, hit: Hit) -> np.ndarray:
        group, free = self.spec.groups[number], self._free[number]
        table = np.full(-(-len(chain) // group.block_size), -1, dtype=np.int64)
        wanted = set(range(len(table)))
        if self._aliased:
            first = group.rules.first_token(hit.tokens) // group.block_size
            wanted = set(range(first, -(-hit.tokens // group.block_size)))
            for start in range(0, len(chain), self.spec.chunk_tokens):
                kept = group.rules.keep(min(self.spec.chunk_tokens, len(chain) - start))
                wanted |= {start // group.block_size + block for block in kept}
        for block in sorted(wanted):
            table[block] = free.pop()
        return table

    def retire(self, run: Run) -> None:
        """Its blocks may be used again; call once it is idle."""
        for free, table in zip(self._free, run.tables, strict=True):
            free.extend(int(block) for block in table if block >= 0)

    # -- bytes ------------------------------------------------------------------------------------

    def fill(self, run: Run, layer: int, numbers: Sequence[int] | range, value: int) -> None:
        """Write a pattern into some of the request's blocks."""
        table = run.tables[self._places[layer][0]][list(numbers)]
        for array in self._arrays[layer]:
            array[table[table >= 0]] = value

    def compute(self, run: Run, layer: int, start: int, stop: int) -> None:
        """Write the right KV of tokens ``start:stop``; blocks that the table no longer has are left out."""
        rows, last, place = self._where(run, layer, start, stop)
        for plane, array in enumerate(self._arrays[layer]):
            known = kv_bytes(run.tokens[:stop], layer, plane, array.shape[-1])
            array[place, rows % array.shape[1]] = known[last]

    def wrong_bytes(
        self, run: Run, layer: int, start: int, stop: int, but: set[int] | frozenset[int] = frozenset()
    ) -> int:
        """Bytes of tokens ``start:stop`` that are not the right KV, blocks in `but` left out."""
        rows, last, place = self._where(run, layer, start, stop)
        kept = ~np.isin(last // self.spec.groups[self._places[layer][0]].block_size, sorted(but))
        rows, last, place = rows[kept], last[kept], place[kept]
        wrong = 0
        for plane, array in enumerate(self._arrays[layer]):
            known = kv_bytes(run.tokens[:stop], layer, plane, array.shape[-1])[last]
            wrong += int((array[place, rows % array.shape[1]] != known).sum())
        return wrong

    def changed_bytes(self, run: Run, layer: int, numbers: Sequence[int] | set[int], value: int) -> int:
        """Bytes of these blocks that are not `value`."""
        table = run.tables[self._places[layer][0]][sorted(numbers)]
        return sum(int((array[table] != value).sum()) for array in self._arrays[layer])

    def readable(self, run: Run, layer: int) -> int:
        """First token whose KV this layer's attention reads for a request with the run's hit."""
        return self.spec.groups[self._places[layer][0]].rules.first_token(run.hit.tokens)

    def group_of(self, layer: int) -> int:
        return self._places[layer][0]

    def _where(self, run: Run, layer: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows that become whole with tokens ``start:stop``: their numbers, each one's last token, and its block."""
        group = self.spec.groups[self._places[layer][0]]
        rows = np.arange(start // group.ratio, stop // group.ratio)
        last = (rows + 1) * group.ratio - 1
        place = run.tables[self._places[layer][0]][last // group.block_size]
        return rows[place >= 0], last[place >= 0], place[place >= 0]

    # -- steps ------------------------------------------------------------------------------------

    def forward(self, step: Any, runs: Sequence[Run], on_layer: Callable[[int, LoadResult], None] | None = None) -> int:
        """Run an open step over `runs`: wait, verify, compute, layer by layer. Wrong bytes among the loaded ones.

        A run of which blocks fail is noted in its `failed`, and computed no further.
        """
        wrong = 0
        for layer in range(self.spec.num_layers):
            outcome = step.wait_layer(layer)
            self.note(runs, outcome)
            if on_layer is not None:
                on_layer(layer, outcome)
            for run in runs:
                if not run.failed:
                    wrong += self.wrong_bytes(run, layer, self.readable(run, layer), run.hit.tokens)
                    self.compute(run, layer, run.hit.tokens, len(run.chain))
            step.layer_done(layer)
        return wrong

    @staticmethod
    def note(runs: Sequence[Run], outcome: LoadResult) -> None:
        """Remember which blocks the outcome names as failed."""
        names = {run.name: run for run in runs}
        for failed in outcome.failed:
            run = names[failed.request]
            run.failed.setdefault(failed.group, set()).update(failed.blocks)
            run.reasons.add(failed.reason)

    def serve(self, chain: Chain, *, look: bool = True, timeout_s: float = PATIENCE_S) -> Run:
        """A whole request: load what there is, compute and save the rest, wait until it is stored, free it.

        :param timeout_s: for its loads.

        :raises AssertionError: a wrong byte, a failed load, or saves that do not end.
        """
        run = self.admit(chain, look=look)
        with self.agent.open_step([run.request()], timeout_s) as step:
            wrong = self.forward(step, [run])
        assert wrong == 0, f"{wrong} wrong bytes in a hit of {run.hit.tokens} tokens"
        assert not run.failed, f"{run.failed}: {run.reasons}"
        assert self.agent.wait_idle(run.name, PATIENCE_S), "the step never ended"
        self.retire(run)
        return run


def eventually(condition: Callable[[], object], timeout_s: float = PATIENCE_S, every_s: float = 0.002) -> bool:
    """Look until it holds; False after `timeout_s`."""
    until = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > until:
            return False
        pause.wait(every_s)
    return True


def open_fds() -> Counter[str]:
    """What this process's descriptors refer to, numbers left out.

    Two of them are compared by `now - before`: garbage of earlier tests may be closed in between.
    """
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{fd}"))] += 1
        except FileNotFoundError:
            continue
    return found


def layerflow_threads() -> list[str]:
    """Names of layerflow's threads in this process."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("layerflow"))


def shared_memory(pid: int) -> set[Path]:
    """What a running process has open or mapped of /dev/shm; other processes of the machine make theirs there, too."""
    process = Path("/proc") / str(pid)
    mapped = {line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()}
    opened = set()
    for fd in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            opened.add(str(fd.readlink()))
    return {Path(name) for name in mapped | opened if name.startswith("/dev/shm/")}


def step_of(opened: Any) -> Step:
    """The step, where something is to be moved.

    :raises AssertionError: nothing is.
    """
    assert isinstance(opened, Step), "the step had nothing to move"
    return opened
