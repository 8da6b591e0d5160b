"""The settings of what is behind the arena: sections inside a section."""

import json

import pytest

from layerflow.config.pool import default_pool_bytes
from layerflow.config.settings import PoolSettings, Settings, live_changes, reference
from layerflow.errors import ConfigError
from layerflow.hosts.memcache.setup import MemcacheOptions
from layerflow.server.server import Server
from layerflow.server.terms import direct_options, tier_of


def test_flags_environment_file_defaults_in_a_section_inside_a_section(toml, monkeypatch):
    path = toml('[pool]\nbackend = "mooncake"\n[pool.mooncake]\nmaster = "a:1"\nhostname = "file"\nreplicas = 2\n')
    monkeypatch.setenv("LAYERFLOW_POOL__MOONCAKE__MASTER", "b:2")
    monkeypatch.setenv("LAYERFLOW_POOL__MOONCAKE__HOSTNAME", "environment")
    pool = Settings.load(path, {"pool.mooncake.master": "c:3"}).pool
    assert (pool.backend, pool.size) == ("mooncake", default_pool_bytes())
    mooncake = pool.mooncake
    assert (mooncake.master, mooncake.hostname, mooncake.replicas) == ("c:3", "environment", 2)
    assert mooncake.segment_size == 1 << 30


@pytest.mark.parametrize(
    "overrides",
    [
        {"pool.disk.path": "/x", "pool.disk.capacity": "2GiB"},
        {"pool.disk": {"path": "/x", "capacity": "2GiB"}},
        {"pool": {"disk": {"path": "/x", "capacity": "2GiB"}}},
        {"pool": {"disk": {"path": "/y", "capacity": "2GiB"}}, "pool.disk.path": "/x"},
    ],
)
def test_overrides_in_every_shape(overrides):
    disk = Settings.load(None, overrides).pool.disk
    assert (disk.path, disk.capacity) == ("/x", 2 << 30)


def test_a_section_can_go_to_a_host_process_as_it_is():
    for section in (PoolSettings().disk, PoolSettings().mooncake, PoolSettings().memcache):
        assert json.loads(json.dumps(section.model_dump())) == section.model_dump()


@pytest.mark.parametrize(
    ("text", "place", "hint"),
    [
        ("[pool.mooncake]\nmastr = 'x:1'\n", "pool.mooncake.mastr ", "pool.mooncake.master?"),
        ("[pool.memcache]\nmaster = 'x:1'\n", "pool.memcache.master ", "pool.mooncake.master?"),
        ("[pool]\nmaster = 'x:1'\n", "pool.master ", "pool.mooncake.master?"),
        ("[pool.memcash]\nworld_size = 4\n", "pool.memcash ", "pool.memcache?"),
        ("[mooncake]\nmaster = 'x:1'\n", "mooncake ", "pool.mooncake?"),
        ("[pool.memcache]\nprotocols = 'x'\n", "pool.memcache.protocols ", "pool.memcache.protocol?"),
    ],
)
def test_an_unknown_key_names_the_closest(toml, refusal, text, place, hint):
    path = toml(text)
    (line,) = refusal(path)
    assert line.startswith(f"{path}: {place}is not a setting") and line.endswith(hint)


def test_the_same_in_the_environment_and_in_flags(refusal, monkeypatch):
    assert refusal(None, {"pool.mooncake.mastr": "x:1"})[0].endswith("did you mean pool.mooncake.master?")
    assert refusal(None, {"pool.disk": "/x"})[0].endswith(
        "pool.disk is a section; write [pool.disk] and its keys below it"
    )
    monkeypatch.setenv("LAYERFLOW_POOL__MOONCAKE__MASTR", "x:1")
    assert refusal()[0].endswith("did you mean pool.mooncake.master?")
    monkeypatch.delenv("LAYERFLOW_POOL__MOONCAKE__MASTR")
    monkeypatch.setenv("LAYERFLOW_POOL__DISK", "/x")
    assert "write LAYERFLOW_POOL__DISK__KEY=value" in refusal()[0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"pool.backend": "mooncake", "pool.disk.path": "/x"}, 'needs backend = "memory"'),
        ({"pool.mooncake.segment_size": "1MiB"}, "at least 16MiB"),
        ({"pool.mooncake.master": "localhost"}, "host:port"),
        ({"pool.mooncake.master": "localhost:70000"}, "host:port"),
        ({"pool.mooncake.hostname": " "}, "not be empty"),
        ({"pool.mooncake.metrics": "127.0.0.1:9003"}, "http://host:port"),
        ({"pool.memcache.metrics_url": "http://127.0.0.1:99999"}, "http://host:port"),
        ({"pool.memcache.meta_service_url": "127.0.0.1:5000"}, "tcp://host:port"),
        ({"pool.memcache.dram_size": "65GiB"}, "max_dram_size = 64GiB"),
        ({"pool.memcache.direct": True, "pool.memcache.config_file": "/etc/mmc.conf"}, "remove config_file"),
        ({"pool.memcache.direct": True, "pool.memcache.metrics_url": ""}, "needs metrics_url"),
        ({"pool.disk.capacity": 5}, "1048576"),
    ],
)
def test_contradictions_are_refused(refusal, overrides, words):
    (line,) = refusal(None, overrides)
    assert words in line


