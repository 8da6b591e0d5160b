"""One file per command of ``layerflow``: its options and its help. A command imports its work when it runs."""
