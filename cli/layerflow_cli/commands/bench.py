"""``layerflow bench NAME``: runs a measurement and shows it with units. Each is loaded when it is asked for."""

from __future__ import annotations

import importlib
import inspect
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

import typer

from layerflow.errors import ConfigError, LayerflowError
from layerflow_cli.errors import LayerflowGroup
from layerflow_cli.options import STANDARD_OUTPUT, JsonFile, assignments, backend_names, own_environment, positive

MEASUREMENTS = {
    "overlap": "How much of a transfer hides behind compute.",
    "engine-cost": "What a step costs the engine's own thread.",
    "copy": "How fast scattered blocks move, against one contiguous copy.",
    "device": "How fast scattered blocks move to and from a device, against one contiguous pinned copy.",
    "flow": "Events per second of the core, commands per layer, and what sessions that share the caps cost.",
    "miss": "What a lookup that finds nothing costs.",
    "lookup": "What a lookup that hits costs the server's loop.",
    "record": "What a recording costs: processor time for each event, and lookups with and without one.",
    "simulate": "What `layerflow simulate` predicts of real runs, beside what was measured.",
    "server": "What a step of a worker costs the server's loop, by the requests that load and save in it.",
    "beside": "What an engine's Python loses beside a save and beside a load.",
    "directory": "How long the loop stands still while a million objects fill the arena and are evicted.",
    "link": "How fast bytes pass between two arenas, against two blocking sockets or the library's own read.",
    "stagger": "How well ranks keep their slots on a shared link.",
    "pd": "How much of a hand-off from prefill to decode hides behind the prefill.",
    "auto": "Whether mode = auto picks the cheaper way.",
    "proxy": "What `layerflow proxy` adds to the first token.",
    "pool": "How fast bytes pass between engine and pool, against the pool's own calls.",
}
TRANSFERS = {name: f"transfer.{name}" for name in ("copy", "device", "link")}
WITH_OPTIONS = ("beside", "device", "directory", "flow", "link", "overlap", "pd", "pool", "server", "stagger")
Options = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="An argument of the measurement; may be repeated."),
]

bench = typer.Typer(
    name="bench",
    cls=LayerflowGroup,
    help="Measure this machine.\n\n\b\nExample:\n  layerflow bench overlap --json overlap.json",
    invoke_without_command=True,
    rich_markup_mode=None,
)


@bench.callback()
def _bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@bench.command(
    help=f"{MEASUREMENTS['overlap']}\n\n\b\nExample:\n  layerflow bench overlap --layers 60 --compute-ms 838 "
    "--transfer-ms 167 --json overlap.json"
)
def overlap(
    layers: Annotated[int, typer.Option(min=1, metavar="N", help="Layers of the model.")] = 60,
    compute_ms: Annotated[
        float, typer.Option(callback=positive, metavar="MS", help="Compute of one forward pass.")
    ] = 838.0,
    transfer_ms: Annotated[
        float, typer.Option(callback=positive, metavar="MS", help="What the link needs for all layers.")
    ] = 167.0,
    compute: Annotated[Literal["sleep", "matmul"], typer.Option(help="What stands in for attention.")] = "sleep",
    shape: Annotated[Literal["full", "compressed"], typer.Option(help="Of a layer's cache.")] = "full",
    on: Annotated[
        str,
        typer.Option("--device", metavar="KIND", help="cpu with an emulated link; cuda or npu with the device's own."),
    ] = "cpu",
    options: Options = None,
    json_file: JsonFile = None,
) -> None:
    given: dict[str, object] = {"layers": layers, "compute_ms": compute_ms, "transfer_ms": transfer_ms}
    given |= {"compute": compute, "shape": shape, "device": on}
    _run("overlap", given, options or [], json_file)


