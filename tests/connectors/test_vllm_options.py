"""The connector's settings: its own keys, and those of the systems people come from."""

from __future__ import annotations

from typing import Any

import pytest

from layerflow.config.settings import Settings
from layerflow.connectors.vllm.options import Options, parse_options
from layerflow.errors import ConfigError

ENDPOINT = "ipc:///run/layerflow/control"


def both(extra: dict[str, Any]) -> Options:
    return parse_options(extra, producer=True, consumer=True)


def test_nothing_set_embeds_a_server_and_does_everything() -> None:
    options = both({})
    assert (options.endpoint, options.mode, options.load, options.save) == ("", "auto", True, True)
    assert options.save_partial
    assert not options.save_decode


@pytest.mark.parametrize(
    ("extra", "mode"),
    [
        ({"mode": "layerwise"}, "layerwise"),
        ({"use_layerwise": True}, "layerwise"),
        ({"use_layerwise": False}, "bulk"),
        ({"load_async": True}, "bulk"),
        ({"load_async": True, "use_layerwise": False}, "bulk"),
        ({"load_async": False}, "auto"),
    ],
)
def test_old_names_of_the_mode(extra: dict[str, Any], mode: str) -> None:
    assert both(extra).mode == mode


def test_roles() -> None:
    producer = parse_options({}, producer=True, consumer=False)
    consumer = parse_options({}, producer=False, consumer=True)
    generous = parse_options({"consumer_is_to_put": True}, producer=False, consumer=True)
    blind = parse_options({"consumer_is_to_load": False}, producer=False, consumer=True)
    assert (producer.load, producer.save) == (False, True)
    assert (consumer.load, consumer.save) == (True, False)
    assert (generous.load, generous.save) == (True, True)
    assert (blind.load, blind.save) == (False, False)


def test_saving_switches() -> None:
    options = both({"discard_partial_chunks": True, "save_decode_cache": True, "chunk_tokens": 64})
    assert not options.save_partial
    assert options.save_decode
    assert options.chunk_tokens == 64


def test_all_compressor_states_are_stored_unless_told_otherwise() -> None:
    assert both({}).compressor_states == both({"compressor_states": "all"}).compressor_states == "all"
    assert both({"compressor_states": "read"}).compressor_states == "read"


def test_the_embedded_server_takes_the_tuning_keys() -> None:
    options = both({"layerwise_prefetch_layers": 3, "layerwise_max_transfer_bytes": "8MiB", "h2d_stagger_us": 100})
    assert options.server == {
        "transfer.prefetch_layers": 3,
        "transfer.max_transfer_bytes": "8MiB",
        "transfer.h2d_stagger_us": 100,
    }


def test_the_embedded_server_may_use_every_backend() -> None:
    extra = {"backend": "mooncake", "mooncake": {"master": "store:50051", "segment_size": "2GiB"}, "pool_size": "2GiB"}
    pool = Settings.load(None, both(extra).server).pool
    assert (pool.backend, pool.size) == ("mooncake", 2 << 30)
    assert (pool.mooncake.master, pool.mooncake.segment_size) == ("store:50051", 2 << 30)
    assert Settings.load(None, both({"disk": {"path": "/cache"}}).server).pool.disk.path == "/cache"
    memcache = Settings.load(None, both({"backend": "memcache_hybrid", "memcache": {"world_size": 8}}).server).pool
    assert (memcache.backend, memcache.memcache.world_size) == ("memcache", 8)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"endpont": ENDPOINT}, "unknown key 'endpont'; did you mean endpoint?"),
        ({"zzz": 1}, "unknown key 'zzz'; known are allow_unknown_vllm, backend, "),
        ({"chunk_size": 256}, "write chunk_tokens"),
        ({"max_local_cpu_size": 20}, "pool_size where vLLM embeds the server"),
        ({"endpoint": "ipc://${XDG_RUNTIME_DIR}/control"}, "$ is not replaced"),
        ({"endpoint": "ipc://run/control"}, "is relative"),
        ({"backend": "yuanrong"}, "memory, disk, memcache, mooncake, redis"),
        ({"endpoint": ENDPOINT, "backend": "yuanrong"}, "memory, disk, memcache, mooncake, redis"),
        ({"mooncake": {"mastr": "x:1"}}, "did you mean pool.mooncake.master?"),
        ({"mooncake": {"port": -1}}, "pool.mooncake.port = -1 (set by kv_connector_extra_config)"),
        ({"mooncake": "x:1"}, "the keys of [pool.mooncake]"),
        ({"backend": "mooncake", "disk": {"path": "/cache"}}, 'needs backend = "memory"'),
        ({"endpoint": ENDPOINT, "disk": {"path": "/cache"}}, "pool.disk in the config of `layerflow run`"),
        ({"layerwise_num_shared_buffers": 4}, "pool_size"),
        ({"layerwise_independent_layers": [0, 1]}, "no layers share memory"),
        ({"memcache_dp_init_barrier": False}, "attach to one server"),
        ({"qos_priority": 2}, "remove this key"),
        ({"prefill_pp_size": 2}, "pipeline stages"),
        ({"prefill_pp_layer_partition": "38,40"}, "pipeline stages"),
        ({"lookup_rpc_port": 5000}, "`endpoint`"),
        ({"mooncake_rpc_port": 5000}, "`endpoint`"),
        ({"endpoint": ENDPOINT, "layerwise_prefetch_layers": 3}, "transfer.prefetch_layers"),
        ({"endpoint": "tcp://10.0.0.1:5555"}, "must run on this machine"),
        ({"mode": "fast"}, "auto, layerwise or bulk"),
        ({"compressor_states": "none"}, "compressor_states = 'none': should be all or read"),
        ({"compressor_states": False}, "should be text"),
        ({"mode": "bulk", "use_layerwise": True}, "contradict"),
        ({"load_async": True, "use_layerwise": True}, "contradict"),
        ({"use_layerwise": "yes"}, "true or false"),
        ({"endpoint": 5}, "should be text"),
        ({"chunk_tokens": 2.5}, "whole number"),
        ({"chunk_tokens": "64"}, "should be a number"),
        ({"lookup_wait_ms": -1}, "0 to 1000"),
        ({"layerwise_max_transfer_blocks": -1}, "max_transfer_blocks"),
    ],
)
def test_what_is_refused_says_what_to_use(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        both(extra)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_unknown_key_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        both({"chunk_token": 1, "lookup_rpc_port": 2, "mode": "bulk"})
    assert len(str(caught.value).splitlines()) == 2


def test_zero_is_no_limit_as_in_ascend_store() -> None:
    extra = {"layerwise_max_transfer_blocks": 0, "layerwise_max_transfer_bytes": 0}
    transfer = Settings.load(None, both(extra).server).transfer
    assert (transfer.block_cap, transfer.byte_cap) == (1 << 24, transfer.max_inflight_bytes // 2)


@pytest.mark.parametrize("endpoint", [{}, {"endpoint": ENDPOINT}])
def test_a_backend_that_cannot_be_used_says_why(monkeypatch: pytest.MonkeyPatch, endpoint: dict[str, Any]) -> None:
    monkeypatch.setattr("layerflow.config.pool.broken", lambda: {"odd": "odd:thing cannot be imported"})
    with pytest.raises(ConfigError, match="backend odd cannot be used: odd:thing cannot be imported"):
        both({"backend": "odd", **endpoint})


def test_backends_of_a_running_server_are_its_own_business() -> None:
    assert both({"endpoint": ENDPOINT, "backend": "mooncake"}).endpoint == ENDPOINT
