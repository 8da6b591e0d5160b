"""Writes a recording: records into blocks, blocks into a ring of segments that keeps the newest."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from layerflow._version import __version__
from layerflow.errors import ConfigError
from layerflow.recording.format import (
    BLOCK_HEAD,
    HEADER_BYTES,
    LEAST_BYTES,
    MAGIC,
    NEWEST,
    PRELUDE,
    SEGMENT_BYTES,
    SEGMENT_HEAD,
    SEGMENT_MAGIC,
    SEGMENTS,
    VERSION,
    Dropped,
    Header,
    encoder,
    segment_crc,
)

BLOCK_BYTES: Final = 64 << 10
"""Of records, before they are compressed as a block."""

LEVEL: Final = 1
"""Of zlib: higher ones take twice the time, and the file becomes a tenth smaller."""

ARRAY: Final = b"\xdd"
"""msgpack's first byte of an array with a length of four bytes."""

Encoded = Any
"""A record of :mod:`layerflow.recording.format`, or the tuple that is encoded like it."""


class RecordingWriter:
    """One file; for one thread.

    An earlier recording at `path` is kept beside it, as ``PATH.1``; an older one there is replaced. Nothing but
    recordings and empty files is moved or replaced.

    :param max_bytes: size of the file; when it is full its oldest eighth is overwritten.
    :param now: monotonic seconds. :param unix: the same moment as seconds since 1970.
    :param standing: what each segment but the first begins with, so that it can be read without those before: models,
        sessions, settings and limits. It is told the time, and may take half of a segment.
    :raises ConfigError: the file cannot be made, or something else is at `path` or at ``PATH.1``.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        *,
        now: float,
        unix: float,
        standing: Callable[[float], Sequence[Encoded]],
    ) -> None:
        self.path = path
        self.records = 0
        self._standing = standing
        self._segment_bytes = (max(max_bytes, LEAST_BYTES) - HEADER_BYTES) // SEGMENTS
        self._body = bytearray()
        self._count = 0
        self._first, self._last = now, now
        self._number = 0
        self._room = 0  # bytes left in the segment
        self._used = 0
        self._began = now  # time of the segment's first record
        self._fd = _create(path)
        try:
            header = encoder.encode(Header(__version__, now, unix, self._segment_bytes))
            self._write(PRELUDE.pack(MAGIC, VERSION, len(header)) + header.ljust(HEADER_BYTES - PRELUDE.size, b"\0"), 0)
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(f"{path}: cannot record here: {error.strerror}") from None

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return os.fstat(self._fd).st_size

    def add(self, records: Sequence[Encoded], at: float) -> None:
        """Append records; the last of them happened at `at`.

        :raises OSError: the file cannot be written; what it has is whole.
        """
        if not records:
            return
        if not self._count:
            self._first = at
        self._last = at
        self._body += _elements(encoder.encode(records))
        self._count += len(records)
        self.records += len(records)
        if len(self._body) >= BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was added.

        :raises OSError: as of :meth:`add`; also where the file is too small for what its segments begin with.
        """
        if not self._count:
            return
        body, count = bytes(self._body), self._count
        self._body.clear()
        self._count = 0
        block = _block(body, count)
        if len(block) > self._room:
            begins = self._standing_block()
            if len(block) > self._segment_bytes - SEGMENT_BYTES - len(begins):
                self.records -= count
                block = _block(encoder.encode(Dropped(self._last, count)), 1)
            elif not self._number:
                begins = b""  # the first segment has it among its records
            self._next_segment()
            if begins:
                self._append(begins, self._first)
        self._append(block, self._last)

    def close(self) -> None:
        """Close the file as it is; nothing happens if it was closed before."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _next_segment(self) -> None:
        """Begin the next segment, over the oldest one once the ring is full."""
        self._number += 1
        self._used, self._room = 0, self._segment_bytes - SEGMENT_BYTES
        self._began = self._first
        self._publish(self._first)
        self._write(NEWEST.pack(self._number), HEADER_BYTES - NEWEST.size)

    def _standing_block(self) -> bytes:
        """What a segment begins with; empty where nothing stands yet."""
        standing = self._standing(self._first)
        block = _block(_elements(encoder.encode(standing)), len(standing)) if standing else b""
        if len(block) > (self._segment_bytes - SEGMENT_BYTES) // 2:
            least = HEADER_BYTES + SEGMENTS * (2 * len(block) + SEGMENT_BYTES)
            raise OSError(
                errno.ENOSPC,
                f"the file is too small: its models, sessions and settings alone take {len(block):,} bytes of each "
                f"eighth; give it at least {least:,} bytes",
            )
        return block

    def _append(self, block: bytes, last: float) -> None:
        self._write(block, self._start + SEGMENT_BYTES + self._used)
        self._used += len(block)
        self._room -= len(block)
        self._publish(last)

    def _publish(self, last: float) -> None:
        fields = self._number, self._used, self._began, last
        checksum = zlib.crc32(segment_crc(*fields))
        head = SEGMENT_HEAD.pack(SEGMENT_MAGIC, checksum, *fields)
        self._write(head.ljust(SEGMENT_BYTES, b"\0"), self._start)

    @property
    def _start(self) -> int:
        return HEADER_BYTES + (self._number - 1) % SEGMENTS * self._segment_bytes

    def _write(self, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written


def _block(body: bytes, records: int) -> bytes:
    raw = ARRAY + records.to_bytes(4, "big") + body
    packed = zlib.compress(raw, LEVEL)
    return BLOCK_HEAD.pack(len(packed), zlib.crc32(packed), len(raw), records) + packed


def _elements(array: bytes) -> bytes:
    """A msgpack array without its head."""
    head = array[0]
    return array[1 if head >> 4 == 0x9 else 3 if head == 0xDC else 5 :]


def _create(path: Path) -> int:
    kept = path.with_name(path.name + ".1")
    try:
        if _holds_recording(path):
            _holds_recording(kept)
            path.replace(kept)
        else:
            path.unlink(missing_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{path}: cannot record here: {error.strerror}") from None


def _holds_recording(path: Path) -> bool:
    """Say whether a recording is there; False = an empty file, or none.

    :raises ConfigError: something else is there.
    """
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(there.st_mode):  # opening a FIFO would wait for its other end
        raise ConfigError(f"{path}: there is something that is no plain file; give another name")
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        begins = os.read(fd, len(MAGIC))
    finally:
        os.close(fd)
    if begins and begins != MAGIC:
        raise ConfigError(f"{path}: there is a file that is no recording; give another name")
    return bool(begins)
