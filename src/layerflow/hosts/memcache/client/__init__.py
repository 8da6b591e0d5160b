"""Calls of the memcache client: guarded, their codes explained, given up when the MetaService is gone."""
