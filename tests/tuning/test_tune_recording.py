"""From a recording of a badly tuned server to a file, and whether it is better there."""

from __future__ import annotations

import itertools
import json
import random
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e.known import eventually
from sim.recordings import BLOCK, BLOCK_BYTES, CHUNK, KnownMachine
from typer.testing import CliRunner

from layerflow.agent import Control
from layerflow.config.settings import Settings
from layerflow.sim.replay import Replay, Trust, TrustRow
from layerflow.tuning.recorded import RecordedJudge
from layerflow.tuning.search import Aim
from layerflow.tuning.verify import look_of
from layerflow_cli.main import app
from tuning.loaded import BAD as SMALL_COPIES
from tuning.loaded import loading, serving

FILE = '# Tuned badly on purpose.\n[transfer]\nmode = "layerwise"\nmax_transfer_bytes = "80KiB"\n'
CHUNKS = range(9, 15)


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, list(args))


@dataclass
class Recorded:
    """A recording, and the file that held."""

    trace: Path
    file: Path
    machine: KnownMachine


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Of a machine that a formula describes: prompts that hit, in many copies of which each costs 1 ms."""
    folder = tmp_path_factory.mktemp("t")
    file = folder / "layerflow.toml"
    file.write_text(FILE)
    settings = Settings.load(file, {"pool.size": 64 << 20})
    machine = KnownMachine(bandwidth=1e9, batch_s=1e-3, settings=settings)
    drawn = random.Random(1)
    for _ in range(110):
        machine.serve(range(drawn.choice(CHUNKS)))
    return Recorded(machine.write(folder / "x.lfr"), file, machine)


def test_a_badly_tuned_file_is_changed_in_what_is_wrong_with_it(recorded: Recorded, tmp_path: Path) -> None:
    out, told_in = tmp_path / "tuned.toml", tmp_path / "x.json"
    args = ("tune", str(recorded.trace), "--config", str(recorded.file), "-o", str(out), "--json", str(told_in))
    done = invoke(*args)
    assert done.exit_code == 0, done.output
    told, text = json.loads(told_in.read_text()), out.read_text()
    (change,) = told["changes"]
    assert (change["key"], change["before"], change["after"]) == ("transfer.max_transfer_bytes", 80 << 10, 1 << 20)
    # The longest prompt waits for its first layer, in one copy: the others load while layers are computed.
    blocks = CHUNKS[-1] * CHUNK // BLOCK
    first_s = recorded.machine.batch_s + blocks * BLOCK_BYTES / recorded.machine.bandwidth
    assert told["after_ms"] == pytest.approx(first_s * 1e3, rel=0.01) and told["before_ms"] > 20 * told["after_ms"]
    assert told["gain"]["gain_ms"] == pytest.approx(told["before_ms"] - told["after_ms"])
    assert tomllib.loads(text)["transfer"] == tomllib.loads(FILE)["transfer"] | {"max_transfer_bytes": "1MiB"}
    assert (
        text.startswith("# Tuned badly on purpose.") and text.count("(predicted; ± of this recording's windows)") == 1
    )
    assert recorded.file.read_text() == FILE
    assert told["target_ms"] is None and told["reached"] is None and "change transfer.max" in done.stdout


@pytest.mark.parametrize(("goal", "reached"), [("1s", True), ("0.001ms", False)])
def test_whether_the_goal_is_reached_is_said(recorded: Recorded, goal: str, reached: bool, tmp_path: Path) -> None:
    args = ("tune", str(recorded.trace), "--config", str(recorded.file), "--goal", f"exposed_p99={goal}")
    out = tmp_path / "tuned.toml"
    said = invoke(*args, "-o", str(out)).stdout
    assert out.exists() is not reached and (f"{out} is not written." in said) is reached
    assert f"is {'' if reached else 'NOT '}reached." in said, said
    told = json.loads(invoke(*args, "--json").stdout)
    assert told["reached"] is reached and bool(told["changes"]) is not reached


BATCHES = ("transfer.max_transfer_bytes", "transfer.max_transfer_blocks", "transfer.max_inflight_bytes")


def candidates(folder: Path, machine: KnownMachine) -> tuple[dict[str, Any], str]:
    """What is tried of a recording of this machine under its own settings, and what is said of the rest."""
    file, notes = folder / "layerflow.toml", list[str]()
    file.write_text('[transfer]\nmode = "layerwise"\n')
    judge = RecordedJudge(Replay.read(machine.write(folder / "x.lfr")), file)
    return judge.candidates((), notes), "\n".join(notes)


def test_no_smaller_batches_and_windows_are_tried_than_were_recorded(tmp_path: Path) -> None:
    sizes = {"max_transfer_bytes": 4 << 20, "max_transfer_blocks": 1000, "max_inflight_bytes": 256 << 20}
    machine = KnownMachine(settings=Settings(transfer={"mode": "layerwise", **sizes}, pool={"size": "64MiB"}))
    for _ in range(2):
        machine.serve(range(9))
    tried, said = candidates(tmp_path, machine)
    assert [min(value or 1 << 60 for value in tried[key]) for key in BATCHES] == [4 << 20, 1024, 256 << 20]
    assert f"less of {', '.join(BATCHES)} than was recorded" in said
    unlimited = Settings(transfer={"mode": "layerwise", "max_transfer_blocks": 0}, pool={"size": "64MiB"})
    machine = KnownMachine(settings=unlimited)
    for _ in range(2):
        machine.serve(range(9))
    tried, said = candidates(tmp_path, machine)
    assert "transfer.max_transfer_blocks" not in tried and "transfer.max_transfer_blocks" in said


def test_settings_that_compute_what_no_recorded_step_did_are_a_guess(tmp_path: Path) -> None:
    """Every prompt hit but for a token: nobody has seen what losing that costs."""
    machine = KnownMachine(stored=set(range(8)))
    for _ in range(40):
        machine.serve(range(8))
    file = tmp_path / "layerflow.toml"
    file.write_text('[transfer]\nmode = "layerwise"\n')
    trace = machine.write(tmp_path / "x.lfr")
    judge = RecordedJudge(Replay.read(trace), file)
    assert not judge.judge({"transfer.prefetch_layers": 1}).guesses
    assert judge.judge({"pool.size": 64 << 10}).guesses == {Aim.TTFT_P99: "of 40 of 40 prompts"}


def test_a_file_that_loses_every_hit_can_be_tuned_by_what_is_known(tmp_path: Path) -> None:
    """What its misses take is not: its pool is grown by the hits, and nothing is said of first tokens."""
    machine = KnownMachine(stored=set(range(8)))
    for _ in range(120):
        machine.serve(range(8))
    file, trace = tmp_path / "layerflow.toml", machine.write(tmp_path / "x.lfr")
    file.write_text('[transfer]\nmode = "layerwise"\n[pool]\nsize = "512KiB"\n')
    asked = ("tune", str(trace), "--config", str(file), "--also", "pool.size")
    told = json.loads(invoke(*asked, "--goal", "hit_tokens", "--json", "-").stdout)
    assert [change["key"] for change in told["changes"]] == ["pool.size"] and told["after_share"] > 0.9
    assert "As it is it is not known what computing takes of 120 of 120 prompts." in told["notes"]
    refused = invoke(*asked, "--goal", "ttft_p99")
    assert refused.exit_code == 2 and "not known what computing takes of 120 of 120 prompts" in refused.stderr
    file.write_text('[transfer]\nmode = "layerwise"\n[pool]\nsize = "1536KiB"\n')
    told = json.loads(invoke(*asked, "--goal", "hit_tokens", "--json", "-").stdout)
    assert [change["key"] for change in told["changes"]] == ["pool.size"], (
        "its waits are guesses, and hold nothing back"
    )


def test_a_fit_that_is_off_is_told_and_one_that_misses_a_median_recommends_no_other_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = KnownMachine(bandwidth=1e9)
    for number in range(60):
        machine.bandwidth = 2e7 if number % 20 == 1 else 1e9  # a machine that stands still at times
        machine.serve(range(9))
    trace = machine.write(tmp_path / "x.lfr")
    trust = Replay.read(trace).trust
    off = [row.name for row in trust.unconfirmed if row.off > 3]
    assert trust.trusted and off == ["exposed per step, p99 (ms)", "prefill, p99 (ms)"]
    tried, said = candidates(tmp_path, machine)
    assert "transfer.prefetch_layers" in tried and "is for --verify to tell" in said
    assert "exposed per step, p99 is of what stood out" in said or "prefill, p99 is of what stood out" in said
    shown = invoke("simulate", str(trace), "--set", "transfer.prefetch_layers=1").stdout.splitlines()
    (at, *_) = [number for number, line in enumerate(shown) if line.startswith("exposed per step, mean")]
    assert "the fit alone is off by" in shown[at + 1] and "not confirmed by measurement" in shown[at + 1]
    (at, *_) = [number for number, line in enumerate(shown) if line.startswith("exposed per step, p50")]
    assert shown[at + 1].startswith("exposed per step, p99"), "the median is fitted well"
    missed = TrustRow("exposed per step, median (ms)", 9.0, 9.0, 3.0, True, 3.0)
    monkeypatch.setattr(Replay, "trust", Trust((missed,), ()))
    tried, said = candidates(tmp_path, machine)
    assert set(tried) == {"transfer.save_backlog_bytes"} and "transfer.mode, transfer.prefetch_layers" in said
    assert "exposed per step, median: not confirmed by measurement" in said
    assert max(map(len, shown)) <= 100


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--goal", "speed"), "use exposed_p99"),
        (("--goal", "exposed_p99=fast"), "write a time such as"),
        (("--goal", "exposed_p99=20"), "seconds or milliseconds? Write 20s or 20ms"),
        (("--config", "."), ": cannot be read: Is a directory"),
        (("--also", "pool.sise"), "pool.size"),
        (("--html", "x", "--for", "nonsense"), "--for, --html: belongs to --verify; leave them out"),
        (("--endpoint", "ipc:///x"), "--endpoint: belongs to --verify"),
        (("-o", "layerflow.toml"), "this command uses layerflow.toml"),
        (("-o", "hard.toml"), "this command uses layerflow.toml"),
        (("-o", "x.lfr"), "is a recording"),
        (("-o", "pyproject.toml"), "no configuration of layerflow"),
        (("-o", "letter"), "no configuration of layerflow"),
        (("-o", "missing/tuned.toml"), "No such file"),
        (("--json", "x.lfr"), "is a recording"),
        (("--json", "missing/x.json"), "No such file"),
        (("--config", "other.toml"), "differ from what was recorded"),
        (("--config", "wrong.toml"), "did you mean transfer.prefetch_layers?"),
        (("--config", "/nonexistent.toml"), "cannot be read"),
    ],
)
def test_wrong_input_writes_nothing(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(recorded.file.parent)
    Path("other.toml").write_text(FILE + "discard_partial_chunks = true\n")
    Path("wrong.toml").write_text("[transfer]\nprefetch_layer = 1\n")
    Path("pyproject.toml").write_text("[project]\nname = 'x'\n")
    Path("letter").write_text("Dear all,")
    if not Path("hard.toml").exists():
        Path("hard.toml").hardlink_to("layerflow.toml")
    there = {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    given = args if "--config" in args else ("--config", "layerflow.toml", *args)
    _refused(words, "tune", "x.lfr", *given, *(() if "-o" in args else ("-o", "tuned.toml")))
    assert {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()} == there


def test_a_file_that_cannot_be_written_at_the_end_costs_no_result(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, told_in = tmp_path / "gone" / "tuned.toml", tmp_path / "x.json"
    out.parent.mkdir()
    judged = RecordedJudge.current

    def full(judge: RecordedJudge) -> Any:  # the work has begun
        if out.parent.exists():
            out.parent.rmdir()
        return judged(judge)

    monkeypatch.setattr(RecordedJudge, "current", full)
    args = ("tune", str(recorded.trace), "--config", str(recorded.file), "-o", str(out))
    done = invoke(*args, "--json", str(told_in))
    assert done.exit_code == 2 and "cannot be written" in done.stderr
    told = json.loads(told_in.read_text())
    assert told["written"] is None and told["changes"]
    assert sorted(tmp_path.iterdir()) == [told_in], "nothing is left beside it"


def test_recordings_that_cannot_be_used(recorded: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rest = ("--config", str(recorded.file), "-o", str(tmp_path / "tuned.toml"))
    whole = recorded.trace.read_bytes()
    for name, content, words in (
        ("none.lfr", None, "no such file"),
        ("lines.jsonl", b'{"timestamp": 0}\n', "is no recording"),
        ("cut.lfr", whole[:4200], "cut"),
        ("newer.lfr", whole[:16] + b"\x63" + whole[17:], "version"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        _refused(words, "tune", str(tmp_path / name), *rest)
    monkeypatch.setattr(Replay, "trust", Trust((), ("settings have changed",)))
    _refused("nothing is recommended", "tune", str(recorded.trace), *rest)
    assert not (tmp_path / "tuned.toml").exists()


def _refused(words: str, *args: str) -> None:
    done = invoke(*args)
    assert done.exit_code == 2 and done.stdout == "" and words in done.stderr, done.output
    assert done.stderr.count("\n") == 1, done.stderr


BAD = SMALL_COPIES.replace("64KiB", "4MiB")
GRID = list(itertools.product((0, 1, 2, 4), ("1MiB", "4MiB", "16MiB")))


@pytest.mark.campaign
def test_tune_finds_most_of_what_a_grid_finds_and_verify_confirms_it(tmp_path: Path) -> None:
    file, trace, out = tmp_path / "layerflow.toml", tmp_path / "long.lfr", tmp_path / "tuned.toml"
    file.write_text(BAD)
    with serving(file) as server, loading(server.endpoint):
        control = Control(server.endpoint, engine="test")
        try:
            control.record(trace, 20.0, 16 << 20)
            assert eventually(lambda: not control.status(15.0)["recording"]["on"], timeout_s=60)
            if off := Replay.read(trace).trust.unfitted:
                pytest.skip(f"the machine is too busy: the fit alone is off by {off[0].off:.1f} x of {off[0].name}")
            done = invoke("tune", str(trace), "--config", str(file), "-o", str(out))
            assert done.exit_code == 0, done.output
            print(done.stdout, out.read_text())
            share = _share_of_the_grids_gain(control, out.read_text())
        finally:
            control.close()
        assert share >= 0.8
        confirmed = invoke("tune", "--verify", str(out), "--for", "40s", "--endpoint", server.endpoint)
    print(confirmed.stdout)
    assert confirmed.exit_code == 0, confirmed.output


def _share_of_the_grids_gain(control: Control, tuned_text: str) -> float:
    """What the tuned file gains, as a share of what the best of the grid does, both measured."""
    grid = [BAD.replace("= 1\n", f"= {layers}\n").replace("4MiB", size) for layers, size in GRID]
    texts = [BAD, tuned_text, *grid]
    sums = [[0.0, 0] for _ in texts]
    for _ in range(4):  # in turn, so that a machine that slows down favours none
        for text, total in zip(texts, sums, strict=True):
            mean, steps = _exposed(control, text, 2.5)
            total[0] += mean * steps
            total[1] += steps
    bad, tuned, *measured = [total / steps for total, steps in sums]
    best = min(measured)
    for (layers, size), mean in zip(GRID, measured, strict=True):
        print(f"prefetch_layers {layers}, {size:>6}: {mean * 1e3:6.2f} ms")
    print(f"as it is {bad * 1e3:.2f} ms, tuned {tuned * 1e3:.2f} ms, best of the grid {best * 1e3:.2f} ms")
    return (bad - tuned) / (bad - best)


def _exposed(control: Control, text: str, seconds: float) -> tuple[float, int]:
    """Mean exposed seconds of a step with loads under these settings, and how many there were."""
    control.try_settings(text.encode(), seconds + 60)
    time.sleep(0.5)
    before = look_of(control.status(15.0), 0.0)
    time.sleep(seconds)
    new = look_of(control.status(15.0), seconds).exposed.since(before.exposed)
    control.try_settings(b"", 0)
    return new.mean_s, new.count
