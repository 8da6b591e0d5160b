import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import types
from operator import attrgetter
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import layerflow
from layerflow.config.profiles import names
from layerflow.config.settings import Settings, reference
from layerflow.server.terms import terms_of
from layerflow_cli.commands import status
from layerflow_cli.commands.bench import MEASUREMENTS, module_of
from layerflow_cli.commands.config import STARTER_KEYS, setting_lines, starter_file
from layerflow_cli.main import app

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LAYERFLOW_")]:
        monkeypatch.delenv(name)


def invoke(*args: str):
    return CliRunner().invoke(app, list(args))


def refused(*args: str) -> list[str]:
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert all(line.startswith("layerflow: ") for line in lines), lines
    return lines


COMMANDS = [
    [],
    ["run"],
    ["proxy"],
    ["status"],
    ["purge"],
    ["record"],
    ["trace"],
    ["config"],
    ["plan"],
    ["simulate"],
    ["tune"],
    ["doctor"],
    ["demo"],
    ["bench"],
    ["bench", "all"],
]
COMMANDS += [["bench", name] for name in MEASUREMENTS]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_help_has_an_example(command):
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "Example" in result.stdout and "\n    layerflow " in result.stdout


def test_every_command_is_covered_above():
    top = typer.main.get_command(app)
    assert {name for name in top.commands if name not in {command[0] for command in COMMANDS if command}} == set()


def test_version_and_bare_command():
    assert invoke("--version").stdout == f"layerflow {layerflow.__version__}\n"
    assert "Commands:" in invoke().stdout and "overlap" in invoke("bench").stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["stauts"], "Did you mean 'status'?"),
        (["run", "--zz"], "--zz"),
        (["run", "--set", "pool.siz=1GiB"], "did you mean pool.size?"),
        (["run", "--set", "pool.size"], "write it as key=value"),
        (["run", "--set", "a=1", "--set", "a=2"], "given twice"),
        (["run", "--pool-size", "4X"], "pool.size = '4X' (set by a flag)"),
        (["run", "--config", "/nonexistent.toml"], "no such configuration file"),
        (["status", "--http", "ftp://x"], "http://host:port"),
        (["status", "--http", "http://127.0.0.1:1"], "is `layerflow run` up"),
        (["purge", "--endpoint", "ipc:///nonexistent/socket"], "/nonexistent/socket: there is no socket"),
        (["purge", "--tier"], "give --yes"),
        (["record"], "give -o FILE to record, or --info FILE"),
        (["record", "-o", "/tmp/x", "--for", "soon"], "write a time such as"),
        (["record", "-o", "/tmp/x", "--for", "0s"], "write a time such as"),
        (["record", "-o", "/tmp/x", "--max-bytes", "many"], "is not a size"),
        (["record", "--info", "/nonexistent.lfr"], "cannot be read: No such file"),
        (["record", "--info", __file__], "is no recording of layerflow"),
        (["tune"], "give a recording to find settings by, or --verify FILE"),
        (["tune", "x.lfr"], "Give it with --config"),
        (["tune", "--verify", "/nonexistent.toml"], "cannot be read: No such file"),
        (["tune", "--verify", __file__, "--for", "1y"], "write a time such as"),
        (["trace", "/nonexistent.lfr"], "cannot be read: No such file"),
        (["trace", "--last", "-5s"], "write a time such as"),
        (["status", "--http", "http://x", "--endpoint", "ipc:///x"], "give one"),
        (["status", "--http", "http://x:abc"], "http://x:abc/status: no answer"),
        (["status", "--watch", "--interval-s", "nan"], "--interval-s"),
        (["status", "--watch", "--interval-s", "inf"], "--interval-s"),
        (["plan", "--traffic", "nan"], "--traffic"),
        (["bench", "overlap", "--compute-ms", "inf"], "--compute-ms: inf is no number"),
        (["config", "--check", "/x", "--set", "pool.size=nonsense"], "--set: only --effective"),
        (["config", "--starter", "--config", "/x"], "-c: only --effective"),
        (["config", "--profile", "ascend", "--json"], "--json: --markdown, --starter, --profile and --check print no"),
        (["config", "--set", "pool.size=1GiB"], "--set: only --effective"),
    ],
)
def test_refusals_are_one_line_and_exit_code_2(args, words):
    (line,) = refused(*args)
    assert words in line


