"""What each kind of device says of itself, and the events and timers behind it."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from layerflow.device import CpuEvent, device_for
from layerflow.device.timing import DEFAULT_SPIN_US, sleep_until
from layerflow.errors import Unsupported


def test_cpu_events_are_ready_as_soon_as_recorded() -> None:
    cpu = device_for("cpu")
    event = cpu.record()
    assert event.query()
    cpu.wait(event)
    assert cpu.kind == "cpu"
    assert not cpu.capabilities().streams
    assert cpu.pin(4096, 4096) is False
    cpu.unpin(4096)


def test_a_cpu_event_holds_its_waiter_until_it_is_set() -> None:
    event = CpuEvent()
    passed = threading.Event()

    def waiter() -> None:
        event.synchronize()
        passed.set()

    thread = threading.Thread(target=waiter, daemon=True)
    thread.start()
    assert not event.query()
    assert not passed.is_set()
    event.set()
    assert passed.wait(20)
    assert event.query()


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(Unsupported, match="cpu, cuda, npu"):
        device_for("meta")


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_a_kind_that_this_machine_lacks_is_refused(kind: str) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    try:
        device = torch.device(kind)
    except RuntimeError:
        pytest.skip(f"this torch does not know {kind!r} at all")
    with pytest.raises(Unsupported, match=kind):
        device_for(device)


def test_sleep_until_never_returns_early() -> None:
    for distance in (0.0, 50e-6, 300e-6, 2e-3):
        deadline = time.monotonic() + distance
        late = sleep_until(deadline)
        assert time.monotonic() >= deadline
        assert late >= 0


def test_a_deadline_in_the_past_is_not_waited_for() -> None:
    assert sleep_until(time.monotonic() - 1.0, spin_us=DEFAULT_SPIN_US) >= 1.0
