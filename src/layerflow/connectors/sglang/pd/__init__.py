"""Prefill and decode apart in SGLang: a transfer backend over layerflow's hand-offs, chosen by ``layerflow``."""