def test_several_problems_are_a_line_each():
    assert len(refused("run", "--pool-size", "4X", "--http-port", "99999", "--link-gbps", "-1")) == 3


def test_config_check(tmp_path):
    path = tmp_path / "layerflow.toml"
    path.write_text('[pool]\nsize = "2GiB"\n')
    assert invoke("config", "--check", str(path)).stdout == f"{path}: good\n"
    path.write_text("[pool]\nsise = 2\nwarn = true\n")
    assert len(refused("config", "--check", str(path))) == 2


def test_config_listings_agree():
    rows = json.loads(invoke("config", "--json").stdout)
    table = invoke("config").stdout
    assert {"transfer.prefetch_layers", "server.http_port", "log.level"} <= {row["key"] for row in rows}
    assert all(row["key"] in table for row in rows)


def test_config_lists_a_section_a_key_or_what_is_live():
    def keys(*args: str) -> set[str]:
        return {row["key"] for row in json.loads(invoke("config", *args, "--json").stdout)}

    assert {key.partition(".")[0] for key in keys("transfer")} == {"transfer"}
    assert "pool.disk.path" in keys("pool") and keys("[log]") == keys("log")
    assert keys("pool.size") == {"pool.size"}
    assert keys("log", "--live") == {"log.level", "log.slow_step_ms"}
    assert "pool.size" not in invoke("config", "--effective", "transfer").stdout
    assert refused("config", "trasnfer") == [
        "layerflow: trasnfer is no section and no key of the settings; did you mean transfer?"
    ]
    assert "SECTION" in refused("config", "transfer", "--starter")[0]


@pytest.mark.parametrize("width", [80, 120, 160])
def test_a_setting_fits_the_screen(width):
    lines = setting_lines("transfer.mode", '"auto"', "a | b, live", "How it is. " * 12, width=width)
    assert lines[0] == 'transfer.mode = "auto"'.ljust(width - 11) + "a | b, live"
    assert " ".join(line.strip() for line in lines[1:]) == ("How it is. " * 12).strip()
    for row in reference():
        lines = setting_lines(row.key, row.default, row.type, row.description, width=width)
        assert max(map(len, lines)) <= width
        assert "".join(lines).replace(" ", "").startswith(f"{row.key}={row.default}".replace(" ", ""))


def test_the_configuration_document_is_up_to_date():
    written = (ROOT / "docs" / "configuration.md").read_text()
    assert written == invoke("config", "--markdown").stdout, "run: layerflow config --markdown > docs/configuration.md"


STATUS = {
    "version": "9.9",
    "pid": 4,
    "uptime_s": 3700.0,
    "healthy": True,
    "endpoint": "ipc:///x/control",
    "link_emulated": True,
    "sessions": [{"session": 1, "engine": "decoder", "pid": 77, "heard_s_ago": 0.25}],
    "limits": {"max_transfer_bytes": 64 << 20, "prefetch_layers": 3},
    "pool": {"capacity_bytes": 1 << 30, "used_bytes": 1 << 28, "hits": 3, "misses": 1},
    "flow": {"loaded_bytes": 5 << 20, "late_reports": 12},
    "figures": {
        "overlap": {"load": 0.955},
        "lookup_hit_ratio": 0.5,
        "loop_lag_seconds_sum": 0.002,
        "loop_lag_seconds_count": 10.0,
    },
}


@pytest.fixture
def fake_server(monkeypatch):
    monkeypatch.setattr(status, "TIMEOUT_S", 60.0)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/status" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(STATUS).encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def rows_of(output: str) -> dict[str, list[str]]:
    """The cells of each table row, by its first cell."""
    lines = [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in output.splitlines() if "│" in line]
    return {cells[0]: cells[1:] for cells in lines}


