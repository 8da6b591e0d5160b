"""What `layerflow bench` measures; one file per question."""
