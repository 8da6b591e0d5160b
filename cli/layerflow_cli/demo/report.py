"""The demo's table, verdict and files."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from layerflow.device import is_emulated
from layerflow.observe.timeline import render as render_timeline
from layerflow.observe.trace import render as render_perfetto
from layerflow_cli.demo.outcome import Outcome
from layerflow_cli.demo.pool import PoolUsed
from layerflow_cli.demo.workload import SHAPES
from layerflow_cli.output import console, write_json
from layerflow_cli.output_file import write_all, write_folder

EXIT_WRONG = 1


class Link(NamedTuple):
    """Between engine and arena, each way; 0 GB/s (10^9 bytes per second) = not emulated."""

    gbps: float
    latency_us: int
    device: str = "cpu"

    def __str__(self) -> str:
        if not self.gbps:
            return f"no link emulated: the pool is this machine's memory{self._on}"
        latency = f" + {self.latency_us:,} us a batch" if self.latency_us else ""
        return f"emulated link between engine and pool: {self.gbps:g} GB/s each way{latency}{self._on}"

    @property
    def _on(self) -> str:
        if self.device == "cpu":
            return ""
        emulated = " (CANN emulated)" if is_emulated(self.device) else ""
        return f"; engines' caches on {self.device}{emulated}, which compute on the host"


def report(
    outcomes: Sequence[Outcome],
    link: Link,
    pool: PoolUsed,
    *,
    runs: int,
    quick: bool,
    json_file: Path | None,
    out: Path,
    screen: Console,
) -> int:
    """Print the table, write the files, print the verdict; the exit code.

    :raises ConfigError: a file cannot be written.
    """
    pages: list[Path] = []
    table, footnote = _table(outcomes, pool, quick), _footnote(outcomes, link, pool, runs)
    screen.print(table, footnote, sep="\n", soft_wrap=not screen.is_terminal, highlight=False)

    def figures() -> None:
        if json_file is not None:
            write_json(json_file, result(outcomes, link, pool, runs, quick))
            pages.append(json_file)

    write_all(lambda: pages.extend(_write(outcomes, link, pool, quick, out)), figures)
    for path, what in zip(pages, ("timeline, for a browser", "trace, for ui.perfetto.dev", "figures"), strict=False):
        screen.print(f"{path}  ({what})", soft_wrap=True, highlight=False)
    return _verdict(outcomes, quick, screen)


def result(outcomes: Sequence[Outcome], link: Link, pool: PoolUsed, runs: int, quick: bool) -> dict[str, Any]:
    """What ``--json`` writes."""
    return {
        "link": {"emulated": link.gbps > 0, "gbps": link.gbps, "latency_us": link.latency_us},
        "device": {"kind": link.device, "emulated": is_emulated(link.device), "compute": "host"},
        "pool": {"kind": pool.kind, "remark": pool.remark, "fetched_objects": pool.fetched},
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(), "torch": torch.__version__},
        "runs": runs,
        "quick": quick,
        "shapes": {outcome.workload.shape: outcome.to_dict() for outcome in outcomes},
    }


def _write(outcomes: Sequence[Outcome], link: Link, pool: PoolUsed, quick: bool, out: Path) -> list[Path]:
    traces = [trace for outcome in outcomes for trace in outcome.traces()]
    sizes, step_tokens = outcomes[0].workload.sizes, outcomes[0].workload.config.step_tokens
    loads = len(outcomes[0].answers["layerwise"])
    where = _where(link, pool)
    notes = [
        f"{where[0].upper()}{where[1:]}.",
        f"Cold: the step that computes tokens {sizes.prefix - step_tokens:,} to {sizes.prefix - 1:,} of a prompt and "
        f"saves them. Bulk and layer-wise: load the first {sizes.prefix:,} tokens, compute {sizes.suffix}.",
        "Bulk waits for all layers before it computes the first one; layer-wise waits for one layer at a time.",
        f"Of {loads} loads the one with the median exposed time is shown; of saves the last. One torch thread on "
        f"{os.cpu_count()} {platform.machine()} cores.",
    ]
    if quick:
        notes.append("Tiny models (--quick): the times say nothing.")
    title = f"layerflow demo{pool.title}: loading a KV cache in bulk and layer by layer"
    page = render_timeline(traces, title, notes)
    trace = json.dumps(render_perfetto(traces))
    return write_folder("--out", out, page, trace)


def _table(outcomes: Sequence[Outcome], pool: PoolUsed, quick: bool) -> Table:
    """One column per shape: a terminal of 80 columns has room for four."""
    title = f"layerflow demo{pool.title}"
    table = Table(title=title + (" (tiny models: times say nothing)" if quick else ""), title_justify="left")
    table.add_column("")
    for outcome in outcomes:
        table.add_column(outcome.workload.shape.upper(), justify="right")
    figures = [outcome.to_dict() for outcome in outcomes]
    ttft = [figure["ttft_ms"] for figure in figures]
    table.add_row("first token, cold [dim](ms)[/]", *(_ms(one["cold"]) for one in ttft))
    table.add_row("  bulk load [dim](ms)[/]", *(_ms(one["bulk"]) for one in ttft))
    table.add_row("  layer-wise load [dim](ms)[/]", *(f"[bold]{_ms(one['layerwise'])}[/]" for one in ttft))
    table.add_row("  without layerflow [dim](ms)[/]", *(_ms(one["without"]) for one in ttft), end_section=True)
    table.add_row("loaded [dim](MiB)[/]", *(f"{one['bytes'] / (1 << 20):.1f}" for one in figures))
    table.add_row("transfer [dim](ms)[/]", *(_ms(one["transfer_ms"]) for one in figures))
    table.add_row("  hidden [dim](ms)[/]", *(_ms(one["hidden_ms"]) for one in figures))
    table.add_row("  exposed [dim](ms)[/]", *(_ms(one["exposed_ms"]) for one in figures))
    table.add_row("  exposed, bulk [dim](ms)[/]", *(_ms(one["bulk"]["exposed_ms"]) for one in figures))
    table.add_row("overlap [dim](%)[/]", *(f"[bold]{one['overlap']:.1%}[/]" for one in figures))
    table.add_row("  its bound [dim](%)[/]", *(f"{one['overlap_bound']:.1%}" for one in figures), end_section=True)
    table.add_row("wrong tokens", *(f"{one['wrong_tokens']} of {one['compared_tokens']:,}" for one in figures))
    table.add_row("wrong KV bytes", *(f"{one['wrong_bytes']:,}" for one in figures))
    table.add_row("  compared [dim](MiB)[/]", *(f"{one['compared_bytes'] / (1 << 20):,.0f}" for one in figures))
    table.add_row("spoilt KV is noticed", *("yes" if one["control_changes_tokens"] else "NO" for one in figures))
    return table


def _where(link: Link, pool: PoolUsed) -> str:
    """What the loads' bytes pass."""
    if pool.tier is None:
        return str(link)
    remark = f" ({pool.remark})" if pool.remark else ""
    emulated = f"; {link}" if link.gbps else ""
    return (
        f"every load comes from {pool.kind}{remark}: the arena was emptied before; transfer: from the step's opening, "
        f"when the fetch has just begun, to the end of its last copy{emulated}"
    )


