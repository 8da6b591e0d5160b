"""What users of LMCache, of vLLM-Ascend's AscendStore and of SGLang's HiCache have in their files, and write here.

Keys that mean the same under another name are :data:`layerflow.config.sources.ALIASES`; these are the others: the
value is written in another way, or there is nothing to set.
"""

from __future__ import annotations

_ENGINE_SIDE = "it belongs to the engine: write it into vLLM's kv_connector_extra_config (docs/vllm.md)"
_SIZE = 'write pool.size with its unit, "20GiB" (pool_size where vLLM embeds the server)'
_PEERS = "other hosts' servers are listed in peers.attach (docs/peers.md); remove this key"
_NO_PORT = "scheduler and workers meet at `endpoint`, the server's server.endpoint; remove this key"
_NO_CONTROLLER = "there is no controller; remove this key"
_SEGMENT_SIZE = 'write pool.mooncake.segment_size, "1GiB"'

FOREIGN = {
    # LMCache
    "chunk_size": "write chunk_tokens into vLLM's kv_connector_extra_config; by default it is about 256",
    "local_cpu": "the arena in this host's memory is always there; remove this key, and write pool.size",
    "max_local_cpu_size": _SIZE,
    "local_device": "the arena is in this host's memory; remove this key, and write pool.size",
    "local_disk": 'write pool.disk.path = "/var/lib/layerflow", without file://',
    "max_local_disk_size": 'write pool.disk.capacity with its unit, "100GiB"',
    "remote_url": 'write pool.backend, "redis" or "mooncake", and its address: pool.redis.url or pool.mooncake.master',
    "remote_serde": "objects are stored as the engine has them; remove this key",
    "save_unfull_chunk": "write transfer.discard_partial_chunks, which is the opposite",
    "enable_p2p": _PEERS,
    "enable_pd": "see docs/pd.md: vLLM's kv_role and `layerflow proxy` make it so; remove this key",
    "enable_nixl": 'write peers.link = "nixl" (docs/peers.md)',
    "enable_blending": "only prefixes are reused; remove this key",
    "enable_controller": _NO_CONTROLLER,
    "controller_url": _NO_CONTROLLER,
    "lmcache_instance_id": "engines name themselves; remove this key",
    "cache_policy": "eviction is S3-FIFO; remove this key",
    "eviction_policy": "eviction is S3-FIFO; remove this key",
    "l1_size_gb": _SIZE,
    "numa_mode": 'write pool.numa = "auto", "off" or the number of a node',
    "pipelined_backend": 'loads overlap compute in transfer.mode "layerwise" and "auto"; remove this key',
    "pre_caching_hash_algorithm": "equal tokens have equal keys on every host; remove this key",
    # AscendStore, and the mooncake.json that it reads
    "lookup_rpc_port": _NO_PORT,
    "mooncake_rpc_port": _NO_PORT,
    "layerwise_num_shared_buffers": f"all layers share one arena; {_SIZE}",
    "local_hostname": "write pool.mooncake.hostname",
    "master_server_address": 'write pool.mooncake.master = "host:50051"',
    "global_segment_size": _SEGMENT_SIZE,
    "local_buffer_size": "the arena is the buffer; remove this key, and write pool.size",
    "device_name": "write pool.mooncake.devices",
    # HiCache
    "enable_hierarchical_cache": "the arena is always there; remove this key, and write pool.size",
    "hicache_ratio": f"the arena's size is given in bytes: {_SIZE}",
    "hicache_size": _SIZE,
    "hicache_write_policy": "what is computed is always stored, beside compute; remove this key",
    "hicache_io_backend": 'write transfer.copy_way = "auto", "ranges" or "staged"',
    "hicache_mem_layout": "objects are stored layer by layer; remove this key",
    "hicache_storage_backend": 'write pool.backend, or pool.disk.path for "file"',
    "hicache_storage_backend_extra_config": "write the keys of [pool.NAME], the section of that backend",
    "hicache_storage_prefetch_policy": "write pool.lookup_timeout_ms and pool.fetch_timeout_ms",
    # Keys of layerflow's own connector
    "load_async": _ENGINE_SIDE,
    "consumer_is_to_load": _ENGINE_SIDE,
    "consumer_is_to_put": _ENGINE_SIDE,
    "chunk_tokens": _ENGINE_SIDE,
    "lookup_wait_ms": _ENGINE_SIDE,
    "model_content": _ENGINE_SIDE,
    "kv_connector_extra_config": "that is vLLM's; `layerflow config` lists the settings of the server",
}


def what_to_write(key: str) -> str:
    """What to do with a key of another system, however it is spelled there; "" = no other system has it."""
    bare = key.lower().lstrip("-").replace("-", "_")
    return FOREIGN.get(bare) or FOREIGN.get(bare.removeprefix("lmcache_"), "")
