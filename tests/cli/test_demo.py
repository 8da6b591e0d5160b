import json
import multiprocessing
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import layerflow_cli.demo.run as course
from layerflow.errors import ConfigError, LayerflowError
from layerflow.observe.trace import StepTrace
from layerflow_cli.bench.harness import serving
from layerflow_cli.bench.pool.tier import Tier
from layerflow_cli.demo import run_demo
from layerflow_cli.demo.checks import wrong_bytes
from layerflow_cli.demo.engines import Answer
from layerflow_cli.demo.outcome import Outcome, differing
from layerflow_cli.demo.pd import _hear as hear
from layerflow_cli.demo.pd import run_pd_demo
from layerflow_cli.demo.workload import SHAPES, Workload, suitable_link
from layerflow_engine.request import Result

PROGRESS = re.compile(r".+: \d+ of \d+ done, \d+ s")
"""On a busy machine a demo takes long enough to say where it is."""


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_quick_demo_of_all_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code = run_demo(json_file=tmp_path / "demo.json", out=tmp_path / "out", quick=True)
    written = json.loads((tmp_path / "demo.json").read_text())
    assert (code, list(written["shapes"])) == (0, ["gqa", "mla", "hybrid", "compressed"])
    assert written["link"]["emulated"] is True and written["link"]["gbps"] > 0
    for shape, found in written["shapes"].items():
        assert found["tokens_identical"] is True and found["compared_tokens"] > 0
        assert found["wrong_bytes"] == 0 < found["compared_bytes"]
        assert {"cold", "bulk", "layerwise"} <= set(found["ttft_ms"]) and all(found["ttft_ms"].values())
        assert found["bytes"] == Workload.of(shape, quick=True).prefix_bytes
        assert 0 <= found["overlap"] <= found["overlap_bound"] + 1e-9 and found["overlap_bound"] <= 1
        assert found["hidden_ms"] + found["exposed_ms"] >= found["transfer_ms"] - 1e-6
        assert found["control_changes_tokens"] is True and found["control_wrong_bytes"] > 0
    page = (tmp_path / "out" / "timeline.html").read_text()
    assert all(f"{shape.upper()}: layer-wise load" in page for shape in SHAPES) and "mulated link" in page
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"compute", "load", "save"}
    output = capsys.readouterr()
    assert "every token and every KV byte identical" in output.out
    assert all(PROGRESS.fullmatch(line) for line in output.err.splitlines()), output.err


def test_prefill_and_decode_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code = run_pd_demo(json_file=tmp_path / "demo.json", out=tmp_path / "out", quick=True)
    written = json.loads((tmp_path / "demo.json").read_text())
    assert (code, list(written["shapes"])) == (0, list(SHAPES))
    for shape, found in written["shapes"].items():
        assert found["tokens_identical"] is True and found["compared_tokens"] > 0
        assert found["wrong_bytes"] == 0 < found["compared_bytes"]
        # 480 tokens of rows that stand for 16 ones each: the last row holds the token that is left to compute.
        assert found["loaded_tokens"] == [464 if shape == "compressed" else 479]
        assert set(found["ttft_ms"]) == {"single", "follow", "whole"}
    page = (tmp_path / "out" / "timeline.html").read_text()
    assert all(f"{shape.upper()}: prefiller" in page for shape in SHAPES)
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"compute", "load", "save"}
    assert "all that can be loaded of a prompt was handed over" in capsys.readouterr().out


