"""One open step, inside the engine's process."""
