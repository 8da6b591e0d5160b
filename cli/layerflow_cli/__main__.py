"""``python -m layerflow_cli`` is ``layerflow``."""

from layerflow_cli.main import main

main()
