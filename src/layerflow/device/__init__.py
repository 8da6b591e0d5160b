"""What differs between cpu, cuda and npu: events, streams, pinned memory, timers."""

from __future__ import annotations

import torch

from layerflow.device.base import Capabilities, Device, DeviceEvent
from layerflow.device.cpu import CpuDevice, CpuEvent
from layerflow.errors import Unsupported

__all__ = ["Capabilities", "CpuEvent", "Device", "DeviceEvent", "device_for"]

KINDS = ("cpu", "cuda", "npu")


def device_for(device: torch.device | str) -> Device:
    """The device that tensors on `device` live on, e.g. ``device_for(memory.device)``.

    :raises Unsupported: for a kind that layerflow does not move bytes on, or one that this machine lacks.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return CpuDevice()
    if device.type not in KINDS:
        raise Unsupported(f"device {device}: layerflow moves bytes on {', '.join(KINDS)} only")
    from layerflow.device.accelerator import Accelerator  # noqa: PLC0415 - engines on cpu never need it

    return Accelerator(device)
