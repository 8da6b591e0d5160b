"""Pages that list things list all of them."""

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


def test_every_file_has_its_line_in_the_architecture():
    lines = [cells[0] for cells in rows(sections(page("architecture.md"))["Files"])[1:] if cells[1]]
    files = [re.escape(word).replace(r"\*", ".*") for word in re.findall(r"[\w*]+\.(?:py|c)\b", " ".join(lines))]
    rooms = set(re.findall(r"(\w+)/", " ".join(lines)))
    named = re.compile("|".join(files))
    paths = [*(ROOT / "src/layerflow").rglob("*.py"), *(ROOT / "src/layerflow").rglob("*.c")]
    assert [
        str(path)
        for path in paths
        if path.name != "__init__.py" and path.parent.name not in rooms and not named.fullmatch(path.name)
    ] == []
    for pattern in files:
        assert any(re.fullmatch(pattern, path.name) for path in paths), f"{pattern}: no such file"


def test_the_load_and_the_save_go_through_what_exists():
    found = sections(page("architecture.md"))
    for name in ("One load, file by file", "One save, file by file"):
        steps = rows(found[name])[1:]
        assert len(steps) > 15
        for where, functions, _ in steps:
            paths = [ROOT / "src/layerflow" / path for path in re.findall(r"`([^`]+)`", where)]
            assert paths and [path for path in paths if not path.exists()] == []
            texts = [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
            for function in re.findall(r"`([^`]+)`", functions):
                assert any(f"def {function}(" in text for text in texts), f"{where}: no {function}"


def test_every_setting_named_exists():
    keys = {row.key for row in reference()}
    sections_of = {key.partition(".")[0] for key in keys} - {"log"}
    setting = re.compile(r"`((?:" + "|".join(sections_of) + r")\.[a-z_0-9.]+)`")
    for path in (ROOT / "docs").glob("*.md"):
        for name in setting.findall(path.read_text(encoding="utf-8")):
            assert name in keys or name.endswith((".py", ".md")) or name == "server.call", f"{path.name}: {name}"
