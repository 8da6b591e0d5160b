"""The documentation's pages, read."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def rows(text: str) -> list[list[str]]:
    """The cells of every table row, separators left out."""
    found = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return [cells for cells in found if not all(re.fullmatch(r":?-+:?", cell) for cell in cells)]


def sections(text: str) -> dict[str, str]:
    """The text below each heading, by heading, up to the next one."""
    parts = re.split(r"^#+ (.*)$", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def code(cell: str) -> str:
    """The first `quoted` word of a cell; the cell where there is none."""
    found = re.search(r"`([^`]+)`", cell)
    return found[1] if found else cell
