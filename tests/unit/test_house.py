"""The shape of the code: files that can be read in one go, folders that can be seen at a glance."""

from pathlib import Path

import layerflow
import layerflow_cli

ROOTS = [Path(package.__file__).parent for package in (layerflow, layerflow_cli)]
MOST_LINES = 400
MOST_FILES = 12


def test_no_file_is_longer_than_can_be_read_in_one_go() -> None:
    files = {path: len(path.read_text(encoding="utf-8").splitlines()) for root in ROOTS for path in root.rglob("*.py")}
    assert len(files) > 400, "that is not all of it"
    assert {str(path): lines for path, lines in files.items() if lines > MOST_LINES} == {}


def test_no_folder_holds_more_than_a_dozen_files() -> None:
    folders = [path.parent for root in ROOTS for path in root.rglob("__init__.py")]
    assert len(folders) > 50, "that is not all of it"
    counts = {folder: sum(path.name != "__init__.py" for path in folder.glob("*.py")) for folder in folders}
    assert {str(folder): count for folder, count in counts.items() if count > MOST_FILES} == {}
