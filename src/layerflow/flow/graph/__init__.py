"""A step as a graph of transfers: sessions, steps, and what of a transfer is left."""
