"""The screen of ``layerflow status``, as text: nothing is cut, and nothing wraps inside a word."""

import pytest
from rich.console import Console

from layerflow_cli.status_view import screen, view

ENGINE = "Qwen3-235B-A22B/inference-pool-7d9f8c6b5-x2x9k/dp0"
MODEL = "/models/Qwen3-235B-A22B"


def worker(number: int, **more) -> dict:
    """A session that has loaded 12 GiB in 4 s."""
    own = {"session": number, "engine": "0b8f", "name": "llama/gpu-7/dp0", "memory": True, "model": "llama"}
    own |= {"tp": f"{number}/8", "pid": 4000 + number, "steps": 12_345, "loaded_bytes": 12 << 30, "load_seconds": 4.0}
    own |= {"loading_steps": 1000, "exposed_load_seconds": 1.4, "lookup_tokens": 0, "hit_tokens": 0}
    return own | {"silent": False, "heard_s_ago": 0.25} | more


SCHEDULER = {
    "session": 8,
    "engine": "0b8f",
    "memory": False,
    "model": "llama",
    "lookup_tokens": 1000,
    "hit_tokens": 610,
}
TOOL = {"session": 9, "engine": "status", "name": "status", "memory": False, "model": None}
STATUS = {
    "version": "9.9",
    "pid": 4,
    "uptime_s": 3700.0,
    "healthy": True,
    "endpoint": "ipc:///run/user/1000/layerflow-1000/control",
    "sessions": [worker(0), worker(1), SCHEDULER, TOOL],
    "pool": {"capacity_bytes": 16 << 30, "used_bytes": 4 << 30, "objects": 1204, "pinned": 12},
    "tier": {"backend": "disk", "up": True, "reason": "", "written_bytes": 5 << 30, "fetched_bytes": 0},
    "flow": {"loaded_bytes": 24 << 30, "saved_bytes": 1 << 30, "load_inflight_bytes": 64 << 20, "shed_parts": 3},
    "figures": {
        "overlap": {"load": 0.955, "save": 0.99},
        "lookup_hit_ratio": 0.61,
        "lookups_total": 4321.0,
        "loop_lag_seconds_sum": 0.002,
        "loop_lag_seconds_count": 10.0,
        "loop_lag_max_seconds": 0.0043,
    },
}
SCREEN = """\
layerflow 9.9, pid 4, up 1 h 1 min, healthy

engine     model   tp   steps  GB/s  exposed ms  hit %
gpu-7/dp0  llama  0/8  12,345  3.22        1.40   61.0
gpu-7/dp0  llama  1/8  12,345  3.22        1.40   61.0

endpoint  ipc:///run/user/1000/layerflow-1000/control
loads     24 GiB, 95.5 % hidden, 64 MiB in flight, hits 61.0 % of tokens
saves     1 GiB, 99.0 % hidden, 3 shed
pool      4 GiB of 16 GiB used (25.0 %), 1,204 objects, 12 pinned
tier      disk, up, 5 GiB written, 0 bytes read
loop      0.20 ms late on average, 4.3 ms at most"""
SILENT = worker(1, name=ENGINE, model=MODEL, silent=True, heard_s_ago=65.0)
DOWN = {"backend": "mooncake", "up": False, "reason": "the master at store:50051 does not answer, tried 12 times"}
TROUBLED = {"version": "9.9", "pid": 4, "healthy": True, "sessions": [SILENT], "tier": DOWN}
TROUBLE = """\
layerflow 9.9, pid 4, up 0 s, healthy

engine                       model           tp   steps  GB/s  exposed ms  hit %
inference-pool-7d9f8c6b5-    Qwen3-235B-    1/8  12,345  3.22        1.40      -
x2x9k/dp0                    A22B

! Qwen3-235B-A22B/inference-pool-7d9f8c6b5-x2x9k/dp0, tp 1/8, pid 4001: silent
  for 1 min 5 s
! mooncake is down: the master at store:50051 does not answer, tried 12 times

tier      mooncake, down"""


@pytest.mark.parametrize("width", [80, 120, 160])
def test_one_line_a_worker_and_a_line_for_each_part(width):
    assert "\n".join(screen(STATUS, width)).splitlines() == SCREEN.splitlines()


def test_long_names_go_on_in_the_next_line():
    assert screen(TROUBLED, 80) == TROUBLE.splitlines()
    wide = screen(TROUBLED, 120)
    assert sum("inference-pool-7d9f8c6b5-x2x9k/dp0  Qwen3-235B-A22B" in line for line in wide) == 1


def test_no_worker_is_told():
    assert screen({"version": "9.9", "sessions": [TOOL]}, 80)[2] == "! no engine worker is attached"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 24), (160, 24)])
def test_more_workers_than_the_terminal_has_lines_are_counted(width, height):
    many = STATUS | {"sessions": [worker(number) for number in range(64)]}
    lines = screen(many, width, height)
    assert len(lines) <= height and max(map(len, lines)) <= width
    (told,) = [line for line in lines if line.startswith("and ")]
    rows = sum(line.startswith("gpu-7/dp0") for line in lines)
    assert told == f"and {64 - rows} more; layerflow status shows all"
    assert len(screen(many, 80)) == len(screen(STATUS, 80)) + 62


@pytest.mark.parametrize("width", [80, 120, 160])
def test_what_is_printed_is_not_cut(width):
    plain = {**STATUS, "limits": {"max_transfer_bytes": 64 << 20}, "sessions": [SILENT | {"fingerprint": "ab" * 16}]}
    console = Console(width=width, record=True, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    console.print(view(plain, width, everything=True))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width and "\u2026" not in text
    for word in ("ab" * 16, "max_transfer_bytes", "lookup_hit_ratio", STATUS["endpoint"]):
        assert word in text


FILE = {
    "path": "/etc/layerflow/layerflow.toml",
    "sha256": "3f2a9c1b7d0e" + "5" * 52,
    "applied_at": "2026-11-26T13:58:00+00:00",
    "applied_s_ago": 245.0,
    "refused_since": None,
    "refused_s": None,
    "problems": [],
    "refusals": 0,
}


def test_the_watched_file_is_named_and_a_refused_edit_told():
    held = screen(STATUS | {"config": FILE}, 120)
    assert held[-1] == "file      /etc/layerflow/layerflow.toml, sha256 3f2a9c1b7d0e, applied 4 min 5 s ago"
    refused = FILE | {
        "refused_since": "2026-11-26T14:02:05+00:00",
        "refused_s": 3.0,
        "problems": ["pool.size (16MiB -> 32MiB) needs a restart"],
    }
    (note, *rest) = [line for line in screen(STATUS | {"config": refused}, 200) if line.startswith("! ")]
    assert not rest and note == (
        "! /etc/layerflow/layerflow.toml is refused since 2026-11-26T14:02:05+00:00 (3 s), and the old values hold: "
        "pool.size (16MiB -> 32MiB) needs a restart"
    )
