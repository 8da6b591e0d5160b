"""The entry point of this backend."""

from layerflow.backends import Plugin

PLUGIN = Plugin(backend="layerflow.hosts.mooncake.backend:Mooncake")
