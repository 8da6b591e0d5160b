"""Prefill and decode apart, beside a single vLLM and NixlConnector, over HTTP."""
