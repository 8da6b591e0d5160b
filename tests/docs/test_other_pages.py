"""Pages that list things list all of them."""

import ast
import re
import tomllib

from pages import ROOT, page, rows, sections

from layerflow.config.settings import reference
from layerflow_cli.commands.bench import MEASUREMENTS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def name_of(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement)[0]


def told(section: str) -> set[str]:
    cells = rows(sections(page("dependencies.md"))[section])[1:]
    return {name for row in cells for name in re.findall(r"`([\w-]+)`", " ".join(row[:-1]))}


def test_every_dependency_is_justified():
    extras = dict(PROJECT["optional-dependencies"])
    tests = {name_of(item) for item in [*extras.pop("test"), *extras.pop("dev")]} - {"layerflow"}
    assert told("Run time") == {name_of(item) for item in PROJECT["dependencies"]}
    assert told("Extras") == {*extras, *(name_of(item) for items in extras.values() for item in items)}
    assert told("Tests and development") == tests


def test_every_measurement_is_described():
    assert set(MEASUREMENTS) <= set(sections(page("benchmarks.md")))


def defined(text: str) -> set[str]:
    """Names of functions, methods (by themselves, and behind their class), classes and constants of a Python file."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if hasattr(each, "name")}
        if isinstance(node, ast.AnnAssign | ast.Assign):
            found |= {ast.unparse(target) for target in getattr(node, "targets", None) or [node.target]}
    return found


def test_the_tour_goes_through_what_exists():
    folders = [ROOT / "src/layerflow", ROOT / "examples"]
    files = [file for folder in folders for kind in ("*.py", "*.c") for file in folder.rglob(kind)]
    count = 0
    for name, text in sections(page("architecture.md")).items():
        told = re.sub(r"/\n\s+", "/", text)  # a path may go on in the next line of its column
        for path, function in re.findall(r"([\w/]+\.(?:py|c))\b(?::(\w+(?:\.\w+)?))?", told):
            named = [file for file in files if str(file).endswith(f"/{path}")]
            assert named, f"{name}: no {path}"
            assert not function or any(function in defined(file.read_text(encoding="utf-8")) for file in named), (
                f"{name}: no {function} in {path}"
            )
            count += bool(function)
    assert count > 20


def test_every_setting_named_exists():
    keys = {row.key for row in reference()}
    sections_of = {key.partition(".")[0] for key in keys} - {"log"}
    setting = re.compile(r"`((?:" + "|".join(sections_of) + r")\.[a-z_0-9.]+)`")
    for path in (ROOT / "docs").glob("*.md"):
        for name in setting.findall(path.read_text(encoding="utf-8")):
            assert name in keys or name.endswith((".py", ".md")) or name == "server.call", f"{path.name}: {name}"
