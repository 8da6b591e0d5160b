"""What each message of a client does."""

from layerflow.server.handlers.messages import Handlers

__all__ = ["Handlers"]
