"""``layerflow simulate``: what a configuration would do with a trace of requests, under a virtual clock."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from layerflow.errors import ConfigError
from layerflow_cli.machine import (
    ActiveParams,
    Engines,
    Flops,
    KvDtype,
    LayerTime,
    LinkRate,
    ModelFolder,
    TensorRanks,
    layer_cost,
    link_cost,
)
from layerflow_cli.options import (
    ConfigFile,
    JsonFile,
    RecordingsEnd,
    SettingItems,
    finite,
    overrides,
    parse_duration,
    refuse_foreign,
    with_unit,
)
from layerflow_cli.output_file import checked_file, write_all

if TYPE_CHECKING:
    from layerflow.config.settings import Settings
    from layerflow.sim.curve import CurvePoint
    from layerflow.sim.machine import Machine
    from layerflow.sim.recorded import RecordedPrompts
    from layerflow.sim.replay import Replay
    from layerflow.sim.rerun import OtherLink
    from layerflow.sim.simulation import Figures
    from layerflow.sim.trace import RequestTrace
    from layerflow.spec import ModelSpec

UNTRUSTED = (
    "No line of trust: this trace tells when requests came, and nothing of what they took. What follows compares "
    "configurations; it predicts no machine. A step of decoding takes what --step-ms says, and hardly more."
)

CURVE_SIZES = 12
"""Points of a curve, each twice the one before. The last is pool.size, or what --ram says; of a recording four
times its own."""

TRUSTED = 0.02
"""A recording whose own hits are predicted within this share of its prompt tokens, and within 15 % of themselves, is
believed at other sizes."""

OF_CAR = "Beside it the curve may be up to a point too high: car differs in so small a pool."
"""How it divides its room follows what comes back, and is less steady in a small pool. Of a public hour of
conversations it was 0.7 points at one in 8 chunks, 0.4 at one in 32; least recently used was within its error."""

_BAR = 34
_LINK = ("link", "link_latency_us")
_TIMED = ("flops", "active_params", "layer_us", "batched_tokens", "engine_tokens", "step_ms", "engines", "seed")
_TOLD = ("model", "tp", "kv_dtype", "speed", "first")
"""Options that belong together: what links take; what else takes time; what a recording says by itself."""


def simulate(
    context: typer.Context,
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="JSON lines as Mooncake's traces, also .gz; or a recording.")
    ],
    model: ModelFolder = None,
    tp: TensorRanks = 1,
    engines: Engines = 1,
    ram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Instead of pool.size: memory that the arena takes.")
    ] = None,
    link: LinkRate = None,
    link_latency_us: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1e9,
            callback=finite,
            metavar="US",
            help="What each load waits before it moves; of a recording, its own.",
        ),
    ] = None,
    flops: Flops = None,
    active_params: ActiveParams = None,
    layer_us: LayerTime = None,
    batched_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of one step, as vLLM's --max-num-batched-tokens.")
    ] = 8192,
    engine_tokens: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Tokens that an engine's own prefix cache holds; 0 = it has none."),
    ] = 0,
    step_ms: Annotated[
        float,
        typer.Option(
            min=0, max=1e9, metavar="MS", help="What each step takes beside its layers; of decoding, nearly all."
        ),
    ] = 0,
    speed: Annotated[
        float,
        typer.Option(min=1e-6, max=1e6, metavar="X", help="Let requests come so many times as fast as they came."),
    ] = 1.0,
    first: Annotated[int, typer.Option(min=0, metavar="N", help="Only so many requests; 0 = all.")] = 0,
    eviction: Annotated[str, typer.Option(metavar="NAME", help="car, as the server; or lru, to compare with.")] = "car",
    curve: Annotated[
        str | None, typer.Option(metavar="KEY", help="Hit tokens by the value of a key: pool.size. Takes no link.")
    ] = None,
    sample: Annotated[
        int, typer.Option(min=1, metavar="N", help="With --curve: look at one in N chunks, and tell the error.")
    ] = 1,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --curve: also as a page.", callback=checked_file)
    ] = None,
    kv_dtype: KvDtype = "auto",
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Equal seeds, equal figures.")] = 0,
    last: RecordingsEnd = None,
    file: ConfigFile = None,
    settings: SettingItems = None,
    json_file: JsonFile = None,
) -> None:
    """Replay a trace of requests through layerflow's own core, pool and windows, under another configuration.

    A recording is replayed step by step: first what is predicted of its own configuration beside what was recorded,
    then what --config, --set, --ram and --link change. Of other traces models stand for what a machine does: links,
    compute, and an engine that batches continuously. What lies behind the arena (disk, stores, peers) is not simulated.

    \b
    Examples:
      layerflow simulate monday.lfr --set transfer.prefetch_layers=1
      layerflow simulate trace.jsonl --model /models/Qwen3-8B --engines 8 --ram 512GiB --link 25GB/s --layer-us 0.8
      layerflow simulate trace.jsonl --model /models/Qwen3-8B --curve pool.size --ram 2TiB
      layerflow simulate monday.lfr --curve pool.size
    """
    from layerflow.config.settings import Settings, effective  # noqa: PLC0415 - `--help` stays quick
    from layerflow.sim.machine import Machine  # noqa: PLC0415
    from layerflow.sim.recorded import is_recording, prompts_of, read_run  # noqa: PLC0415
    from layerflow.sim.replay import Replay  # noqa: PLC0415
    from layerflow.sim.simulation import EVICTIONS  # noqa: PLC0415
    from layerflow.sim.trace import read_trace  # noqa: PLC0415
    from layerflow.sizing import capacity_of, read_config, shape_of  # noqa: PLC0415

    if curve not in (None, "pool.size"):
        raise ConfigError(f"--curve {curve}: pool.size is the key that a curve is drawn for")
    if eviction not in EVICTIONS:
        raise ConfigError(f"--eviction {eviction}: use one of {', '.join(EVICTIONS)}")
    if curve is None:
        refuse_foreign(context, "belongs to --curve pool.size", "sample", "html")
    else:
        refuse_foreign(context, "tells of times, and of --curve nothing is timed", *_LINK, *_TIMED)
    given = overrides(settings or (), {"pool.size": with_unit("--ram", ram)})
    last_s = parse_duration("--last", last) if last is not None else math.inf
    output = CurveOutput(eviction, sample, html, json_file)
    recorded = is_recording(trace) or trace.suffix == ".lfr"
    if recorded:
        refuse_foreign(context, "a recording tells its own model, engines and times", *_TOLD, *_TIMED)
    if recorded and curve is None:
        refuse_foreign(context, "belongs to --curve, where a recording is replayed", "eviction")
        if file is not None:
            Settings.load(file, given)  # refuses before the recording is read
        # Without a file, what is given goes with the recorded settings, and not with the defaults.
        replay = Replay.read(trace, last_s)
        _replay(replay, file, given, _other_link(link, link_latency_us), json_file)
        return
    configured = Settings.load(file, given)
    if recorded:
        prompts = prompts_of(read_run(trace, last_s))
        origin = {row.key: row.origin for row in effective(file, given)}
        largest = configured.pool.size if origin["pool.size"] else 4 * prompts.arena_bytes
        _curve(prompts.trace, prompts.spec, largest, output, prompts)
        return
    refuse_foreign(context, "belongs to recordings, as --first to other traces", "last")
    requests = _of_speed(read_trace(trace), first, speed)
    if model is None:
        raise ConfigError("which model? Give its folder with --model: how much a token takes follows from it")
    capacity = capacity_of(
        shape_of(read_config(model), kv_dtype), tp=tp, block_tokens=16, chunk_tokens=requests.block_tokens
    )
    if curve is not None:
        _curve(requests, capacity.stages[0], configured.pool.size, output)
        return
    compute, moves = layer_cost(capacity, flops, active_params, layer_us), link_cost(link, link_latency_us or 0.0)
    if compute is None or moves is None:
        raise ConfigError("how quick is the machine? Give --link, and --layer-us or --flops with --active-params")
    machine = Machine(
        spec=capacity.stages[0],
        arena_bytes=configured.pool.size,
        load=moves,
        save=moves,
        compute=compute,
        engines=engines,
        max_batched_tokens=batched_tokens,
        cache_tokens=engine_tokens,
        step_seconds=step_ms / 1e3,
        eviction=eviction,
    )
    _run(machine, configured, requests, seed, json_file)


def _replay(
    replay: Replay, file: Path | None, given: dict[str, Any], link: OtherLink | None, json_file: Path | None
) -> None:
    from layerflow.sim.replay import shows  # noqa: PLC0415
    from layerflow_cli.replay_view import Other, show_replay  # noqa: PLC0415

    settings = replay.configured(file, given) if file is not None or given else None
    show_replay(replay, Other(settings, link, tuple(key for key in sorted(given) if not shows(key))), json_file)


def _other_link(rate: str | None, latency_us: float | None) -> OtherLink | None:
    """What --link and --link-latency-us change of a recording's own link; None = nothing."""
    from layerflow.sim.rerun import OtherLink  # noqa: PLC0415

    cost = link_cost(rate, 0.0)
    if cost is None and latency_us is None:
        return None
    return OtherLink(
        cost.bandwidth if cost is not None else None, latency_us * 1e-6 if latency_us is not None else None
    )


