"""A MetaService of memcache_hybrid in the foreground, until it is told to stop (Ctrl-C, SIGTERM).

    .venv/bin/python examples/memcache/meta.py

One per machine: the package itself refuses a second one (a lock file in /tmp). It needs no NPU and no CANN.
"""

import argparse
import sys
import tempfile

import memcache_hybrid


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--host", default="127.0.0.1", help="address to listen on, for clients of other machines too")
    asked.add_argument("--port", type=int, default=5000, help="pool.memcache.meta_service_url")
    asked.add_argument("--store-port", type=int, default=6000, help="pool.memcache.config_store_url")
    asked.add_argument("--http-port", type=int, default=8000, help="pool.memcache.metrics_url: /health and /metrics")
    asked.add_argument("--logs", default=tempfile.gettempdir(), help="folder for its logs")
    asked.add_argument("--evict-high", type=int, default=90, help="evict when so many percent are used ...")
    asked.add_argument("--evict-low", type=int, default=80, help="... until so many are")
    given = asked.parse_args()
    config = memcache_hybrid.MetaConfig()
    config.meta_service_url = f"tcp://{given.host}:{given.port}"
    config.config_store_url = f"tcp://{given.host}:{given.store_port}"
    config.metrics_url = f"http://{given.host}:{given.http_port}"
    config.log_path = given.logs
    config.log_level = "error"
    config.evict_threshold_high = given.evict_high
    config.evict_threshold_low = given.evict_low
    if memcache_hybrid.MetaService.setup(config) != 0:
        print("memcache refuses these addresses or limits", file=sys.stderr)
        return 2
    print(f"MetaService at {config.meta_service_url}, health at {config.metrics_url}/health", flush=True)
    return 0 if memcache_hybrid.MetaService.main() == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
