"""What the keys of vLLM's bytes depend on: the model and its inputs, adapters, weights."""
