"""``layerflow plan``: a file that loads, a reason behind each line, and the figures above it."""

import json
import os
import re
from functools import partial

import command_lines
import pytest

from layerflow.config.settings import Settings
from layerflow.flow.cost import LinkCost
from layerflow.server.terms import terms_of
from layerflow.sizing import capacity_of, race, shape_of
from layerflow.sizing.break_even import compute_cost
from layerflow.system.descriptors import FLOOR
from sizing.models import FILE, MODELS


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("LAYERFLOW_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def model(tmp_path):
    """Write a model's config.json and name its folder."""

    def write(name, **changed):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(MODELS[name] | changed))
        return str(folder)

    return write


plan = partial(command_lines.run, "plan")
refused = partial(command_lines.refused, "plan")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("more", [[], ["--tp", "8", "--link", "25GB/s"]], ids=["alone", "tp8"])
def test_the_file_loads_and_each_line_has_its_figure(model, tmp_path, name, more):
    result = plan("--model", model(name), "--ram", "1TiB", *more)
    assert result.exit_code == 0, result.output
    path = tmp_path / "layerflow.toml"
    path.write_text(result.stdout)
    settings = Settings.load(path)
    assert settings.pool.size == 1 << 40
    lines = [line for line in result.stdout.splitlines() if " = " in line and not line.startswith("#")]
    assert 10 <= len(lines) <= 15
    for line in lines:
        reason = line.partition("  # ")[2]
        assert reason, line
        assert re.search(r"\d", reason) or "default" in reason or "own" in reason, line


def test_the_figures_are_those_of_the_settings_that_it_prints(model, tmp_path):
    """Shares and limits come from what the server itself computes with."""
    found = tmp_path / "plan.json"
    arguments = ["--model", model("Qwen3-235B-A22B"), "--tp", "8", "--ram", "1TiB", "--link", "25GB/s"]
    arguments += ["--flops", "400e12", "--active-params", "22e9", "--traffic", "5000"]
    assert plan(*arguments, "--json", str(found)).exit_code == 0
    told = json.loads(found.read_text())
    path = tmp_path / "layerflow.toml"
    path.write_text(plan(*arguments).stdout)
    settings = Settings.load(path)
    assert told["window_bytes"] == terms_of(settings, 8).window_bytes
    assert told["memlock_bytes"] == settings.pool.size
    assert told["descriptors"] > FLOOR + 3 * settings.server.max_sessions
    assert told["token_bytes"] == pytest.approx(188 * 1024, rel=1e-3)
    assert told["arena"]["hours"] == pytest.approx(told["arena"]["tokens"] / 5000 / 3600)
    assert 0.93 < told["arena"]["prompts"] / ((1 << 40) // told["prompt"]["bytes"]) <= 1
    values = {f"{line['section']}.{line['key']}": line["value"] for line in told["settings"]}
    assert values["pool.size"] == "1TiB" and Settings.load(None, values) == settings


def test_the_header_names_what_the_cache_takes(model):
    result = plan("--model", model("Llama-3.1-8B"), "--link", "25GB/s", "--layer-us", "10")
    header = [line for line in result.stdout.splitlines() if line.startswith("#")]
    assert max(map(len, header)) <= 80
    text = "\n".join(header)
    for words in ("128 KiB a token", "32 full, k + v", "Loading is quicker", "ulimit -l", "ulimit -n"):
        assert words in text


def test_the_header_says_which_dtypes_were_taken(model):
    quantization = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
    result = plan("--model", model("Llama-3.1-8B", torch_dtype="float32", quantization_config=quantization))
    header = [line for line in result.stdout.splitlines() if line.startswith("#")]
    text = " ".join(line[2:] for line in header)
    assert "64 KiB a token" in text and "--dtype float32" in text and "give --kv-dtype" in text
    assert max(map(len, header)) <= 80


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "gpt-oss-120b", "Qwen3-Next-80B-A3B"])
@pytest.mark.parametrize("latency", [0.0, 0.005, 0.2])
def test_a_load_is_quicker_from_the_break_even_length_on(name, latency):
    capacity = capacity_of(shape_of(MODELS[name]), block_tokens=16)
    link, compute = LinkCost(2e9, latency), compute_cost(capacity, 200e12, 8e9)
    found = race(capacity, link, compute, 1 << 20, 64 << 20)
    assert found.tokens

    def quicker(tokens):
        times = race(capacity, link, compute, tokens, 64 << 20).longest
        return min(times.layerwise, times.bulk) < times.recompute

    chunk = capacity.chunk_tokens
    assert quicker(found.tokens) and quicker(4 * found.tokens)
    assert found.tokens == chunk or not quicker(found.tokens - chunk)


