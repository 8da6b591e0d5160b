"""The control socket as an agent sees it."""
