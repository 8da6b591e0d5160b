"""The commands of README and docs run as they are written, but where a mark above a block says why it is not run.

A block of commands is fenced as ``sh``. A line ``<!-- not run: REASON -->`` directly above it is the mark. The blocks
of one page run one after the other in one folder, which has a ``layerflow.toml``; a command that serves (``layerflow
run``, ``layerflow proxy``) goes on beside the later ones until the page ends.
"""

import os
import re
import select
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from pages import DOCS, ROOT

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
BLOCK = re.compile(r"^(?:<!-- not run: (?P<why>.+?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
COMMAND = re.compile(
    r"^(?:\$ )?(?:layerflow|pip3?|make|vllm|python3?|apt-get|apt|curl|git|docker|\./\S+|examples/\S+) ", re.M
)
SERVES = re.compile(r"layerflow (run|proxy) ")
ASKS = re.compile(r"layerflow (status|purge|doctor|record|trace) ")
TRIES = 5
"""For these: a server on a busy machine may not answer in the time that they give it."""
SECONDS = 300


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    language: str
    text: str
    why_not: str | None

    def commands(self) -> list[str]:
        """One after the other; a line that ends in a backslash goes on in the next."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(page, match["language"], match["text"], match["why"]) for match in found]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def runnable(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "sh" and block.why_not is None]


@contextmanager
def serving(command: str, environment: dict[str, str], folder: Path) -> Iterator[None]:
    """`command` until the end of the block, once it has said where it listens."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"], env=environment, cwd=folder,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        heard = select.select([process.stdout], [], [], SECONDS)[0]
        line = process.stdout.readline() if heard else ""
        assert "listening on" in line, f"{command}: {line}{_end(process)}"
        yield
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> str:
    """What it had to say at last."""
    process.send_signal(signal.SIGTERM)
    try:
        return "".join(process.communicate(timeout=SECONDS))
    except subprocess.TimeoutExpired:
        process.kill()
        raise


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A user's first login: nothing of layerflow is set, but for ports and a size that fit beside other tests."""
    program = tmp_path / "bin" / "layerflow"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "from layerflow_cli.main import main; main()" "$@"\n')
    program.chmod(0o755)
    (tmp_path / "runtime").mkdir(mode=0o700)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LAYERFLOW_")}
    return kept | {
        "PATH": os.pathsep.join([str(program.parent), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HOME": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path / "runtime"),
        "LAYERFLOW_SERVER__HTTP_PORT": "0",
        "LAYERFLOW_PROXY__PORT": "0",
        "LAYERFLOW_POOL__SIZE": "16MiB",
        "LAYERFLOW_POOL__WARM": "false",
    }


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=name_of)
def test_the_commands_of_a_page_run(page, environment, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "layerflow.toml").write_text("[transfer]\nprefetch_layers = 2\n")
    with ExitStack() as until_the_page_ends:
        for command in (command for block in runnable(page) for command in block.commands()):
            if SERVES.match(command):
                until_the_page_ends.enter_context(serving(command, environment, folder))
                continue
            for _ in range(TRIES if ASKS.match(command) else 1):
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", command],
                    env=environment, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False,
                )  # fmt: skip
                if done.returncode == 0:
                    break
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_stand_in_blocks_that_are_run_or_marked(page):
    for block in blocks(page):
        if not block.language:
            assert not COMMAND.search(block.text), f"{name_of(page)}: fence this block as sh:\n{block.text}"
        if block.why_not is not None:
            assert block.language in ("sh", "console"), f"{name_of(page)}: a mark above a block without commands"
    assert page.read_text(encoding="utf-8").count("<!-- not run:") == sum(
        block.why_not is not None for block in blocks(page)
    ), f"{name_of(page)}: a mark that stands above no block"


def test_what_pip_is_told_to_install_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    sources = [*PAGES, *(ROOT / "src").rglob("*.py"), *(ROOT / "cli").rglob("*.py"), *(ROOT / "examples").rglob("*.sh")]
    for path in sources:
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"(?:layerflow|['\"]\.)\[([a-z,]+)\]", text)
        assert {extra for names in named for extra in names.split(",")} <= set(extras), path
        if path.suffix == ".md":  # a reader has not installed it yet, and no index has it
            assert not re.search(r"pip install ['\"]?layerflow", text), path
