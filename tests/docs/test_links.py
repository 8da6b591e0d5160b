"""Every relative link of the documentation leads somewhere, headings included."""

import re

import pytest
from pages import DOCS, ROOT, sections

PAGES = [*sorted(DOCS.glob("*.md")), *(ROOT / name for name in ("README.md", "CHANGELOG.md") if (ROOT / name).exists())]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, fragment = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{path.name}: {link}"
        if fragment:
            assert fragment in {anchor(name) for name in sections(target.read_text(encoding="utf-8"))}, link


def test_the_index_names_every_page():
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    assert {link.partition("#")[0] for link in LINK.findall(index)} >= {
        path.name for path in DOCS.glob("*.md") if path.name != "README.md"
    }