def _of_speed(trace: RequestTrace, first: int, speed: float) -> RequestTrace:
    requests = trace.requests[: first or None]
    if speed != 1.0:
        requests = tuple(dataclasses.replace(request, at=request.at / speed) for request in requests)
    return dataclasses.replace(trace, requests=requests)


def _run(machine: Machine, settings: Settings, trace: RequestTrace, seed: int, json_file: Path | None) -> None:
    from layerflow.sim import simulation  # noqa: PLC0415
    from layerflow_cli.output import console, progress, tables, write_json  # noqa: PLC0415

    what = f"requests of {trace.name}"
    with progress(len(trace.requests)) as advance:
        advance(what)
        figures = simulation.simulate(machine, settings, trace, seed=seed, tell=lambda: advance(what)).figures
    result = _result(figures, trace)
    if write_json(json_file, {"trust": None, **result}):
        return
    for line in textwrap.wrap(UNTRUSTED, 80):
        typer.echo(line)
    for table in tables(trace.name, result):
        console().print(table)


def _result(figures: Figures, trace: RequestTrace) -> dict[str, Any]:
    """Figures by names that carry their units."""
    tokens = figures.tokens or 1
    return {
        "requests": figures.requests,
        "prompt_tokens": figures.tokens,
        "simulated_s": figures.seconds,
        "loaded_share": figures.hit_tokens / tokens,
        "own_cache_share": figures.local_tokens / tokens,
        "found_in_pool_share": figures.pool_tokens / tokens,
        "load_link_busy_share": figures.link_busy[0],
        "save_link_busy_share": figures.link_busy[1],
        "evictions": figures.evictions,
        "shed_saves": figures.sheds,
        "saves_without_room": figures.full,
        "failed_loads": figures.failed_loads,
        "core_events": figures.events,
        "times": {"first_token": figures.ttft_s.in_ms(), "exposed_per_loading_request": figures.exposed_s.in_ms()},
    }


