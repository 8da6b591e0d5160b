"""A step's message, checked, and what of the pool it needs."""
