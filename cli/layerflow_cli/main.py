"""The ``layerflow`` command. Imports little: each command loads what it needs when it runs."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from layerflow._version import __version__
from layerflow_cli.commands.bench import bench
from layerflow_cli.commands.config import config
from layerflow_cli.commands.demo import demo
from layerflow_cli.commands.doctor import doctor
from layerflow_cli.commands.plan import plan
from layerflow_cli.commands.proxy import proxy
from layerflow_cli.commands.purge import purge
from layerflow_cli.commands.record import record
from layerflow_cli.commands.run import run
from layerflow_cli.commands.simulate import simulate
from layerflow_cli.commands.status import status
from layerflow_cli.commands.trace import trace
from layerflow_cli.commands.tune import tune
from layerflow_cli.errors import EXIT_TERMINATED, LayerflowGroup
from layerflow_cli.output_file import LayerflowCommand

app = typer.Typer(
    name="layerflow",
    cls=LayerflowGroup,
    help="Moves the KV cache of LLM serving engines layer by layer, hidden behind attention compute.\n\n"
    "\b\nExample:\n  layerflow run --pool-size 4GiB",
    invoke_without_command=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(short_help="Run the server.")(run)
app.command(short_help="Serve prefill and decode engines as one.")(proxy)
app.command(short_help="Show a running server's state.")(status)
app.command(short_help="Empty a running server's pool.")(purge)
app.command(short_help="Record what happens in a running server.")(record)
app.command(short_help="Draw the last steps of a running server's engines.")(trace)
app.command(short_help="Print every setting, or check or start a file.")(config)
app.command(short_help="Size a model's cache, and plan settings for it.")(plan)
app.command(short_help="Replay a trace under another configuration.")(simulate)
app.command(short_help="Find better settings, or try some on a server.")(tune)
app.command(short_help="Check a configuration on this machine.")(doctor)
app.command(short_help="Show layer-wise beside bulk loading.")(demo)
app.add_typer(bench)
for _command in (*app.registered_commands, *bench.registered_commands):
    _command.cls = LayerflowCommand


@app.callback()
def _layerflow(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"layerflow {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """The console script."""
    # As an exception: a benchmark or a demo ends the servers that it has started. `run` then listens for it itself.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    app()
