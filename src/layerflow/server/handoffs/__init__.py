"""Hand-offs: what a prefill engine's server keeps for a decode engine, and how that follows what is being stored."""
