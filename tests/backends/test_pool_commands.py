"""`layerflow bench pool` and `layerflow demo --pool` against real pools; small parameters, no time is judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from layerflow_cli.bench import pool as bench
from layerflow_cli.demo import run_demo

EMULATOR = Path(__file__).resolve().parents[1] / "npu" / "emulator"
EMULATED: dict[str, Any] = {"cann_emulator": EMULATOR}
POOLS = [("mooncake", {}), ("memcache", EMULATED)]


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("kind", "options"), POOLS)
def test_metadata_requests_do_not_grow_with_layers(kind, options):
    result = bench.measure(kind=kind, rounds=1, chunks=3, layers=4, depths=(2, 8), **options)
    assert result["metadata_rpcs_per_step"] > 0
    assert result["metadata_rpcs_per_step"] == result["metadata_rpcs_2_layers"] == result["metadata_rpcs_8_layers"]
    for way in ("save", "load"):
        assert result[f"{way}_gbps"] > 0 and result[f"raw_{way}_gbps"] > 0
    assert all(("CANN emulated" in table.title) == bool(options) for table in bench.present(result))


@pytest.mark.parametrize(("kind", "options"), POOLS)
def test_the_demo_loads_every_shape_from_the_pool(kind, options, tmp_path, capsys):
    code = run_demo(json_file=tmp_path / "demo.json", out=tmp_path / "out", quick=True, pool=kind, **options)
    written = json.loads((tmp_path / "demo.json").read_text())
    assert (code, list(written["shapes"])) == (0, ["gqa", "mla", "hybrid", "compressed"])
    assert written["pool"]["kind"] == kind and written["pool"]["fetched_objects"] == 5 * (3 + 3 + 4 + 9)
    for found in written["shapes"].values():
        assert found["tokens_identical"] is True and found["wrong_bytes"] == 0 < found["compared_bytes"]
    said = [capsys.readouterr().out, (tmp_path / "out" / "timeline.html").read_text()]
    assert all(f"layerflow demo on {kind}" in text for text in said)
    assert all(("CANN emulated" in text) == bool(options) for text in said)
