"""Command lines that are run in the tests' own process."""

from __future__ import annotations

from click.testing import Result
from typer.testing import CliRunner

from layerflow_cli.main import app


def run(*arguments: str) -> Result:
    """What ``layerflow`` says to these arguments."""
    return CliRunner().invoke(app, arguments)


def refused(*arguments: str) -> str:
    """The one line in which ``layerflow`` refuses these arguments: with exit code 2, and nothing on standard output."""
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == "", result.output
    (line,) = result.stderr.splitlines()
    return line
