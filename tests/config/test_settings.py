import os
from operator import attrgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerflow.config.pool import default_pool_bytes
from layerflow.config.settings import (
    Settings,
    format_size,
    live_changes,
    make_private_directory,
    parse_size,
    reference,
)
from layerflow.endpoint import default_endpoint
from layerflow.errors import ConfigError


def test_precedence_flags_environment_file_defaults(toml, monkeypatch):
    path = toml("[transfer]\nprefetch_layers = 1\nmax_transfer_blocks = 11\nh2d_stagger_us = 5\n")
    monkeypatch.setenv("LAYERFLOW_TRANSFER__PREFETCH_LAYERS", "2")
    monkeypatch.setenv("LAYERFLOW_TRANSFER__MAX_TRANSFER_BLOCKS", "22")
    transfer = Settings.load(path, {"transfer.prefetch_layers": 3, "transfer.mode": None}).transfer
    assert (transfer.prefetch_layers, transfer.max_transfer_blocks, transfer.h2d_stagger_us) == (3, 22, 5)
    assert (transfer.mode, transfer.step_timeout_ms) == ("auto", 5000)


def test_overrides_may_be_nested():
    assert Settings.load(None, {"pool": {"size": "2GiB"}, "pool.warm": "false"}).pool.size == 2 << 30


@pytest.mark.parametrize("table", ["", "[transfer]\n"])
def test_names_of_the_source_systems(toml, table):
    text = (
        "layerwise_prefetch_layers = 3\nlayerwise_max_transfer_blocks = 64\nlayerwise_max_transfer_bytes = 1048576\n"
        'h2d_stagger_us = 7\ndiscard_partial_chunks = true\nuse_layerwise = false\nbackend = "memory"\n'
    )
    settings = Settings.load(toml(table + text), {})
    transfer = settings.transfer
    assert (transfer.prefetch_layers, transfer.max_transfer_blocks, transfer.max_transfer_bytes) == (3, 64, 1 << 20)
    assert (transfer.h2d_stagger_us, transfer.discard_partial_chunks, transfer.mode) == (7, True, "bulk")
    assert settings.pool.backend == "memory"


def test_a_flag_beats_an_alias_in_the_file(toml):
    path = toml("layerwise_prefetch_layers = 3\nuse_layerwise = false\n")
    transfer = Settings.load(path, {"transfer.prefetch_layers": 9, "use_layerwise": "true"}).transfer
    assert (transfer.prefetch_layers, transfer.mode) == (9, "layerwise")


def test_an_alias_beside_its_setting_is_refused(toml, refusal):
    (line,) = refusal(toml("[transfer]\nprefetch_layers = 1\nlayerwise_prefetch_layers = 2\n"))
    assert "transfer.layerwise_prefetch_layers and transfer.prefetch_layers are the same setting" in line


@pytest.mark.parametrize(("switch", "mode"), [("true", "bulk"), ("true", "auto"), ("false", "layerwise")])
def test_use_layerwise_must_not_contradict_mode(toml, refusal, switch, mode):
    (line,) = refusal(toml(f'[transfer]\nuse_layerwise = {switch}\nmode = "{mode}"\n'))
    assert "contradicts transfer.mode" in line


def test_use_layerwise_leaves_a_chosen_mode(toml):
    path = toml('[transfer]\nuse_layerwise = true\nmode = "layerwise"\n')
    assert Settings.load(path, {}).transfer.mode == "layerwise"


@pytest.mark.parametrize(
    ("text", "place", "hint"),
    [
        ("[transfer]\nprefetch_layer = 1\n", "transfer.prefetch_layer ", "transfer.prefetch_layers"),
        ("[pool]\nprefetch_layers = 1\n", "pool.prefetch_layers ", "transfer.prefetch_layers"),
        ("[server]\nlayerwise_prefetch_layers = 1\n", "server.layerwise", "transfer.prefetch_layers"),
        ("http_prot = 1\n", "http_prot ", "server.http_port"),
        ("[transfers]\nmode = 'auto'\n", "transfers ", "transfer"),
        ("zzz = 1\n", "zzz ", "`layerflow config`"),
    ],
)
def test_an_unknown_key_names_the_closest(toml, refusal, text, place, hint):
    path = toml(text)
    (line,) = refusal(path)
    assert line.startswith(f"{path}: {place}")
    assert hint in line.split("; ")[1]