def test_a_problem_names_its_key_and_where_it_was_set(toml, refusal, monkeypatch):
    path = toml("[pool.mooncake]\nport = -1\n")
    monkeypatch.setenv("LAYERFLOW_POOL__DISK__CAPACITY", "much")
    lines = sorted(refusal(path, {"pool.memcache.world_size": 0}))
    assert lines[0].startswith("pool.disk.capacity = 'much' (set by LAYERFLOW_POOL__DISK__CAPACITY): ")
    assert lines[1].startswith("pool.memcache.world_size = 0 (set by a flag): ")
    assert lines[2].startswith(f"pool.mooncake.port = -1 (set by {path}): ")


@pytest.mark.parametrize(
    ("pool", "key"),
    [
        ({"backend": "mooncake", "mooncake": {"master": "10.0.0.1:50051"}}, "pool.mooncake.hostname"),
        ({"backend": "mooncake", "mooncake": {"master": "store:50051", "hostname": "localhost"}}, "pool.mooncake"),
        ({"backend": "memcache", "memcache": {"meta_service_url": "tcp://[fd00::1]:5000"}}, "pool.memcache.hcom_url"),
    ],
)
def test_a_node_that_the_others_cannot_reach_is_not_started(pool, key):
    with pytest.raises(ConfigError, match=f"is this machine's loopback.*set {key}"):
        Server(Settings(pool=pool))


def test_nodes_that_reach_each_other_or_are_alone():
    for pool in (
        {"backend": "memory", "mooncake": {"master": "10.0.0.1:50051"}},
        {"backend": "mooncake"},
        {"backend": "mooncake", "mooncake": {"master": "10.0.0.1:50051", "hostname": "10.0.0.9"}},
        {"backend": "memcache", "memcache": {"meta_service_url": "tcp://10.0.0.1:5000", "protocol": "host_shm"}},
        {"backend": "memcache", "memcache": {"meta_service_url": "tcp://a:1", "hcom_url": "tcp://[fd00::2]:7000"}},
        {"backend": "memcache", "memcache": {"meta_service_url": "tcp://127.0.0.1:1", "hcom_url": "tcp://[::1]:7000"}},
    ):
        assert PoolSettings.model_validate(pool).unreachable() is None


def test_none_of_it_changes_while_running():
    new = Settings(pool={"disk": {"path": "/x", "capacity": "2GiB"}}, transfer={"mode": "bulk"})
    with pytest.raises(ConfigError) as caught:
        live_changes(Settings(), new)
    assert "pool.disk.path ( -> /x), pool.disk.capacity (64GiB -> 2GiB)" in str(caught.value)
    assert live_changes(new, Settings(pool={"disk": {"path": "/x", "capacity": "2GiB"}})) == {"transfer.mode": "auto"}


def test_the_reference_lists_sections_one_after_the_other():
    rows = [row.key for row in reference()]
    order = list(dict.fromkeys(key.rpartition(".")[0] for key in rows))
    assert order == [
        "server",
        "pool",
        "pool.disk",
        "pool.memcache",
        "pool.mooncake",
        "pool.redis",
        "transfer",
        "proxy",
        "pd",
        "peers",
        "record",
        "log",
    ]
    assert "pool.disk" not in rows
    (master,) = (row for row in reference() if row.key == "pool.mooncake.master")
    assert (master.env, master.default) == ("LAYERFLOW_POOL__MOONCAKE__MASTER", '"127.0.0.1:50051"')


def test_a_backend_of_an_installed_package_has_its_section(monkeypatch, refusal):
    """Redis is one: nothing in the configuration names it."""
    monkeypatch.setenv("LAYERFLOW_POOL__REDIS__UNFINISHED_S", "60")
    settings = Settings.load(None, {"pool.backend": "redis", "pool.redis.url": "rediss://me:hunter2@store:6379/1"})
    assert tier_of(settings) == (
        "redis",
        {"url": "rediss://me:hunter2@store:6379/1", "unfinished_s": 60, "timeout_ms": settings.pool.host_timeout_ms},
    )
    assert "hunter2" not in repr(settings)
    assert "redis" in refusal(None, {"pool.backend": "rediss"})[0]
    assert "pool.redis.url" in refusal(None, {"pool.redis.url": "http://store"})[0]


def test_a_key_may_choose_its_backend_by_itself(refusal):
    by_key = Settings.load(None, {"pool.disk.path": "/x"}).pool
    by_name = Settings.load(None, {"pool.backend": "disk", "pool.disk.path": "/x"}).pool
    assert (by_key.behind, by_key.for_host()) == (by_name.behind, by_name.for_host())
    assert by_key.behind == "disk" and Settings().pool.behind == "memory" and tier_of(Settings()) is None
    assert "needs pool.disk.path" in refusal(None, {"pool.backend": "disk"})[0]


def test_only_a_pool_with_a_direct_lane_has_options_for_workers():
    def told(**pool):
        return direct_options(Settings(pool=pool))

    away = {"hcom_url": "tcp://127.0.0.1:7009"}
    assert told(backend="memcache", memcache=away) == told() == told(backend="redis") == ""
    options = json.loads(told(backend="memcache", memcache=away | {"direct": True}))
    assert options["hcom_url"] == away["hcom_url"] and "direct" not in options and options["timeout_ms"] == 5000
    assert MemcacheOptions.read(options).hcom_url == away["hcom_url"]
