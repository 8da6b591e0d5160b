"""``layerflow simulate``: figures, a curve, and refusals in one line."""

import json
import os
from functools import partial

import command_lines
import msgspec
import pytest
from e2e.known import KnownWorker, small_spec
from sim.recordings import KnownMachine
from sim.worlds import conversations
from sizing.models import MODELS

from layerflow.config.settings import Settings
from layerflow.recording.format import Dropped, LookedUp, StepSeen
from layerflow.server import EmbeddedServer


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("LAYERFLOW_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS["Llama-3.1-8B"]))
    return str(folder)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = []
    for request in conversations(1, count=60).requests:
        ids = [int.from_bytes(chunk[8:], "little") for chunk in (*request.chunks, request.tail) if chunk]
        lines.append(
            {
                "timestamp": request.at * 1e3,
                "input_length": request.tokens,
                "output_length": request.output,
                "hash_ids": ids,
                "block_size": 64,
            }
        )
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


MACHINE = ["--link", "25GB/s", "--layer-us", "0.8"]


simulate = partial(command_lines.run, "simulate")
refused = partial(command_lines.refused, "simulate")


def test_says_first_how_far_it_can_be_trusted(trace, model):
    result = simulate(trace, "--model", model, *MACHINE)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("No line of trust")
    assert max(map(len, result.stdout.split("hardly more.")[0].splitlines())) <= 80
    assert "loaded_share" in result.stdout
    assert max(map(len, result.stdout.splitlines()[1:])) <= 80


def test_equal_seeds_equal_figures_and_settings_count(trace, model):
    def figures(*more):
        result = simulate(trace, "--model", model, *MACHINE, "--engines", "2", "--json", "-", *more)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    first = figures()
    assert first == figures()
    assert first["requests"] == 60 and first["trust"] is None
    assert 0.0 < first["loaded_share"] <= first["found_in_pool_share"]
    small = figures("--ram", "16MiB")
    assert small["evictions"] > first["evictions"] and small["loaded_share"] < first["loaded_share"]
    assert figures("--set", "transfer.mode=bulk")["times"] != first["times"]
    assert figures("--speed", "0.1")["simulated_s"] > 5 * first["simulated_s"]
    assert figures("--first", "7")["requests"] == 7


def test_a_curve_on_the_terminal_as_json_and_as_a_page(trace, model, tmp_path):
    curve = [trace, "--model", model, "--curve", "pool.size", "--ram", "1GiB"]
    result = simulate(*curve)
    assert result.exit_code == 0, result.output
    assert "<- knee" not in result.stdout and max(map(len, result.stdout.splitlines())) <= 80
    page = tmp_path / "curve.html"
    told = json.loads(simulate(*curve, "--json", "-", "--html", str(page)).stdout)
    rates = [point["hit_share"] for point in told["points"]]
    assert len(rates) == 12 and rates[0] < rates[-1] and told["points"][-1]["pool_size_bytes"] == 1 << 30
    assert page.read_text().count("<circle") == 12
    assert told["everything_hits_share"] > rates[-1] and told["larger_hits_more"]
    assert result.stdout.endswith("Look at larger sizes too: --ram 4GiB.\n"), "it still rises: no knee is marked"
    assert "<- knee" in simulate(*curve[:-1], "64GiB").stdout
    told = json.loads(simulate(*curve[:-1], "64GiB", "--json").stdout)
    assert told["everything_hits_share"] == told["points"][-1]["hit_share"] and not told["larger_hits_more"]
    assert "sample less thinly" in refused(*curve, "--sample", "4")
    few = refused(*curve[:-1], "1MiB", "--sample", "4096")
    assert "one in 4096 chunks of trace.jsonl are 0: at least" in few, "and not the size, which could be raised"
    small = json.loads(simulate(*curve[:-1], "256KiB", "--json", "-").stdout)
    assert [point["pool_size_bytes"] >> 10 for point in small["points"]] == [64, 128, 256], "no pool is smaller"
    for timed in (("--link", "1GB/s"), ("--link-latency-us", "3"), ("--step-ms", "3"), ("--seed", "1")):
        assert f"{timed[0]}: tells of times" in refused(*curve, *timed)


def test_a_recording_is_believed_at_other_sizes_where_its_own_hits_are_predicted(tmp_path):
    folder, path = tmp_path / "s", tmp_path / "x.lfr"
    folder.mkdir(mode=0o700)
    endpoint = f"ipc://{folder}/control"
    server = EmbeddedServer(Settings(pool={"size": "8MiB"}, transfer={"mode": "layerwise"}), endpoint)
    try:
        with KnownWorker(endpoint, spec=small_spec(row=2048)) as worker:
            worker.agent._control.record(path, 600, 1 << 20)  # as a second client would
            prompts = [worker.prompt(16 * (1 + number % 4)) for number in range(12)]
            for turn in range(5):
                for number, prompt in enumerate(prompts):
                    if number % (turn + 1) == 0:
                        worker.serve(prompt)
            worker.agent._control.end_recording()
    finally:
        server.close()
    told = json.loads(simulate(str(path), "--curve", "pool.size", "--json", "-").stdout)
    assert told["trust"]["pool_size_bytes"] == 8 << 20 and 0.1 < told["trust"]["recorded_share"] < 1.0
    assert told["points"][-1]["hit_share"] >= told["points"][0]["hit_share"]
    shown = simulate(str(path), "--curve", "pool.size").stdout
    assert shown.startswith("Trust: at its own pool.size, 8MiB")
    assert told["trust"]["trusted"] == ("<- knee" in shown)
    timed = simulate(str(path))
    assert timed.exit_code == 0 and "what was recorded, and what is predicted" in timed.stdout
    assert "--first: a recording tells its own" in refused(str(path), "--curve", "pool.size", "--first", "3")
    chosen = json.loads(simulate(str(path), "--curve", "pool.size", "--set", "pool.size=2MiB", "--json", "-").stdout)
    assert chosen["points"][-1]["pool_size_bytes"] == 2 << 20


def test_a_recording_is_timed_and_another_configuration_beside_it(tmp_path):
    machine = KnownMachine()
    for turn in range(40):
        machine.serve([*range(8), *range(100, 100 + turn % 6)])
    path = str(machine.write(tmp_path / "x.lfr"))
    shown = simulate(path, "--link", "10MB/s")
    assert shown.exit_code == 0, shown.output
    assert "Trust: " in shown.stdout and "other" in shown.stdout and max(map(len, shown.stdout.splitlines())) <= 80
    told = json.loads(simulate(path, "--json", "-").stdout)
    assert told["trust"]["trusted"] and told["other"] is None
    slow = json.loads(simulate(path, "--link", "10MB/s", "--json", "-").stdout)
    assert slow["own"] == told["own"] and slow["other"]["prefill"]["p50_ms"] > told["own"]["prefill"]["p50_ms"]
    late = json.loads(simulate(path, "--link-latency-us", "50000", "--json", "-").stdout)
    assert late["other"]["exposed_per_step"]["mean_ms"] > 50 > told["own"]["exposed_per_step"]["mean_ms"]
    same = json.loads(simulate(path, "--set", "transfer.copy_way=kernel", "--json", "-").stdout)
    assert same["other"] == same["own"] and same["not_simulated"] == ["transfer.copy_way"]
    small = KnownMachine(settings=Settings(transfer={"mode": "layerwise", "max_transfer_bytes": "1MiB"}))
    for turn in range(40):
        small.serve([*range(8), *range(100, 100 + turn % 6)])
    given = (str(small.write(tmp_path / "small.lfr")), "--set", "transfer.max_inflight_bytes=16MiB")
    assert simulate(*given).exit_code == 0, "it goes with the recorded batches, not with the default ones"
    end = ("--last", f"{_last(machine, 20)}s")
    assert "20 prompts with their times are too few" in simulate(path, *end).stdout
    curve = json.loads(simulate(path, *end, "--curve", "pool.size", "--json", "-").stdout)
    assert 0 < curve["points"][-1]["hit_tokens"] < told["recorded"]["hit_tokens"]
    assert "--last 0s: write a time" in refused(path, "--last", "0s")
    for option in ("--layer-us", "--batched-tokens", "--seed", "--tp", "--engines", "--step-ms"):
        assert f"{option}: a recording tells its own" in refused(path, option, "3")
    assert "--kv-dtype, --seed: a recording tells" in refused(path, "--seed", "0", "--kv-dtype", "fp8")
    assert "belongs to --curve" in refused(path, "--eviction", "lru")
    machine.records.append(Dropped(machine.now, 3))
    cut = str(machine.write(tmp_path / "y.lfr"))
    assert "3 events are missing" in simulate(cut).stdout
    assert "nothing is predicted of another configuration" in refused(cut, "--ram", "1MiB")


def replayed(path, *change):
    told = json.loads(simulate(str(path), *change, "--json", "-").stdout)
    assert told["trust"]["trusted"], told["trust"]["against"]
    return told


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        (("transfer.step_timeout_ms=1",), 40),
        (("transfer.step_timeout_ms=1", "transfer.mode=bulk"), 40),
        (("pool.size=64KiB",), 0),
    ],
)
def test_no_prefill_is_predicted_where_prompts_compute_what_none_did(change, failed, tmp_path):
    """Every prompt had hit but for a token; now none does, and what 512 tokens take nobody has seen."""
    machine = KnownMachine(stored=set(range(8)))
    for _ in range(40):
        machine.serve(range(8))
    path = machine.write(tmp_path / "x.lfr")
    given = [word for each in change for word in ("--set", each)]
    told = replayed(path, *given)
    assert told["own"]["hit_share"] > 0.9 and told["other"]["failed_loads"] == failed
    other = told["other"]
    assert (other["guessed_prompts"], other["guessed_steps"], other["guessed_most_tokens"]) == (40, 0, 512)
    assert set(told["other"]["prefill"].values()) == {None}
    exposed = told["other"]["exposed_per_step"]["p50_ms"]
    assert exposed is None if len(given) > 2 or not failed else exposed >= 1
    shown = simulate(str(path), *given).stdout
    assert "Prefills of 40 of 40 prompts, and waits of 0 of " in shown
    assert ("What waits for a load that fails" in shown) == (exposed is not None)
    assert max(map(len, shown.splitlines())) <= 80
    slower = replayed(path, "--link", "50MB/s")["other"]
    assert not slower["guessed_prompts"] and slower["prefill"]["p50_ms"] > 0


