"""One readable line per problem on standard error, exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from layerflow.errors import LayerflowError, RemoteError
from layerflow_cli.options import with_json_file

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

NO_TORCH = (
    "this command computes with torch, which is not installed here: run it in the engine's environment, "
    "or pip install 'layerflow[agent]'"
)
"""The server, the proxy and the tools do without it, so that only some commands find it missing."""

# Newer typer carries its own copy of click, older typer uses click: take the base from typer itself.
_UsageProblem: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException" and issubclass(base, Exception)
)


class LayerflowGroup(TyperGroup):
    """A command group whose refusals are lines, not tracebacks or boxes."""

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> Any:
        """Run a command line and leave the process with its exit code."""
        extra["standalone_mode"] = False
        given = with_json_file(sys.argv[1:] if args is None else args)
        try:
            code = super().main(args=given, prog_name=prog_name, **extra)
        except RemoteError as error:  # its code is for programs
            refuse(error.message)
        except LayerflowError as error:
            refuse(str(error))
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            refuse(NO_TORCH)
        except _UsageProblem as problem:
            refuse(problem.format_message() if hasattr(problem, "format_message") else str(problem))
        except (typer.Abort, KeyboardInterrupt):
            sys.exit(EXIT_INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


def refuse(message: str) -> None:
    """Say why, a line per problem, and leave with exit code 2."""
    for line in message.splitlines():
        typer.echo(f"layerflow: {line}", err=True)
    sys.exit(EXIT_REFUSED)