def test_status_over_http(fake_server):
    result = invoke("status", "--http", fake_server)
    assert result.exit_code == 0, result.output
    assert "layerflow 9.9, pid 4, up 1 h 1 min, healthy, emulated link" in result.stdout
    assert "ipc:///x/control" in result.stdout and "decoder" not in result.stdout
    everything = rows_of(invoke("status", "--http", fake_server, "--all").stdout)
    assert everything["engine"] == ["decoder"]
    assert everything["late_reports"][0] == "12"
    assert everything["max_transfer_bytes"] == ["64", "MiB"]


def test_status_as_json(fake_server):
    assert json.loads(invoke("status", "--http", fake_server + "/status", "--json").stdout) == STATUS


@pytest.fixture
def endpoints(tmp_path):
    """Control sockets of two servers, at which nothing answers."""
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
        for name, server in (("one", one), ("two", two)):
            server.bind(str(tmp_path / name))
            server.listen(8)
        yield [f"ipc://{tmp_path}/one", f"ipc://{tmp_path}/two"]


def test_status_over_the_control_socket(monkeypatch, endpoints):
    asked = []
    observer = types.ModuleType("layerflow.agent.observer")
    observer.fetch_status = lambda endpoint, timeout_s: asked.append(endpoint) or STATUS
    monkeypatch.setitem(sys.modules, "layerflow.agent.observer", observer)
    monkeypatch.setenv("LAYERFLOW_SERVER__ENDPOINT", endpoints[0])
    assert json.loads(invoke("status", "--json").stdout) == STATUS
    assert json.loads(invoke("status", "--endpoint", endpoints[1], "--json").stdout) == STATUS
    assert asked == endpoints


@pytest.mark.parametrize(
    ("options", "reason", "code", "words"),
    [
        ([], "", 0, "7 objects forgotten in the arena, 2 on their way given up"),
        (["--tier", "--yes"], "", 0, "3 removed from disk"),
        (["--tier", "--yes"], "it did not answer", 2, "3 removed from disk"),
    ],
)
def test_purge(monkeypatch, tmp_path, endpoints, options, reason, code, words):
    told = {"purged": 7, "revoked": 2}
    if options:
        told["tier"] = {"backend": "disk", "purged": 3, "reason": reason}

    class Control:
        def __init__(self, endpoint, engine):
            assert endpoint == endpoints[0]

        def empty(self, *, tier):
            assert tier == bool(options)
            return told

        def close(self):
            pass

    control = types.ModuleType("layerflow.agent.control")
    control.Control = Control
    monkeypatch.setitem(sys.modules, "layerflow.agent", types.ModuleType("layerflow.agent"))
    monkeypatch.setitem(sys.modules, "layerflow.agent.control", control)
    monkeypatch.setenv("LAYERFLOW_SERVER__ENDPOINT", endpoints[0])
    for form in ([], ["--json"], ["--json", str(tmp_path / "told")]):
        result = invoke("purge", *options, *form)
        assert result.exit_code == code, result.output
        assert len(result.stderr.splitlines()) == bool(reason)
        match len(form):
            case 0:
                assert words in result.stdout
            case 1:
                assert json.loads(result.stdout) == told
            case 2:
                assert json.loads((tmp_path / "told").read_text()) == told


@pytest.fixture
def measured(monkeypatch):
    """Every measurement replaced by one that notes its arguments."""
    calls: list[tuple[str, dict]] = []

    def fake(name: str) -> types.ModuleType:
        def measure(
            layers=60,
            compute_ms=838.0,
            transfer_ms=167.0,
            compute="sleep",
            runs=5,
            sizes=(1, 2),
            warm=True,
            shape="full",
            device="cpu",
        ):
            given = {"layers": layers, "compute_ms": compute_ms, "transfer_ms": transfer_ms, "compute": compute}
            given |= {"shape": shape, "device": device}
            calls.append((name, {**given, "runs": runs, "sizes": sizes, "warm": warm}))
            return {"wall_ms": 12.5, "load": {"overlap": 0.5, "moved_bytes": 2048}}

        module = types.ModuleType(name)
        module.measure = measure
        return module

    for name in MEASUREMENTS:
        monkeypatch.setitem(sys.modules, module_of(name), fake(name))
    return calls