def _footnote(outcomes: Sequence[Outcome], link: Link, pool: PoolUsed, runs: int) -> str:
    sizes = outcomes[0].workload.sizes
    shapes = "; ".join(f"{outcome.workload.shape.upper()}: {SHAPES[outcome.workload.shape]}" for outcome in outcomes)
    return (
        f"{_where(link, pool)}\n{shapes}\n{'1 passage' if runs == 1 else f'medians over {runs} passages'} of text; "
        f"{sizes.prefix:,} tokens loaded, {sizes.suffix} computed; first token counted from submission; "
        "hidden: behind compute; "
        "its bound: what each layer's own size and compute allow"
    )


def _verdict(outcomes: Sequence[Outcome], quick: bool, screen: Console) -> int:
    faults = [f"{outcome.workload.shape}: {fault}" for outcome in outcomes for fault in outcome.faults()]
    if faults:
        console(stderr=True).print(
            f"layerflow: demo: {'; '.join(faults)}", soft_wrap=True, highlight=False, style="red"
        )
        return EXIT_WRONG
    line = "every token and every KV byte identical"
    if not quick:
        short = [f"{outcome.workload.shape}: {fault}" for outcome in outcomes for fault in outcome.shortfalls()]
        faster = [outcome.ttft_ms("cold") / outcome.ttft_ms("layerwise") for outcome in outcomes]
        measured = [outcome.typical("layerwise")[1] for outcome in outcomes]
        overlap, bound = [100 * one.overlap for one in measured], [100 * one.bound for one in measured]
        line += (
            f"; but {'; '.join(short)} (is the machine busy?)"
            if short
            else f"; first token {_span(faster, '.1f')} times sooner than cold; "
            f"overlap {_span(overlap, '.0f')} % (bound {_span(bound, '.0f')} %)"
        )
    screen.print(line, soft_wrap=not screen.is_terminal, highlight=False, style="bold")
    return 0


def _span(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
