"""A pool's own calls, without layerflow: what ``layerflow bench pool`` compares with."""
