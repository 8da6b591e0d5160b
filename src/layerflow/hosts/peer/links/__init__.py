"""The links, one module each, found by :func:`layerflow.links.links`."""