@bench.command(
    help=f"{MEASUREMENTS['pd']}\n\n\b\nExample:\n  layerflow bench pd --layers 60 --compute-ms 838 "
    "--transfer-ms 167 --json pd.json"
)
def pd(
    layers: Annotated[int, typer.Option(min=1, metavar="N", help="Layers of the model.")] = 60,
    compute_ms: Annotated[
        float, typer.Option(callback=positive, metavar="MS", help="Compute of the prefiller's pass.")
    ] = 838.0,
    transfer_ms: Annotated[
        float,
        typer.Option(callback=positive, metavar="MS", help="What the link needs for all layers, on each hop."),
    ] = 167.0,
    servers: Annotated[int, typer.Option(min=1, max=2, metavar="N", help="1: both engines share one.")] = 1,
    options: Options = None,
    json_file: JsonFile = None,
) -> None:
    given = {"layers": layers, "compute_ms": compute_ms, "transfer_ms": transfer_ms, "servers": servers}
    _run("pd", given, options or [], json_file)


@bench.command(
    help=f"{MEASUREMENTS['pool']} Starts what the pool needs, unless --config names a running one.\n\n\b\n"
    "Example:\n  layerflow bench pool --kind mooncake --json pool.json"
)
def pool(
    kind: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="What is measured: memory, disk, mooncake or memcache.", autocompletion=backend_names
        ),
    ] = "disk",
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Of each; medians are shown.")] = 15,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="Settings of a running store.")
    ] = None,
    cann_emulator: Annotated[
        Path | None, typer.Option(metavar="DIR", help="An emulated CANN, for memcache on a machine without an NPU.")
    ] = None,
    options: Options = None,
    json_file: JsonFile = None,
) -> None:
    given = {"kind": kind, "rounds": rounds, "config": config, "cann_emulator": cann_emulator}
    _run("pool", given, options or [], json_file)


@bench.command(help=f"{MEASUREMENTS['link']}\n\n\b\nExample:\n  layerflow bench link --link tcp --json link.json")
def link(
    which: Annotated[str, typer.Option("--link", metavar="NAME", help="Which: tcp, nixl or mooncake.")] = "tcp",
    moved_mib: Annotated[int, typer.Option(min=8, metavar="MIB", help="Moved in each round.")] = 192,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Of each; medians are shown.")] = 9,
    options: Options = None,
    json_file: JsonFile = None,
) -> None:
    _run("link", {"link": which, "moved_mib": moved_mib, "rounds": rounds}, options or [], json_file)


@bench.command(
    help=f"{MEASUREMENTS['stagger']}\n\n\b\nExample:\n  layerflow bench stagger --ranks 4 --layers 32 "
    "--spacing-us 1000 --json stagger.json"
)
def stagger(
    ranks: Annotated[int, typer.Option(min=2, metavar="N", help="Tensor-parallel ranks, each a process.")] = 4,
    layers: Annotated[int, typer.Option(min=1, metavar="N", help="Layers of the model.")] = 32,
    spacing_us: Annotated[int, typer.Option(min=1, metavar="US", help="Distance of two slots.")] = 1000,
    on: Annotated[
        str, typer.Option("--device", metavar="KIND", help="Of the ranks' memory: cpu, cuda or npu, or e.g. cuda:1.")
    ] = "cpu",
    options: Options = None,
    json_file: JsonFile = None,
) -> None:
    given = {"ranks": ranks, "layers": layers, "spacing_us": spacing_us, "device": on}
    _run("stagger", given, options or [], json_file)


@bench.command(help=f"{MEASUREMENTS['flow']}\n\n\b\nExample:\n  layerflow bench flow --sessions 1,100 --json flow.json")
def flow(
    sessions: Annotated[
        str, typer.Option(metavar="N,...", help="Numbers of sessions to compare under the default caps.")
    ] = "1,10,100,1000",
    options: Options = None,
    json_file: JsonFile = None,
) -> None:
    try:
        counts = tuple(int(count) for count in sessions.split(","))
    except ValueError:
        raise ConfigError(f"--sessions {sessions}: write numbers as 1,100") from None
    if min(counts) < 1:
        raise ConfigError(f"--sessions {sessions}: there is at least 1")
    _run("flow", {"sessions": counts}, options or [], json_file)