def test_who_waits_for_a_guess_is_one_and_no_mean_is_told(tmp_path):
    """A prompt of which 3,840 tokens are lost holds up four that were looked up while it is computed."""
    machine = KnownMachine(stored=set(range(68)))
    for turn in range(300):
        machine.serve(range(60, 68))
        if turn == 150:
            machine.now += 1.0
            opened = machine.now
            machine.serve(range(60), idle_s=0.0)
            behind = len(machine.records)
            for _ in range(4):
                machine.serve(range(60, 68), idle_s=0.0)
            came = machine.records[behind:]
            del machine.records[behind:]
            lookups = [each for each in came if isinstance(each, LookedUp)]
            step = max(at for at, each in enumerate(machine.records) if isinstance(each, StepSeen))
            machine.records[step + 1 : step + 1] = [
                msgspec.structs.replace(each, at=opened + 1e-3, answered=opened + 1e-3) for each in lookups
            ]
            machine.records += [each for each in came if not isinstance(each, LookedUp)]
    told = replayed(machine.write(tmp_path / "x.lfr"), "--set", "transfer.step_timeout_ms=60")
    assert (told["other"]["failed_loads"], told["other"]["guessed_prompts"]) == (1, 5)
    assert told["other"]["prefill"]["p50_ms"] == told["own"]["prefill"]["p50_ms"]
    assert told["other"]["prefill"]["p99_ms"] is told["other"]["prefill"]["mean_ms"] is None


