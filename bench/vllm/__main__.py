"""The command: starts what a part needs, measures, stops it, shows and writes the result."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer
from bench.vllm import crowd, hits, misses, report, shared
from bench.vllm.children import BenchFailed
from bench.vllm.contenders import (
    BLOCK_SIZE,
    BULK,
    LAYERWISE,
    LMCACHE_MP,
    MAX_MODEL_LEN,
    PLAIN,
    PREFIX,
    TOKEN_BYTES,
    Contender,
    installed,
)
from bench.vllm.fleet import Fleet, fleet
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from layerflow.errors import LayerflowError
from layerflow_cli.output import console, write_json

Advance = Callable[[str], None]
PARTS = {
    "hit": (PREFIX, LMCACHE_MP, LAYERWISE, BULK),
    "shared": (PREFIX, LAYERWISE),
    "c8": (LMCACHE_MP, LAYERWISE),
    "miss": (PLAIN, LAYERWISE),
}
POOL_GIB = 4
SPARE_BLOCKS = 16
"""Beyond what a part's requests fill: blocks that are freed late, because they are still being saved."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured.

    :param tokens: of a long prompt; a multiple of the chunk size.
    :param stored: long prompts that `c8` draws its hits from.
    :param launches: of the servers of `miss`, which share its pairs: two processes of the same vLLM differ by some
        percent, for as long as they live.
    :param turns: answers of so many tokens, in which vLLM's connector is taken out in turns.
    :param watched: short prompts of one more launch, in which the hooks are timed; the stopwatch is not in the others.
    """

    tokens: int = 2048
    rounds: int = 9
    shared_rounds: int = 5
    warm_ups: int = 2
    crowd_rounds: int = 12
    stored: int = 8
    short_pairs: int = 1200
    decoding_pairs: int = 240
    turns: int = 24
    turns_tokens: int = 1000
    long_pairs: int = 36
    launches: int = 12
    watched: int = 200

    def kv_bytes(self, part: str) -> int:
        """Of each vLLM's cache: small, so that warm-ups touch all of it."""
        blocks = self.tokens // BLOCK_SIZE + 1
        short = crowd.MISS_TOKENS // BLOCK_SIZE + 1
        needed = {
            "hit": 2 * blocks,
            "shared": 2 * (shared.MOST_TOKENS // BLOCK_SIZE + 1),
            "c8": crowd.HITS * blocks + 2 * crowd.MISSES * short,
            "miss": blocks,
        }[part]
        return max(needed + SPARE_BLOCKS, MAX_MODEL_LEN // BLOCK_SIZE + 1) * BLOCK_SIZE * TOKEN_BYTES


QUICK = Sizes(
    tokens=512,
    rounds=2,
    shared_rounds=1,
    warm_ups=1,
    crowd_rounds=2,
    stored=5,
    short_pairs=4,
    decoding_pairs=2,
    turns=2,
    turns_tokens=60,
    long_pairs=2,
    launches=2,
    watched=2,
)


def bench(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Takes the result as JSON.")],
    parts: Annotated[
        str, typer.Option(help="Which of hit, shared, c8, miss, with commas between.")
    ] = "hit,shared,c8,miss",
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds of hit, shared and c8; 9, 5 and 12 if not given.")
    ] = None,
    pairs: Annotated[
        int | None,
        typer.Option(min=1, help="Pairs of miss; 1,200 short, 240 decoding and 36 long if not given, of 12 launches."),
    ] = None,
    logs: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keeps the servers' logs.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short prompts, few rounds: shows that it runs.")] = False,
) -> None:
    """Measure layerflow in a real vLLM, beside vLLM's own prefix cache and LMCache's server."""
    chosen = [part for part in PARTS if part in parts.split(",")]
    if unknown := sorted(set(parts.split(",")) - set(PARTS)):
        raise typer.BadParameter(f"no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
    sizes = QUICK if quick else Sizes()
    if rounds:
        sizes = dataclasses.replace(sizes, rounds=rounds, shared_rounds=rounds, crowd_rounds=rounds)
    if pairs:
        turns = min(pairs, sizes.turns)
        sizes = dataclasses.replace(sizes, short_pairs=pairs, decoding_pairs=pairs, turns=turns, long_pairs=pairs)
    about = {"sizes": dataclasses.asdict(sizes), "versions": report.versions(), "machine": report.machine()}
    screen = console()
    results: dict[str, dict[str, Any]] = {}
    hooks: dict[str, Any] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that servers are stopped then too
    with _folder(logs) as folder, _progress(screen) as advance:
        for part in chosen:
            contenders = installed(PARTS[part])
            for missing in (contender for contender in PARTS[part] if contender not in contenders):
                screen.print(f"{part}: without {report.SHOWN[missing.name]}: there is no {missing.venv.name}")
            results[part], hooks[part] = _measure(part, contenders, sizes, folder / part, advance)
    result = report.summary(results, hooks, about)
    write_json(out, result)
    for table in report.tables(result):
        screen.print(table)
    screen.print(f"written to {out}")
    if found := report.wrong(results):
        screen.print("\n".join(found), style="bold red")
        raise typer.Exit(1)


def _measure(
    part: str, contenders: Sequence[Contender], sizes: Sizes, folder: Path, advance: Advance
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One part's result and hook times."""
    names = [contender.name for contender in contenders]

    def started(
        folder: Path, contenders: Sequence[Contender], *, watched: bool, switched: bool = False
    ) -> AbstractContextManager[Fleet]:
        advance(f"{part}: starting {', '.join(contender.name for contender in contenders)}")
        kv_bytes = sizes.kv_bytes(part)
        return fleet(folder, contenders, kv_bytes=kv_bytes, pool_gib=POOL_GIB, watched=watched, switched=switched)

    if part == "miss":
        return _misses(started, contenders, sizes, folder, advance)
    with started(folder, contenders, watched=True) as running:
        if part == "hit":
            result = hits.measure(
                running, names, rounds=sizes.rounds, warm_ups=sizes.warm_ups, tokens=sizes.tokens, advance=advance
            )
        elif part == "shared":
            result = shared.measure(
                running, names, rounds=sizes.shared_rounds, warm_ups=sizes.warm_ups, advance=advance
            )
        else:
            result = crowd.measure(
                running, names, rounds=sizes.crowd_rounds, stored=sizes.stored, tokens=sizes.tokens, advance=advance
            )
    return result, running.hook_times()


def _misses(
    started: Callable[..., AbstractContextManager[Fleet]],
    contenders: Sequence[Contender],
    sizes: Sizes,
    folder: Path,
    advance: Advance,
) -> tuple[dict[str, Any], dict[str, Any]]:
    taken = []

    def share(pairs: int) -> int:
        return -(-pairs // sizes.launches)

    counts = misses.Counts(
        short=share(sizes.short_pairs),
        long=share(sizes.long_pairs),
        answers=share(sizes.decoding_pairs),
        turns=share(sizes.turns),
        turns_tokens=sizes.turns_tokens,
        tokens=sizes.tokens,
    )
    for number in range(sizes.launches):
        order = contenders[::-1] if number % 2 else contenders
        with started(folder / str(number), order, watched=False, switched=True) as running:
            taken.append(misses.collect(running, counts, seed=number, advance=advance))
    with started(folder / "watched", [LAYERWISE], watched=True) as running:
        misses.watch(running, seed=sizes.launches, prompts=sizes.watched, tokens=sizes.tokens, advance=advance)
    return misses.figures(taken, sizes.tokens), running.hook_times()


@contextlib.contextmanager
def _folder(logs: Path | None) -> Iterator[Path]:
    """Where logs go: a folder that is kept, or one that is kept only if something fails."""
    folder = logs or Path(tempfile.mkdtemp(prefix="layerflow-bench-"))
    yield folder
    if logs is None:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _progress(screen: Console) -> Iterator[Advance]:
    """Says what is under way, on one line of a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("")
        yield lambda what: bar.update(task, description=what)


if __name__ == "__main__":
    try:
        typer.run(bench)
    except (BenchFailed, LayerflowError) as error:
        sys.exit(f"bench.vllm: {error}")