def test_unknown_environment_variables(refusal, monkeypatch):
    monkeypatch.setenv("LAYERFLOW_PORT", "tcp://10.0.0.1:9464")  # Kubernetes, for a service named layerflow
    Settings.load()
    monkeypatch.setenv("LAYERFLOW_POOL__SIZ", "1GiB")
    assert "did you mean pool.size?" in refusal()[0]
    monkeypatch.delenv("LAYERFLOW_POOL__SIZ")
    monkeypatch.setenv("LAYERFLOW_POOOL__SIZE", "1GiB")
    assert refusal()[0].startswith("LAYERFLOW_POOOL__SIZE: ")
    monkeypatch.delenv("LAYERFLOW_POOOL__SIZE")
    monkeypatch.setenv("LAYERFLOW_POOL", "1GiB")
    assert "LAYERFLOW_POOL__KEY" in refusal()[0]


def test_every_problem_is_one_line_with_its_origin(toml, refusal, monkeypatch):
    monkeypatch.setenv("LAYERFLOW_TRANSFER__PREFETCH_LAYERS", "-4")
    path = toml('[pool]\nsize = "3X"\nwarm = "perhaps"\n[transfer]\nmode = "fast"\nstep_timeout_ms = true\n')
    lines = refusal(path, {"server.http_port": 70_000})
    assert len(lines) == 6
    problems = {line.split(" ", 1)[0]: line for line in lines}
    assert f"set by {path}" in problems["pool.size"] and "not a size" in problems["pool.size"]
    assert "true or false" in problems["pool.warm"]
    assert "'layerwise'" in problems["transfer.mode"]
    assert "not a number" in problems["transfer.step_timeout_ms"]
    assert "set by LAYERFLOW_TRANSFER__PREFETCH_LAYERS" in problems["transfer.prefetch_layers"]
    assert "set by a flag" in problems["server.http_port"] and "65535" in problems["server.http_port"]


@pytest.mark.parametrize(
    ("written", "backend"),
    [("memory", "memory"), ("Mooncake", "mooncake"), ("memcache", "memcache"), ("memcache_hybrid", "memcache")],
)
def test_backends_by_every_name(toml, written, backend):
    assert Settings.load(toml(f'backend = "{written}"\n'), {}).pool.backend == backend


def test_another_backend_is_refused_with_those_there_are(toml, refusal):
    (line,) = refusal(toml('backend = "yuanrong"\n'))
    assert "pool.backend = 'yuanrong'" in line and "memory, disk, memcache, mooncake, redis" in line


def test_lookup_rpc_port_is_refused_with_a_sentence(toml, refusal):
    (line,) = refusal(toml("[transfer]\nlookup_rpc_port = 5555\n"))
    assert "the server's server.endpoint" in line


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"server.endpoint": "tcp://*:1"}, "server.tcp_endpoint"),
        ({"server.endpoint": "ipc:///" + "x" * 101}, "at most 100 bytes"),
        ({"server.tcp_endpoint": "tcp://*"}, "tcp://address:port"),
        ({"server.tcp_endpoint": "tcp://*:5555"}, "curve_allowed_keys_file"),
        ({"server.heartbeat_ms": 1500}, "at least twice"),
        ({"transfer.max_inflight_bytes": "100MiB"}, "at least twice"),
        ({"pool": 3}, "[pool]"),
    ],
)
def test_contradictions_are_refused(refusal, overrides, words):
    assert words in "\n".join(refusal(None, overrides))


def test_files_that_cannot_be_used(toml, refusal, tmp_path):
    assert "no such configuration file" in refusal(tmp_path / "absent.toml")[0]
    assert "is no file" in refusal(tmp_path)[0]
    assert "not valid TOML" in refusal(toml("[pool\n"))[0]
    for text in (f"[transfer]\nprefetch_layers = {'9' * 5000}\n", f"x = {'[' * 2000}\n"):
        assert "not valid TOML" in refusal(toml(text))[0]


def test_of_many_unknown_keys_the_first_are_told(toml, refusal):
    told = refusal(toml("".join(f"a{number} = 1\n" for number in range(1000))))
    assert len(told) == 100


def test_constructor_takes_only_what_it_is_given(monkeypatch):
    monkeypatch.setenv("LAYERFLOW_POOL__SIZE", "3GiB")
    assert Settings().pool.size == default_pool_bytes()
    assert Settings.load().pool.size == 3 << 30
    with pytest.raises(ConfigError, match=r"did you mean pool\.size"):
        Settings(pool={"sise": 1})


def test_settings_are_frozen_and_mask_secrets():
    settings = Settings(server={"curve_secret_key_file": "/keys/private"})
    assert "/keys/private" not in repr(settings) and "***" in repr(settings)
    with pytest.raises(ValueError, match="frozen"):
        settings.pool.size = 5


def test_live_changes_lists_new_values():
    old, new = Settings(), Settings(transfer={"mode": "bulk", "prefetch_layers": 2}, log={"level": "debug"})
    assert live_changes(old, new) == {"transfer.mode": "bulk", "transfer.prefetch_layers": 2, "log.level": "debug"}
    assert live_changes(old, Settings()) == {}


