"""One version, in ``layerflow/_version.py``: what is built, said and written follows it."""

import re
import tomllib

from packaging.version import Version
from pages import DOCS, ROOT

import layerflow

HERE = Version(layerflow.__version__)
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_build_takes_the_version_from_its_one_place():
    assert "version" not in PYPROJECT["project"] and PYPROJECT["project"]["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "layerflow._version.__version__"}
    pattern = re.compile(r"""__version__\s*=\s*["']""")
    roots = [ROOT / name for name in ("src", "cli", "testing")]
    texts = {path: path.read_text(encoding="utf-8") for root in roots for path in root.rglob("*.py")}
    assert [path.name for path, text in texts.items() if pattern.search(text)] == ["_version.py"]


def test_the_changelog_begins_with_it():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, when = re.search(r"^## \[(.+?)\] - (\S+)$", changelog, re.M).groups()
    assert version == HERE.base_version
    assert (when == "unreleased") == HERE.is_prerelease


def test_pages_name_no_other_version_as_this_one():
    for path in (ROOT / "README.md", *DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r'\[101, \d+, "([^"]+)"', text)) <= {layerflow.__version__}, path.name
        for named in re.findall(r"layerflow(?:[- ]|==)(\d+\.\d+\.\d[\w.]*)", text):
            assert Version(named).base_version == HERE.base_version, f"{path.name}: layerflow {named}"
