"""Servers that read from each other's arenas: what this one lends, and what it finds elsewhere."""