@bench.command(
    help=f"{MEASUREMENTS['device']}\n\n\b\nExample:\n  layerflow bench device --device cuda --json device.json"
)
def device(
    on: Annotated[str, typer.Option("--device", metavar="KIND", help="cpu, cuda or npu, or e.g. cuda:1.")] = "cpu",
    moved_mib: Annotated[
        int, typer.Option(min=0, metavar="MIB", help="Moved each way; 0 = 1024 on a device, 64 on the cpu.")
    ] = 0,
    way: Annotated[Literal["auto", "ranges", "kernel"], typer.Option(help="As transfer.copy_way.")] = "auto",
    options: Options = None,
    json_file: JsonFile = None,
) -> None:
    _run("device", {"device": on, "moved_mib": moved_mib, "way": way}, options or [], json_file)


@bench.command(
    help=f"{MEASUREMENTS['server']}\n\n\b\nExample:\n  layerflow bench server --engines 8 --tp 8 --layers 61 "
    "--json server.json"
)
def server(
    engines: Annotated[int, typer.Option(min=1, metavar="N", help="Engines that share the server.")] = 8,
    tp: Annotated[int, typer.Option("--tp", min=1, metavar="N", help="Workers of each.")] = 8,
    layers: Annotated[int, typer.Option(min=1, metavar="N", help="Layers of the model.")] = 61,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Steps of each case.")] = 10,
    options: Options = None,
    json_file: JsonFile = None,
) -> None:
    given = {"engines": engines, "tp_size": tp, "layers": layers, "rounds": rounds}
    _run("server", given, options or [], json_file)


@bench.command(
    help=f"{MEASUREMENTS['beside']}\n\n\b\nExample:\n  layerflow bench beside --moved-mib 256 --json beside.json"
)
def beside(
    moved_mib: Annotated[int, typer.Option(min=1, metavar="MIB", help="Bytes of the prompt.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Of each; medians are shown.")] = 9,
    options: Options = None,
    json_file: JsonFile = None,
) -> None:
    _run("beside", {"moved_mib": moved_mib, "rounds": rounds}, options or [], json_file)


@bench.command(
    help=f"{MEASUREMENTS['directory']}\n\n\b\nExample:\n  layerflow bench directory --objects 1000000 "
    "--json directory.json"
)
def directory(
    objects: Annotated[int, typer.Option(min=1000, metavar="N", help="That the arena has room for.")] = 1_000_000,
    options: Options = None,
    json_file: JsonFile = None,
) -> None:
    _run("directory", {"objects": objects}, options or [], json_file)


def _add(name: str) -> None:
    """The command of a measurement without options of its own."""

    @bench.command(name, help=f"{MEASUREMENTS[name]}\n\n\b\nExample:\n  layerflow bench {name} --json {name}.json")
    def _(options: Options = None, json_file: JsonFile = None) -> None:
        _run(name, {}, options or [], json_file)


for _name in MEASUREMENTS:
    if _name not in WITH_OPTIONS:
        _add(_name)


@bench.command("all", help="Run every measurement.\n\n\b\nExample:\n  layerflow bench all --json bench.json")
def every(json_file: JsonFile = None) -> None:
    from layerflow_cli.output import write_json  # noqa: PLC0415 - `--help` stays quick

    results: dict[str, Any] = {}
    failed = []
    try:
        for number, name in enumerate(MEASUREMENTS, 1):
            try:
                results[name] = _measure(name, {}, place=f"{number} of {len(MEASUREMENTS)}")
            except Exception as error:  # whatever it is, it costs no other measurement its result
                if isinstance(error, ModuleNotFoundError) and error.name == "torch":
                    raise  # most of them compute with it
                typer.echo(f"layerflow: bench {name}: {_said(error)}", err=True)
                failed.append(name)
                continue
            if json_file != STANDARD_OUTPUT:
                _show(name, results[name])
            if json_file not in (None, STANDARD_OUTPUT):
                write_json(json_file, results)
    finally:
        if json_file == STANDARD_OUTPUT:
            write_json(json_file, results)
    if failed:
        raise LayerflowError(f"measurements failed: {', '.join(failed)}; the others are complete")


