"""docs/tuning.md shows what its commands print."""

import re
import shlex

import pytest
from pages import ROOT, page
from typer.testing import CliRunner

from layerflow_cli.main import app

TEXT = page("tuning.md")


def commands() -> list[list[str]]:
    """Every ``layerflow plan`` of the page, as arguments; a line may go on in the next."""
    told = re.findall(r"^layerflow (plan .+?)$", TEXT.replace("\\\n", " "), re.M)
    return [shlex.split(line.partition(" > ")[0]) for line in told]


def printed(arguments: list[str]) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(autouse=True)
def _in_a_folder(monkeypatch, tmp_path):
    ((made, name),) = re.findall(r"^echo '(.+?)' > (\S+)/config\.json$", TEXT, re.M)
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(made)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)


def test_the_file_is_what_the_command_prints():
    (block,) = re.findall(r"^```toml\n(# Planned by.+?)^```", TEXT, re.M | re.S)
    assert printed(next(words for words in commands() if "--model" in words)) == block


def test_the_table_is_what_the_command_prints():
    table = printed(next(words for words in commands() if "--table" in words))
    assert table in TEXT
