import json
import re

import pytest
from rich.console import Console

from layerflow.errors import ConfigError
from layerflow.observe.overview import duration
from layerflow_cli.output import progress, quantity, tables, unit_of, write_json


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("wall_ms", 12.345, ("12.3", "ms")),
        ("events_per_s", 123456.7, ("123,456.7", "/s")),
        ("register_gb_per_s", 25.9, ("25.9", "GB/s")),
        ("us_per_event", 2.0, ("2", "us")),
        ("link_gbps", 4.25, ("4.25", "GB/s")),
        ("used_bytes", 3 << 20, ("3", "MiB")),
        ("evicted_bytes_total", 1000, ("1,000", "bytes")),
        ("hidden_seconds_total", 1.5, ("1.5", "s")),
        ("overlap", 0.9876, ("98.8", "%")),
        ("cpu_percent", 3.25, ("3.2", "%")),
        ("objects", 12345, ("12,345", "")),
        ("pid", 20782, ("20782", "")),
        ("ok", True, ("yes", "")),
        ("of_bound", None, ("-", "")),
        ("slowdown", float("inf"), ("inf", "")),
        ("walls_ms", [1.0, 2.5], ("1, 2.5", "ms")),
        ("compute", "sleep", ("sleep", "")),
    ],
)
def test_quantities(name, value, shown):
    assert quantity(name, value) == shown


def test_a_count_per_something_is_no_time():
    assert unit_of("commands_per_layer") == "" and unit_of("layers") == "" and unit_of("sessions") == ""


def render(result: dict) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in tables("x", result):
        console.print(table)
    return console.export_text()


def test_tables_cover_every_value():
    text = render(
        {
            "runs": 5,
            "load": {"wall_ms": 1.0, "overlap": 0.5},
            "save": {"wall_ms": 2.0, "overlap": 0.25},
            "cases": [{"block_bytes": 4096, "way": "numpy"}, {"block_bytes": 8192, "way": "torch"}],
        }
    )
    for part in ("runs", "5", "1 ms", "2 ms", "50", "25", "4 KiB", "8 KiB", "torch"):
        assert part in text


def test_a_nested_table_inherits_its_unit():
    assert "us" in render({"us_per_event": {"8": 1.5}}).splitlines()[-2]


def test_json_has_no_nan_and_plain_numbers(tmp_path):
    class Scalar:
        def item(self) -> float:
            return 2.5

    path = tmp_path / "x.json"
    write_json(path, {"a": float("nan"), "b": Scalar(), "c": (1, 2), "d": tmp_path, 5: None})
    assert json.loads(path.read_text()) == {"a": None, "b": 2.5, "c": [1, 2], "d": str(tmp_path), "5": None}
    with pytest.raises(ConfigError, match="cannot be written"):
        write_json(tmp_path / "absent" / "x.json", {})


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.9, "59 s"), (245, "4 min 5 s"), (3600, "1 h 0 min"), (183600, "2 d 3 h")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_what_takes_long_says_where_it_is(capsys):
    """A line a period, until one is seen whole; nothing else, and nothing on standard output."""
    said, wanted = "", re.compile(r"^second: 1 of 3 done, \d+ s$", re.MULTILINE)
    with progress(3, period_s=0.01) as advance:
        advance("first")
        advance("second")
        while not wanted.search(said):  # what is said while it is being read may be cut, or lost
            said += capsys.readouterr().err
    assert capsys.readouterr().out == ""


def test_what_is_quick_says_nothing(capsys):
    with progress(1, period_s=60) as advance:
        advance("only")
    assert capsys.readouterr() == ("", "")
