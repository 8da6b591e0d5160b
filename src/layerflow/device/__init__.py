"""What differs between cpu, cuda and npu: events, streams, pinned memory, timers."""

from __future__ import annotations

import os

import torch

from layerflow.device.base import Capabilities, CpuDevice, CpuEvent, Device, DeviceEvent
from layerflow.errors import Unsupported

__all__ = ["Capabilities", "CpuEvent", "Device", "DeviceEvent", "device_for", "is_emulated"]

EMULATED_CANN = "CANN_EMU_VERSION_INFO"
"""What the environment of an emulated CANN has."""

KINDS = ("cpu", "cuda", "npu")


def device_for(device: torch.device | str) -> Device:
    """The device that tensors on `device` live on, e.g. ``device_for(memory.device)``.

    :raises Unsupported: for a kind that layerflow does not move bytes on, or one that this machine lacks.
    """
    kind = _kind(device)
    if kind == "cpu":
        return CpuDevice()
    if kind not in KINDS:
        raise Unsupported(f"device {device}: layerflow moves bytes on {', '.join(KINDS)} only")
    from layerflow.device.accelerator import Accelerator, module_of  # noqa: PLC0415 - engines on cpu never need it

    module = module_of(kind)  # from here on torch knows the name
    try:
        return Accelerator(torch.device(device), module)
    except RuntimeError as error:
        raise Unsupported(f"device {device}: {error}") from error


def is_emulated(device: torch.device | str) -> bool:
    """Is it an emulation, whose times say nothing of a real one?"""
    return _kind(device) == "npu" and EMULATED_CANN in os.environ


def _kind(device: torch.device | str) -> str:
    return str(device).partition(":")[0]
