"""Mooncake, behind the arena."""