def arguments(measure: Callable[..., Any], given: Mapping[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """The keyword arguments of `measure`: `given`, and ``--set`` items converted to the type of their default.

    A number whose default is not 0 is above 0, unless the measurement's module names it in ``MAY_BE_ZERO``.

    :raises ConfigError: `measure` has no such argument, an option gives it, or the value does not fit.
    """
    known = inspect.signature(measure).parameters
    may_be_zero = getattr(inspect.getmodule(measure), "MAY_BE_ZERO", ())
    values = dict(given)
    for name, text in assignments(sets).items():
        free = [each for each in known if each not in given]
        if name not in free:
            why = "has an option of its own" if name in known else "no such argument"
            raise ConfigError(f"--set {name}: {why}; there are: {', '.join(free) or 'none'}")
        default = known[name].default
        try:
            values[name] = _like(default, text)
        except ValueError:
            raise ConfigError(f"--set {name}={text}: should be like {default!r}") from None
        choices = get_args(get_type_hints(measure).get(name))
        if get_origin(get_type_hints(measure).get(name)) is Literal and values[name] not in choices:
            raise ConfigError(f"--set {name}={text}: use one of {', '.join(map(str, choices))}")
        least_is_zero = name in may_be_zero or default == 0
        for value in values[name] if isinstance(values[name], tuple) else (values[name],):
            if isinstance(value, bool):
                continue
            if isinstance(value, int | float) and not (value > 0 or (value == 0 and least_is_zero)):
                raise ConfigError(f"--set {name}={text}: should be {'at least' if least_is_zero else 'above'} 0")
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"--set {name}={text}: {value} is no number to work with")
    return values


def _like(default: Any, text: str) -> Any:
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    if isinstance(default, tuple | list):
        return tuple(_like(default[0] if default else "", item.strip()) for item in text.split(","))
    return type(default)(text) if isinstance(default, int | float) else text


def _measure(name: str, given: Mapping[str, Any], sets: Sequence[str] = (), place: str = "") -> Mapping[str, Any]:
    """:raises LayerflowError: it cannot be measured, with these arguments or at all."""
    module = _module(name)
    values = arguments(module.measure, given, sets)
    try:
        with own_environment():
            return _measured(name, module, values, place)
    except (ArithmeticError, LookupError, MemoryError, statistics.StatisticsError) as error:
        raise LayerflowError(f"bench {name} cannot be measured with these arguments: {_said(error)}") from error


def _measured(name: str, module: Any, values: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    from layerflow_cli.output import progress_lines  # noqa: PLC0415 - `--help` stays quick

    if name == "pool":  # it says itself how far it is
        return cast(Mapping[str, Any], module.measure(**values))
    with progress_lines(1) as advance:  # a bar would take time from what is measured
        advance(f"bench {name}{f' ({place})' if place else ''}")
        return cast(Mapping[str, Any], module.measure(**values))


def _said(error: Exception) -> str:
    if isinstance(error, LayerflowError):
        return str(error)
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def module_of(name: str) -> str:
    """The module that measures it."""
    return f"layerflow_cli.bench.{TRANSFERS.get(name, name.replace('-', '_'))}"


def _module(name: str) -> Any:
    return importlib.import_module(module_of(name))


def _run(name: str, given: Mapping[str, Any], sets: Sequence[str], json_file: Any) -> None:
    from layerflow_cli.output import write_json  # noqa: PLC0415

    result = _measure(name, given, sets)
    if not write_json(json_file, result):
        _show(name, result)


def _show(name: str, result: Mapping[str, Any]) -> None:
    from layerflow_cli.output import console, tables  # noqa: PLC0415

    out = console()
    present = getattr(_module(name), "present", None)  # of those that show more than a list
    for table in present(result) if present else tables(name, result):
        out.print(table)