def test_hits_where_there_were_none_are_a_guess_where_no_load_was_seen(tmp_path):
    """What a load takes, and a pass of one token, no step has told."""
    machine = KnownMachine(settings=Settings(transfer={"mode": "layerwise"}, pool={"size": "64KiB"}))
    for _ in range(60):
        machine.stored.clear()
        machine.serve(range(8))
    other = replayed(machine.write(tmp_path / "x.lfr"), "--ram", "64MiB")["other"]
    assert other["hit_share"] > 0.9
    assert {*other["prefill"].values(), *other["exposed_per_step"].values()} == {None}


def test_what_hit_and_is_lost_is_stored_again_though_no_step_had_to(tmp_path):
    machine = KnownMachine(stored=set(range(8)))
    for _ in range(60):
        machine.serve(range(8))
    other = replayed(machine.write(tmp_path / "x.lfr"), "--ram", "1600KiB")["other"]
    assert 0.3 < other["hit_share"] < 0.9 and other["objects_without_room"]
    assert other["exposed_per_step"]["p50_ms"] is None, "what loads hide behind is a guess"


def test_what_several_steps_tell_is_predicted_and_stored_again(tmp_path):
    """Three prompts were computed, so that what a token takes is known. What is lost now is computed and saved, as
    engines do."""
    machine = KnownMachine()
    for turn in range(50):
        machine.serve(range(8 * (turn % 3), 8 * (turn % 3) + 8))
    path = machine.write(tmp_path / "x.lfr")
    lost = replayed(path, "--ram", "64KiB")["other"]
    assert lost["hit_share"] == 0 and not lost["guessed_prompts"]
    computed_ms = 4 * (machine.fixed_s + 512 * machine.token_s) * 1e3
    assert lost["prefill"]["p50_ms"] == pytest.approx(computed_ms, rel=0.02)
    assert lost["objects_without_room"] == 50 * 8, "all that is computed is to be saved"
    small = replayed(path, "--ram", "5MiB")["other"]
    curve = json.loads(simulate(str(path), "--curve", "pool.size", "--ram", "5MiB", "--json", "-").stdout)
    assert 0 < small["hit_share"] < 0.9
    assert small["hit_share"] == pytest.approx(curve["points"][-1]["hit_share"], abs=0.02)