class CurveOutput(NamedTuple):
    """How a curve is made, and where it goes."""

    eviction: str
    sample: int
    html: Path | None
    json_file: Path | None


def _curve(
    trace: RequestTrace, spec: ModelSpec, largest: int, output: CurveOutput, recorded: RecordedPrompts | None = None
) -> None:
    from layerflow.config.pool import LEAST_POOL_BYTES  # noqa: PLC0415
    from layerflow.findings import size_text  # noqa: PLC0415
    from layerflow.sim.curve import NEAR_BEST, hit_curve, knee, least_arena, most_hit  # noqa: PLC0415
    from layerflow.sim.simulation import EVICTIONS  # noqa: PLC0415
    from layerflow_cli.output import progress, write_json  # noqa: PLC0415

    least = max(LEAST_POOL_BYTES, least_arena(spec, output.sample))
    sizes = [size for power in reversed(range(CURVE_SIZES)) if (size := largest >> power) >= least]
    if not sizes:
        next(hit_curve(trace, spec, [], sample=output.sample), None)  # one too thin for any size says so
        raise ConfigError(f"--sample {output.sample}: tells of no size below {size_text(least)}; sample less thinly")
    own = [recorded.arena_bytes] if recorded is not None else []
    points: list[CurvePoint] = []
    with progress(len(sizes) + len(own)) as advance:
        found = hit_curve(trace, spec, [*own, *sizes], eviction=EVICTIONS[output.eviction], sample=output.sample)
        for size in [*own, *sizes]:
            advance(f"pool.size {_size(size)}")
            points.append(next(found))
    trust = _trust(points.pop(0), recorded) if recorded is not None else None
    best = knee(points) if trust is None or trust["trusted"] else None
    everything = most_hit(trace).hit_rate
    more = best is points[-1] and best.hit_rate < NEAR_BEST * everything

    def figures() -> None:
        rows = [
            {
                "pool_size_bytes": point.arena_bytes,
                "hit_tokens": point.hit_tokens,
                "hit_share": point.hit_rate,
                "standard_error": point.error,
            }
            for point in points
        ]
        told: dict[str, Any] = {"trust": trust, "eviction": output.eviction, "sample": output.sample, "points": rows}
        told["knee_bytes"] = best.arena_bytes if best is not None else None
        told |= {"everything_hits_share": everything, "larger_hits_more": more}
        if write_json(output.json_file, told):
            return
        for line in _plot(trace, points, best, output, trust, marked=not more):
            typer.echo(line)
        if best is not None:
            typer.echo(f"A pool that holds everything would hit {everything * 100:.1f} %.")
        if more:
            typer.echo(f"Look at larger sizes too: --ram {_size(4 * points[-1].arena_bytes)}.")

    def page() -> None:
        from layerflow_cli.curve_page import write_page  # noqa: PLC0415

        if output.html is not None:
            write_page(output.html, trace.name, points, best, everything)

    write_all(page, figures)


