"""The core: a sans-IO state machine. Events in, commands out; no I/O, no clock, no thread."""

from layerflow.flow.machine import Flow

__all__ = ["Flow"]
