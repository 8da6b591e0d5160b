"""The connector in vLLM's worker processes."""