def _trust(own: CurvePoint, recorded: RecordedPrompts) -> dict[str, Any]:
    """What the recording's own size would have hit, beside what it hit."""
    measured = recorded.hit_tokens / own.tokens if own.tokens else 0.0
    return {
        "pool_size_bytes": own.arena_bytes,
        "predicted_share": own.hit_rate,
        "recorded_share": measured,
        "trusted": abs(own.hit_rate - measured) <= min(TRUSTED, 0.15 * measured),
    }


def _plot(
    trace: RequestTrace,
    points: Sequence[CurvePoint],
    best: CurvePoint | None,
    output: CurveOutput,
    trust: dict[str, Any] | None,
    *,
    marked: bool,
) -> Iterator[str]:
    """:param marked: the best size is the knee, and not only the largest one of a curve that still rises."""
    if trust is not None:
        predicted, measured = trust["predicted_share"] * 100, trust["recorded_share"] * 100
        yield f"Trust: at its own pool.size, {_size(trust['pool_size_bytes'])}, this recording hit"
        yield f"{measured:.1f} % of its prompt tokens, and the simulation {predicted:.1f} %."
    yield f"{trace.name}: {len(trace.requests):,} requests, {trace.tokens:,} tokens; {output.eviction}."
    if output.sample > 1:
        yield f"Samples of one in {output.sample} chunks; ± is their standard error."
        if output.eviction == "car":
            yield OF_CAR
    yield ""
    most = max(point.hit_rate for point in points) or 1.0
    for point in points:
        bar = "█" * round(_BAR * point.hit_rate / most)
        told = f"{point.hit_rate * 100:5.1f} %" + (f" ±{point.error * 100:.1f}" if output.sample > 1 else "")
        mark = "  <- knee" if point is best and marked else ""
        yield f"{_size(point.arena_bytes):>10} {bar:<{_BAR}} {told}{mark}"
    yield ""
    if best is None and (trust is None or trust["trusted"]):
        yield "Nothing hits at any of these sizes: no prompt's leading chunks come again"
        yield "while they are held."
        return
    if best is None:
        yield f"Both differ by over {TRUSTED * 100:.0f} points, or 15 %, so no size is recommended: hits may have come"
        yield "from behind the arena, from before the recording began, or within a chunk."
        return
    yield f"pool.size {_size(best.arena_bytes)} hits {best.hit_rate * 100:.1f} % of all prompt tokens; the largest"
    yield f"of these sizes {points[-1].hit_rate * 100:.1f} %. Nothing of it is timed: requests are stored as they come."


def _size(nbytes: int) -> str:
    from layerflow.config.fields import format_size  # noqa: PLC0415

    return format_size(nbytes)