def test_a_guess_about_few_prompts_hides_no_median(tmp_path):
    machine = KnownMachine(bandwidth=1e9)
    for turn in range(60):
        machine.serve(range(2 + turn % 3))
    for _ in range(2):
        machine.serve(range(60))
    told = replayed(machine.write(tmp_path / "x.lfr"), "--set", "transfer.step_timeout_ms=5")
    assert (told["other"]["failed_loads"], told["other"]["guessed_prompts"]) == (1, 1)
    assert told["other"]["prefill"]["p50_ms"] == told["own"]["prefill"]["p50_ms"]
    assert told["other"]["prefill"]["p99_ms"] is told["other"]["prefill"]["mean_ms"] is None


def test_keys_that_no_replay_takes_are_named(tmp_path):
    machine = KnownMachine()
    for _ in range(40):
        machine.serve(range(8))
    path = str(machine.write(tmp_path / "x.lfr"))
    told = json.loads(simulate(path, "--set", "server.max_sessions=9", "--json", "-").stdout)
    assert told["not_simulated"] == ["server.max_sessions"]
    told = json.loads(
        simulate(path, "--set", "pool.disk.path=/x", "--set", "server.max_deadline_s=99", "--json").stdout
    )
    assert told["not_simulated"] == ["pool.disk.path", "server.max_deadline_s"] and told["other"] == told["own"]
    shown = simulate(path, "--set", "server.max_sessions=9", "--set", "pool.lease_share=0.3").stdout
    assert shown.endswith("without effect here:\n  server.max_sessions\n")


def _last(machine, prompts):
    """How long its last so many prompts took, and half of the idle second before them."""
    asked = [record.at for record in machine.records if isinstance(record, LookedUp)]
    return machine.now - asked[-prompts] + 0.5


def test_refuses_in_one_line(trace, model, tmp_path):
    assert "--last: belongs to recordings" in refused(trace, "--model", model, *MACHINE, "--last", "10m")
    assert "--model" in refused(trace)
    assert "how quick is the machine" in refused(trace, "--model", model)
    assert "how quick is the machine" in refused(trace, "--model", model, "--link", "1GB/s")
    assert "pool.size" in refused(trace, "--model", model, "--curve", "log.level")
    assert "lru" in refused(trace, "--model", model, "--eviction", "random", *MACHINE)
    assert "--curve" in refused(trace, "--model", model, *MACHINE, "--sample", "4")
    for option in ("--layer-us", "--step-ms", "--speed", "--link-latency-us", "--flops", "--active-params"):
        for value in ("inf", "nan", "1e300"):
            assert option in refused(trace, "--model", model, "--link", "25GB/s", option, value)
    assert "keep one" in refused(trace, "--model", model, *MACHINE, "--set", "pool.size=1GiB", "--ram", "2GiB")
    assert "cannot be read: No such file" in refused(str(tmp_path / "none"), "--model", model, *MACHINE)
    assert "cannot be read" in refused(str(tmp_path / "none")), "and not which model it has"
    empty = tmp_path / "empty.lfr"
    assert "No such file" in refused(str(empty))
    empty.touch()
    assert "is no recording" in refused(str(empty))
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"timestamp": 0}')
    assert "line 1" in refused(str(wrong), "--model", model, *MACHINE)
    wrong.write_bytes(b"LAYERFLOW-RECORD" + bytes([1, 0, 0, 0, 9, 0, 0, 0]))
    assert "is cut" in refused(str(wrong), "--curve", "pool.size")
    wrong.write_bytes(b"\x93\xff")
    assert "cannot be read" in refused(str(wrong), "--model", model, *MACHINE)