def test_bench_overlap_passes_its_options(measured, tmp_path):
    target = tmp_path / "overlap.json"
    result = invoke(
        *["bench", "overlap", "--layers", "4", "--compute-ms", "8", "--transfer-ms", "2", "--compute", "matmul"],
        *["--set", "runs=2", "--json", str(target)],
    )
    assert result.exit_code == 0, result.output
    ((name, given),) = measured
    assert name == "overlap"
    assert given["runs"] == 2 and given["compute"] == "matmul" and given["transfer_ms"] == 2.0
    assert rows_of(result.stdout)["overlap"] == ["50.0", "%"]
    assert rows_of(result.stdout)["moved_bytes"] == ["2", "KiB"]
    assert json.loads(target.read_text()) == {"wall_ms": 12.5, "load": {"overlap": 0.5, "moved_bytes": 2048}}


def test_bench_arguments_take_the_type_of_their_default(measured):
    assert invoke("bench", "engine-cost", "--set", "sizes=3, 4", "--set", "warm=false").exit_code == 0
    assert measured[0][1]["sizes"] == (3, 4) and measured[0][1]["warm"] is False
    assert "there are: layers, compute_ms" in refused("bench", "copy", "--set", "laiers=3")[0]
    assert "should be like 60" in refused("bench", "copy", "--set", "layers=x")[0]


def test_bench_all_goes_on_after_a_failure(measured, monkeypatch, tmp_path):
    def fail() -> dict:
        raise layerflow.errors.Unsupported("no device")

    monkeypatch.setattr(sys.modules["layerflow_cli.bench.transfer.copy"], "measure", fail)
    target = tmp_path / "bench.json"
    result = invoke("bench", "all", "--json", str(target))
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "layerflow: bench copy: no device",
        "layerflow: measurements failed: copy; the others are complete",
    ]
    assert list(json.loads(target.read_text())) == [name for name in MEASUREMENTS if name != "copy"]


def ends_well(code: str) -> None:
    """A process of its own that runs this Python has nothing to say against it."""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_help_and_config_load_no_torch():
    code = (
        "import sys\nfrom layerflow_cli.main import app\n"
        "for line in ('--help', 'run --help', 'config', 'config --markdown', 'doctor --help', 'proxy --help',\n"
        "             'bench copy --help'):\n"
        "    try: app(line.split())\n"
        "    except SystemExit as end: assert not end.code, end.code\n"
        "sys.exit(','.join({'torch', 'zmq', 'numpy'} & set(sys.modules)) or None)\n"
    )
    ends_well(code)


def test_what_asks_a_server_needs_no_torch():
    """``status`` and ``purge`` work where only the server is installed, and do not wait for torch where it is."""
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "from layerflow.agent.control import Control\n"
        "from layerflow_cli.commands.status import endpoint_of\n"
        "assert endpoint_of(None, None).startswith('ipc://')\n"
        "from layerflow.agent.observer import fetch_status\n"
        "heavy = ('layerflow.device', 'layerflow.flow')\n"
        "sys.exit(','.join(name for name in sys.modules if name.startswith(heavy)) or None)\n"
    )
    ends_well(code)


def test_json_is_one_option_everywhere(fake_server, tmp_path):
    """``--json FILE`` also writes it there; without FILE it is printed, and nothing else is."""
    target = tmp_path / "status.json"
    beside = invoke("status", "--http", fake_server, "--json", str(target)).stdout
    assert beside and beside == invoke("status", "--http", fake_server).stdout
    assert json.loads(target.read_text()) == STATUS
    assert json.loads(invoke("status", "--json", "--http", fake_server).stdout) == STATUS
    rows = json.loads(invoke("config", "--json", "-").stdout)
    assert {"key", "default", "description"} <= rows[0].keys()
    refused = invoke("status", "--watch", "--http", fake_server, "--json", str(target))
    assert refused.exit_code == 2 and "--json" in refused.stderr


def test_the_starter_file_changes_nothing(tmp_path):
    path = tmp_path / "layerflow.toml"
    path.write_text(invoke("config", "--starter").stdout)
    assert Settings.load(path) == Settings()
    first = [row for row in reference() if row.key in STARTER_KEYS]
    assert len(first) == len(STARTER_KEYS) == 15
    assert path.read_text().startswith(starter_file(first))
    assert f"The other {len(reference()) - 15} settings" in path.read_text().splitlines()[-1]


