"""The caps that the core keeps to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The caps. All may change while steps are in flight.

    :param prefetch_layers: loads move at most so many layers past the frontier; 0 = bounded by bytes only.
    :param max_transfer_blocks: blocks of one batch.
    :param max_transfer_bytes: bytes of one batch; a single larger block is split by bytes. A load takes at most
        half of `max_inflight_bytes`, a save or a load under `prefetch_layers` at most a quarter.
    :param max_inflight_bytes: bytes granted and not yet reported, over all sessions, both directions; at
        least 2. Saves are granted up to half of it. What cannot move yet is counted, and never takes all of
        its direction's half. Not counted: what was called back at a deadline, a fence or a failed forward
        pass, until it is reported.
    :param save_backlog_bytes: a step whose saves would take a session's unsaved bytes past this has
        them shed.
    :param write_backlog_bytes: what is on its way to the backend is at most so much; what finds no room when its
        first layer is stored is shed.
    :param stagger_us: distance of neighbouring stagger slots, which lanes keep; 0 = off.
    :param fetch_timeout_s: a fetch of which nothing has come for so long is given up.

    The caps of batches and of what is in flight hold for each hop: between engines and arena, from the
    backend, and to it. There the smallest batch is one layer of one object, whatever the caps.
    """

    prefetch_layers: int = 0
    max_transfer_blocks: int = 4096
    max_transfer_bytes: int = 64 << 20
    max_inflight_bytes: int = 256 << 20
    save_backlog_bytes: int = 4 << 30
    write_backlog_bytes: int = 1 << 30
    stagger_us: int = 0
    fetch_timeout_s: float = 10.0
