"""memcache_hybrid, behind the arena."""