def test_every_load_comes_from_behind_the_arena(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code = run_demo(json_file=tmp_path / "demo.json", out=tmp_path / "out", quick=True, pool="disk")
    written = json.loads((tmp_path / "demo.json").read_text())
    assert (code, written["link"]["emulated"]) == (0, False)
    # Per shape 2 loads of the saved prompt, 2 of another with its passage, and the control; hybrid has 2 groups, of
    # whose sliding one the last chunk is enough; compressed has 2 of rows and 3 windows.
    assert written["pool"] == {"kind": "disk", "remark": "", "fetched_objects": 5 * (3 + 3 + 4 + 9)}
    for shape, found in written["shapes"].items():
        assert found["tokens_identical"] is True and found["wrong_bytes"] == 0 < found["compared_bytes"]
        assert found["bytes"] == Workload.of(shape, quick=True).prefix_bytes
        assert found["transfer_ms"] >= found["hidden_ms"] and 0 <= found["overlap"] <= 1
        assert found["control_changes_tokens"] is True
    output = capsys.readouterr()
    assert "layerflow demo on disk" in output.out and "every load comes from disk" in output.out
    page = (tmp_path / "out" / "timeline.html").read_text()
    assert "layerflow demo on disk" in page and "link to a slower tier" in page


def test_a_load_from_the_arena_is_noticed(monkeypatch, tmp_path):
    monkeypatch.setattr(Tier, "empty_arena", lambda tier: None)
    with pytest.raises(LayerflowError, match="brought 0 objects from disk where it needs 3"):
        run_demo(out=tmp_path, shapes=["gqa"], quick=True, pool="disk")


def test_one_wrong_byte_is_found_and_ends_with_one_line_and_code_1(monkeypatch, tmp_path, capsys):
    honest = course._answer_cold

    def corrupt(*args):
        stored = honest(*args)
        stored[3, "v"].reshape(-1)[1234] ^= 1
        return stored

    monkeypatch.setattr(course, "_answer_cold", corrupt)
    assert run_demo(out=tmp_path, shapes=["gqa"], quick=True, link_gbps=0) == 1
    *before, line = capsys.readouterr().err.splitlines()
    assert all(PROGRESS.fullmatch(each) for each in before), before
    # Two prompts loaded two ways each, all compared with the same cache.
    assert line.startswith("layerflow: demo: gqa: 4 of ") and line.endswith("loaded KV bytes differ")


def test_a_running_server_is_used_and_its_link_told(tmp_path, capsys):
    settings = {"pool__size": "16MiB", "pool__link_gbps": 2.0, "transfer__discard_partial_chunks": True}
    with serving(**settings) as server:
        codes = [run_demo(out=tmp_path, shapes=["hybrid"], quick=True, endpoint=server.endpoint) for _ in range(2)]
    assert codes == [0, 0]
    assert "emulated link between engine and pool: 2 GB/s" in capsys.readouterr().out


def test_a_server_that_stores_partial_chunks_is_refused(tmp_path):
    with serving(pool__size="16MiB") as server, pytest.raises(LayerflowError, match="discard_partial_chunks = true"):
        run_demo(out=tmp_path, shapes=["gqa"], quick=True, endpoint=server.endpoint)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shapes": ["gqa", "mha"]}, "mha"),
        ({"endpoint": "ipc:///x", "link_gbps": 1.0}, "pool.link_gbps"),
        ({"endpoint": "ipc:///x", "pool": "disk"}, "pool.backend"),
    ],
)
def test_options_that_cannot_be(options, words):
    with pytest.raises(ConfigError, match=words):
        run_demo(**options)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_share_whole_chunks_and_nothing_else(shape, quick):
    workload = Workload.of(shape, quick)
    sizes = workload.sizes
    assert sizes.prefix % sizes.chunk == 0 and sizes.prefix % workload.config.step_tokens == 0
    assert sizes.suffix < sizes.chunk
    first, second, other = (workload.prompt(run, question) for run, question in ((0, 0), (0, 1), (1, 0)))
    assert {len(first), len(second), len(other)} == {workload.prompt_tokens}
    assert first[: sizes.prefix] == second[: sizes.prefix] != other[: sizes.prefix]
    assert first[sizes.prefix :] != second[sizes.prefix :]
    assert Workload.of(shape, quick, "salt ").prompt(0, 0).startswith("salt ")


def test_the_suitable_link_lets_the_heaviest_shape_take_its_share():
    gqa, hybrid = Workload.of("gqa", False), Workload.of("hybrid", False)
    assert gqa.prefix_bytes == 1536 * 49_152
    assert suitable_link([(gqa, 0.5), (hybrid, 0.5)]) == float(f"{gqa.prefix_bytes / 0.2 / 1e9:.2g}")


def test_wrong_bytes_counts_differences_and_what_is_missing():
    kv = {(0, "k"): np.arange(8, dtype=np.uint8), (0, "v"): np.zeros(4, dtype=np.uint8)}
    other = {key: plane.copy() for key, plane in kv.items()}
    assert wrong_bytes(kv, other) == 0
    other[0, "k"][[2, 5]] ^= 0x80
    del other[0, "v"]
    assert wrong_bytes(kv, other) == 6


def test_differing_tokens():
    assert differing([1, 2, 3], [1, 2, 3]) == 0
    assert differing([1, 2, 3], [1, 9]) == 2


def outcome_of(exposed: float, cold: float, layerwise: float) -> Outcome:
    """Ten layers of which the loads took 0.1 s each, beside compute of 0.2 s each."""
    made = Outcome(Workload.of("gqa", quick=True), control_tokens=1, control_bytes=1)
    trace = StepTrace(1, 1, "", [])
    for layer in range(10):
        trace.add("load", layer, layer * 0.1, (layer + 1) * 0.1, nbytes=100)
        trace.add("compute", layer, exposed + layer * 0.2, exposed + (layer + 1) * 0.2)
    trace.add("wait", 0, 0.0, exposed)
    for way, ttft in (("cold", cold), ("layerwise", layerwise)):
        result = Result("r", 10, (1,), False, 0, ttft, ttft, 0.0, 0)
        made.answers[way].append(Answer(result, [], {}, [trace]))
    return made


def test_shortfalls_are_told_apart_from_faults():
    good = outcome_of(exposed=0.11, cold=3.0, layerwise=1.0)
    assert (good.faults(), good.shortfalls()) == ([], [])
    slow = outcome_of(exposed=0.3, cold=1.0, layerwise=1.5)
    assert slow.faults() == []
    assert slow.shortfalls() == ["overlap is 78% of its bound, below 90%", "the first token comes later than cold"]
    slow.wrong_tokens, slow.compared_tokens, slow.control_tokens = 2, 8, 0
    assert [fault.split(" ")[0] for fault in slow.faults()] == ["2", "one"]


def test_a_prefill_engine_whose_process_has_died_is_told():
    here, there = multiprocessing.Pipe()
    there.close()
    with pytest.raises(LayerflowError, match="has ended"):
        hear(here)