@pytest.mark.parametrize("name", names())
def test_a_profile_is_a_short_file_with_a_reason_for_each_line(tmp_path, name):
    path = tmp_path / "layerflow.toml"
    path.write_text(invoke("config", "--profile", name).stdout)
    settings, lines = Settings.load(path), path.read_text().splitlines()
    assert settings != Settings() and max(map(len, lines)) <= 120
    keys = [line for line in lines if " = " in line and not line.startswith("#")]
    assert 10 <= len(keys) <= 16
    for line in keys:
        assert len(line.partition("  # ")[2]) > 20, line
    # Each of the workers that the comment speaks of has the window that it says.
    if told := next((line for line in keys if line.startswith("max_inflight_bytes")), ""):
        workers = int(told.partition("over ")[2].partition(" workers")[0])
        assert terms_of(settings, workers).window_bytes == 32 << 20 and "32 MiB" in told


def test_the_profiles_that_are_promised_are_there():
    assert names() == ["ascend", "disk-heavy", "pd", "vllm-8gpu"]
    assert refused("config", "--profile", "gpu") == [
        "layerflow: --profile gpu: no such profile; there are ascend, disk-heavy, pd, vllm-8gpu"
    ]
    assert "SECTION" in refused("config", "transfer", "--profile", "pd")[0]


def test_effective_settings_say_what_set_them(tmp_path, monkeypatch):
    path = tmp_path / "layerflow.toml"
    path.write_text('[pool]\nsize = "3GiB"\n[server]\ncurve_secret_key_file = "/run/secret"\n')
    monkeypatch.setenv("LAYERFLOW_TRANSFER__MODE", "bulk")
    flags = ["--config", str(path), "--set", "transfer.prefetch_layers=2"]
    found = json.loads(invoke("config", "--effective", *flags, "--json").stdout)
    assert found["pool.size"] == {"value": "3GiB", "set_by": str(path)}
    assert found["transfer.mode"] == {"value": "bulk", "set_by": "LAYERFLOW_TRANSFER__MODE"}
    assert found["transfer.prefetch_layers"] == {"value": "2", "set_by": "a flag"}
    assert found["server.curve_secret_key_file"]["value"] == "***"
    assert found["log.level"] == {"value": "info", "set_by": ""}
    assert "LAYERFLOW_TRANSFER__MODE" in invoke("config", "--effective").stdout
    assert invoke("config", "--effective", "--starter").exit_code == 2


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--backend", "mooncake"], "pool.backend", "mooncake"),
        (["--disk-path", "/var/lib/kv"], "pool.disk.path", "/var/lib/kv"),
        (["--log-level", "debug"], "log.level", "debug"),
        (["--http-host", "::1", "--http-port", "0"], "server.http_host", "::1"),
        (["--pool-size", "2GiB"], "pool.size", 2 << 30),
    ],
)
def test_flags_of_run_are_settings(monkeypatch, flags, key, value):
    served = []
    monkeypatch.setattr("layerflow.observe.logs.configure", lambda *_: None)
    monkeypatch.setattr("anyio.run", lambda _, settings, *__: served.append(settings))
    assert invoke("run", *flags).exit_code == 0
    assert attrgetter(key)(served[0]) == value


@pytest.mark.parametrize("command", [("demo", "--quick"), ("bench", "overlap")])
@pytest.mark.parametrize("device", ["tpu", "npu:x", "cuda:99"])
def test_a_device_that_is_not_there_is_one_readable_line(command, device):
    result = invoke(*command, "--device", device)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("layerflow: device ")


@pytest.mark.parametrize("command", [["status"], ["status", "--watch"], ["purge"], ["record", "-o", "x"], ["trace"]])
@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("ipc:///run/$USER/control", "$ is not replaced"),
        ("ipc://run/control", "is relative"),
        ("tcp://10.0.0.1:1", "asked with --http"),
        ("ipc:///nonexistent/control", "there is no socket"),
    ],
)
def test_an_endpoint_where_no_server_can_be_is_refused_at_once(command, endpoint, words):
    (line,) = refused(*command, "--endpoint", endpoint)
    assert words in line
