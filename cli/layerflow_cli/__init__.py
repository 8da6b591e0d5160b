"""The command line: run, demo, bench."""
