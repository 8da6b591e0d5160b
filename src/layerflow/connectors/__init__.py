"""Connectors: thin translations of an engine's hooks into the agent's calls."""
