"""What to write into the configuration file: found by simulation, and confirmed on the running server."""
