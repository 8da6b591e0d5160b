"""``layerflow demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerflow.errors import ConfigError
from layerflow_cli.options import Endpoint, JsonFile, backend_names, finite, own_environment
from layerflow_cli.output_file import checked_folder


def demo(
    json_file: JsonFile = None,
    out: Annotated[
        Path,
        typer.Option("--out", metavar="DIR", help="Where timeline.html and trace.json go.", callback=checked_folder),
    ] = Path("out"),
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="gqa, mla, hybrid or compressed; may be repeated. Default: all."),
    ] = None,
    runs: Annotated[int | None, typer.Option(min=1, metavar="N", help="Passages per shape. Default: 3.")] = None,
    link_gbps: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=finite,
            metavar="X",
            help="Emulate a link of X GB/s between engine and pool; 0 = none. Default: one at which loading takes "
            "up to 40 % of a hit's compute here.",
        ),
    ] = None,
    link_latency_us: Annotated[
        int | None, typer.Option(min=0, metavar="US", help="Latency of the emulated link, per batch. Default: 0.")
    ] = None,
    endpoint: Endpoint = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny models: checks tokens and bytes in seconds; times say nothing.")
    ] = False,
    pool: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What is behind the arena: memory (nothing), disk, mooncake, memcache, redis or another installed "
            "backend; it is started too, and every load comes from there.",
            autocompletion=backend_names,
        ),
    ] = "memory",
    cann_emulator: Annotated[
        Path | None, typer.Option(metavar="DIR", help="An emulated CANN, for memcache on a machine without an NPU.")
    ] = None,
    pd: Annotated[
        bool, typer.Option("--pd", help="Prefill and decode in engines of their own: the decoder follows the saves.")
    ] = False,
    device: Annotated[
        str, typer.Option(metavar="KIND", help="Where the engines' caches are: cpu, cuda, npu, or e.g. cuda:1.")
    ] = "cpu",
) -> None:
    """Show cold, bulk and layer-wise prefill side by side on this machine, in about a minute.

    Starts a server of its own (or uses the one at --endpoint), computes and saves prompts with the
    reference engine, loads them again, and compares every token and every byte. Exit code 1 if any differs.

    \b
    Example:
      layerflow demo --json demo.json
      layerflow demo --shape mla --link-gbps 1.5
      layerflow demo --pool mooncake
      layerflow demo --pd
    """
    if pd:
        from layerflow_cli.demo.pd import run_pd_demo  # noqa: PLC0415

        if endpoint is not None or pool != "memory":
            raise ConfigError("--pd starts a server of its own, and no pool behind it; leave --endpoint and --pool out")
        with own_environment():
            code = run_pd_demo(
                json_file=json_file, out=out, link_gbps=link_gbps, shapes=shape or (), runs=runs, quick=quick
            )
        raise typer.Exit(code)
    from layerflow_cli.demo import run_demo  # noqa: PLC0415 - pulls torch in

    with own_environment():
        code = run_demo(
            json_file=json_file,
            out=out,
            link_gbps=link_gbps,
            link_latency_us=link_latency_us,
            endpoint=endpoint,
            shapes=shape or (),
            runs=runs,
            quick=quick,
            pool=pool,
            cann_emulator=cann_emulator,
            device=device,
        )
    raise typer.Exit(code)
