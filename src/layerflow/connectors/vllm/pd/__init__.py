"""Prefill and decode apart: what proxies say, who does what for a request, and how a hand-off begins and ends."""
