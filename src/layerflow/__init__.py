"""layerflow moves the KV cache of LLM serving engines layer by layer."""

__version__ = "0.1.0"