def test_changes_that_need_a_restart_are_named_without_secrets():
    new = Settings(pool={"size": "2GiB"}, server={"curve_secret_key_file": "/keys/private"}, transfer={"mode": "bulk"})
    with pytest.raises(ConfigError) as caught:
        live_changes(Settings(), new)
    assert f"pool.size ({format_size(default_pool_bytes())} -> 2GiB)" in str(caught.value)
    assert "server.curve_secret_key_file (***" in str(caught.value) and "/keys/private" not in str(caught.value)
    assert "transfer.mode" not in str(caught.value)


def test_every_transfer_key_is_live_and_the_reference_is_complete():
    rows = {row.key: row for row in reference()}
    live = {key for key, row in rows.items() if row.live}
    others = {"log.level", "log.slow_step_ms", "server.max_client_bytes", "server.max_clients_bytes"}
    others.add("server.max_described_bytes")
    assert live == {key for key in rows if key.startswith(("transfer.", "pd.", "record."))} | others
    assert all(row.description.endswith(".") and row.default for row in rows.values())
    assert "of this machine's memory" in rows["pool.size"].default and rows["pool.size"].type == "size"
    assert rows["transfer.step_timeout_ms"].env == "LAYERFLOW_TRANSFER__STEP_TIMEOUT_MS"
    numbers = [row for row in rows.values() if row.type in ("integer", "number", "size")]
    names = ("server.http_port", "pool.mooncake.port", "pool.memcache.device_id", "proxy.port")
    assert all(row.unit or row.key in names for row in numbers)


def test_every_environment_variable_of_the_reference_works(monkeypatch):
    for row in reference():
        with monkeypatch.context() as context:
            context.setenv(row.env, "nonsense")
            try:
                loaded = Settings.load()
            except ConfigError as error:
                assert row.env in str(error)
            else:
                assert str(attrgetter(row.key)(loaded)) == "nonsense"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (7, 7),
        ("7", 7),
        ("512MiB", 512 << 20),
        ("4 GiB", 4 << 30),
        ("10GB", 10**10),
        ("4Gi", 4 << 30),
        ("16G", 16 << 30),
        ("512m", 512 << 20),
        ("1.5Ti", 3 << 39),
        ("64 k", 64 << 10),
        ("1.5kib", 1536),
        ("3b", 3),
        ("1048576TiB", 1 << 60),
    ],
)
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4X",
        "4iB",
        "-1",
        -1,
        True,
        "1.5",
        "0.3KiB",
        "GiB",
        "1e9",
        "4 GiB x",
        1.5,
        None,
        "1048577TiB",
        (1 << 60) + 1,
        "9" * 30,
    ],
)
def test_what_is_not_a_size(text):
    with pytest.raises(ConfigError):
        parse_size(text)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_sizes_survive_formatting(nbytes):
    assert parse_size(format_size(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("server.http_host", "a..b"),
        ("server.http_host", f"{'x' * 64}.de"),
        ("server.http_host", "a b"),
        ("server.http_host", "a\0b"),
        ("proxy.host", "a..b"),
        ("server.tcp_endpoint", "tcp://a..b:9470"),
        ("server.tcp_endpoint", "tcp://0.0.0.0:70000"),
        ("server.tcp_endpoint", f"tcp://0.0.0.0:{'9' * 5000}"),
        ("peers.link_address", "a..b:1"),
        ("peers.link_address", f"a:{'9' * 5000}"),
        ("peers.link_advertise", "a..b:1"),
    ],
    ids=lambda text: text[:24],
)
def test_hosts_and_ports_that_can_be_none(refusal, key, value):
    """Sockets would take the port modulo 65,536, and a look-up of the host fail as by a bug."""
    curve = {"server.curve_secret_key_file": "/x", "server.curve_allowed_keys_file": "/y"}
    (told,) = refusal(None, {**curve, key: value})
    assert key in told and ("is no host" in told or "should be" in told)


def test_hosts_and_ports_that_can_be():
    given = {"curve_secret_key_file": "/x", "curve_allowed_keys_file": "/y"}
    for endpoint in ("tcp://*:*", "tcp://[::1]:65535", "tcp://my_host.:1", "tcp://b\u00fccher.de:0"):
        assert Settings(server={"tcp_endpoint": endpoint, "http_host": "::", **given}).server.tcp_endpoint == endpoint


def test_private_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    endpoint = default_endpoint()
    make_private_directory(endpoint)
    folder = tmp_path / f"layerflow-{os.getuid()}"
    assert endpoint == f"ipc://{folder}/control"
    assert folder.stat().st_mode & 0o777 == 0o700
    make_private_directory(endpoint)
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match="mode 0700"):
        make_private_directory(endpoint)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot make"):
        make_private_directory(f"ipc://{tmp_path}/file/below/control")
