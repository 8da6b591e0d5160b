"""A disk, behind the arena."""