def test_a_link_that_is_too_slow_never_pays():
    capacity = capacity_of(shape_of(MODELS["Llama-3.1-8B"]), block_tokens=16)
    found = race(capacity, LinkCost(1e6, 0.0), compute_cost(capacity, 400e12, 8e9), 4096, 64 << 20)
    assert found.tokens is None and found.longest.recompute < found.longest.layerwise


def test_a_deep_prompt_raises_the_servers_limits(model):
    """A step of a million tokens of V4 has more objects than the default admits."""
    result = plan("--model", model("DeepSeek-V4-Flash"), "--ram", "8TiB", "--prompt", "2M")
    assert "max_step_objects = " in result.stdout


def test_the_compressor_states_that_are_read(model):
    few = plan("--table", str(FILE), "--ram", "1TiB", "--compressor-states", "read").stdout
    (v4,) = [line for line in few.splitlines() if "DeepSeek-V4-Flash" in line]
    folder = model("DeepSeek-V4-Flash")
    planned, usual = (
        " ".join(plan("--model", folder, *more).stdout.replace("#", "").split())
        for more in (("--compressor-states", "read"), ())
    )
    assert "set compressor_states to" in planned and "21 sliding, window 4, state" in planned
    assert "--compressor-states read plans for that" in usual
    assert "21 sliding, window 4, state" in v4 and "20 sliding, window 128, state" not in v4 and "| 19.3 KiB |" in v4


def test_the_table_of_the_documentation():
    result = plan("--table", str(FILE), "--ram", "1TiB")
    rows = [line for line in result.stdout.splitlines() if line.startswith("| [")]
    assert result.exit_code == 0 and len(rows) == len(MODELS) == 10
    assert all("huggingface.co" in row for row in rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ram", "1GiB"], "does not hold two prompts of 32,768 tokens"),
        (["--tp", "3"], "cannot be spread over --tp 3"),
        (["--flops", "1e12"], "--flops and --active-params belong together"),
        (["--flops", "1e12", "--active-params", "8e9"], "give --link"),
        (["--link", "25GB/s", "--layer-us", "3", "--flops", "1e12"], "give one"),
        (["--link", "25GB/h"], "write bytes a second"),
        (["--link", "25Gb/s"], "so many bits are 3.125GB/s"),
        (["--link", "400gb/s"], "bits or bytes? Write GB/s"),
        (["--link", "100Gib/s"], "12.5GiB/s"),
        (["--link", "25Gbit/s"], "3.125GB/s"),
        (["--link", "1B/s"], "a link moves 1MB to 1PB in a second"),
        (["--link", "0"], "a link moves"),
        (["--link", "1MB/s"], "--link: all of a prompt of 32,768 tokens takes 4.29e+03 s of it"),
        (["--engines", "1024", "--tp", "8"], "8,192 workers (--engines x --tp x --pp): one server has 2,048 at most"),
        (["--tp", "100000"], "--tp"),
        (["--engines", "1000000"], "--engines"),
        (["--traffic", "inf"], "--traffic"),
        (["--traffic", "1e-300"], "--traffic"),
        (["--link", "quick"], "is not a size"),
        (["--ram", "a lot"], "is not a size"),
        (["--prompt", "0"], "at least one token"),
        (["--kv-dtype", "fp3"], "is no dtype of a cache"),
        (["--chunk-tokens", "100"], "not a multiple of"),
        (["--compressor-states", "none"], "--compressor-states none: should be all or read"),
        (["--compressor-states", "read"], "--compressor-states: a model of type llama has no compressor states"),
        (["--ram", "64"], "--ram 64: 64 bytes? Write the unit, e.g. 64GiB"),
        (["--ram", "9GiB", "--prompt", "40k"], "does not hold two prompts of 40,960 tokens"),
        (["--table", "models.json"], "give a model's folder with --model, or"),
    ],
)
def test_wrong_input_is_one_line(model, arguments, words):
    assert words in refused("--model", model("Llama-3.1-8B"), *arguments)


def test_nothing_to_plan_is_one_line(tmp_path):
    assert "give a model's folder" in refused()
    assert "No such file" in refused("--model", str(tmp_path))
    (tmp_path / "models.json").write_text('{"a": 1}')
    assert '"config"' in refused("--table", str(tmp_path / "models.json"))
    (tmp_path / "models.json").write_text('{"a": {"config": [1]}}')
    assert '"config"' in refused("--table", str(tmp_path / "models.json"))
    (tmp_path / "models.json").write_text("[" * 100_000)
    assert "cannot be read" in refused("--table", str(tmp_path / "models.json"))
    assert "--json: --table prints Markdown, and no file; leave it out" in refused("--table", str(FILE), "--json", "-")
