"""Reads a recording, also one that is still being written."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from layerflow.errors import ConfigError
from layerflow.recording.format import (
    BLOCK_HEAD,
    HEADER_BYTES,
    MAGIC,
    NEWEST,
    PRELUDE,
    SEGMENT_BYTES,
    SEGMENT_HEAD,
    SEGMENT_MAGIC,
    VERSION,
    Dropped,
    Header,
    Record,
    Segment,
    decoder,
    segment_crc,
)

MOST_BLOCK_BYTES = 1 << 30
"""Of one block behind decompression: what a foreign file can make its reader keep."""


class Recording:
    """A file's header and segments.

    :ivar segments: oldest first.
    :ivar damaged: blocks that :meth:`records` has left out.
    :raises ConfigError: it cannot be read, is no recording, is of another version, is cut, or its header or the head of
        a segment is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        try:
            with path.open("rb") as file:
                try:
                    self._read(file)
                except ConfigError:  # its writer may just have gone on
                    self._read(file)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None

    def raw_bytes(self, since: float = -math.inf) -> int:
        """Bytes of its records, decompressed, in segments that end at a time or later.

        :raises ConfigError: as of the class.
        """
        try:
            with self.path.open("rb") as file:
                return sum(
                    raw
                    for segment in self.segments
                    if segment.last >= since
                    for raw in self._raw_bytes_of(file, segment)
                )
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror}") from None

    def records(self, since: float = -math.inf) -> Iterator[Record]:
        """Every record, in the order in which they were noted: a lookup when it is answered, at its arrival's time.

        Each segment but the very first begins with the models, sessions, settings and limits of then, again. In the
        place of a damaged block stands a :class:`~layerflow.recording.format.Dropped` with the records that its head
        counts, at its segment's beginning; where the head is damaged too, of one record for all that follows there.

        :param since: leave out segments that end before.
        :raises ConfigError: as of the class.
        """
        self.damaged = 0
        try:
            with self.path.open("rb") as file:
                for segment in self.segments:
                    if segment.last >= since:
                        yield from self._blocks(file, segment)
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror}") from None

    def _read(self, file: Any) -> None:
        """Read the header and the segments as they are now."""
        self.nbytes = os.fstat(file.fileno()).st_size
        file.seek(0)
        page = file.read(HEADER_BYTES)
        self.header = self._read_header(page)
        self.segments = self._read_segments(file, NEWEST.unpack_from(page, HEADER_BYTES - NEWEST.size)[0])

    def _read_header(self, page: bytes) -> Header:
        if len(page) < PRELUDE.size or not page.startswith(MAGIC):
            raise ConfigError(f"{self.path}: is no recording of layerflow; make one with `layerflow record`")
        _, version, nbytes = PRELUDE.unpack_from(page)
        if version != VERSION:
            raise ConfigError(
                f"{self.path}: is of version {version} of the format, and this layerflow reads version {VERSION}; "
                "read it with the layerflow that recorded it"
            )
        if len(page) < HEADER_BYTES:
            raise self._cut()
        try:
            header = msgspec.msgpack.decode(page[PRELUDE.size : PRELUDE.size + nbytes], type=Header)
        except msgspec.DecodeError:
            raise self._damaged("its header") from None
        if header.segment_bytes <= SEGMENT_BYTES or not 0 < header.segments <= 1 << 16:
            raise self._damaged("its header")
        return header

    def _read_segments(self, file: Any, newest: int) -> list[Segment]:
        found = []
        for place in range(self.header.segments):
            start = HEADER_BYTES + place * self.header.segment_bytes
            if start >= self.nbytes:
                break
            segment = self._read_segment(file, start)
            if start + SEGMENT_BYTES + segment.used > self.nbytes:
                raise self._cut()
            found.append(segment)
        found.sort(key=lambda segment: segment.number)
        numbers = [segment.number for segment in found]
        if len(numbers) < min(newest, self.header.segments) or (numbers and numbers[-1] < newest):
            raise self._cut()
        if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise self._damaged("the order of its segments")
        return found

    def _read_segment(self, file: Any, start: int) -> Segment:
        file.seek(start)
        head = file.read(SEGMENT_BYTES)
        if len(head) < SEGMENT_BYTES:
            raise self._cut()
        magic, checksum, number, used, first, last = SEGMENT_HEAD.unpack_from(head)
        if magic != SEGMENT_MAGIC or checksum != zlib.crc32(segment_crc(number, used, first, last)):
            raise self._damaged(f"the head of a segment at byte {start}")
        return Segment(number, start + SEGMENT_BYTES, used, first, last)

    def _raw_bytes_of(self, file: Any, segment: Segment) -> Iterator[int]:
        at, end = segment.offset, segment.offset + segment.used
        while at < end:
            file.seek(at)
            head = file.read(BLOCK_HEAD.size)
            if len(head) < BLOCK_HEAD.size:
                return
            packed_bytes, _, raw_bytes, _ = BLOCK_HEAD.unpack(head)
            if not (0 < packed_bytes <= end - at - BLOCK_HEAD.size and 0 < raw_bytes <= MOST_BLOCK_BYTES):
                return  # the head is damaged
            yield raw_bytes
            at += BLOCK_HEAD.size + packed_bytes

    def _blocks(self, file: Any, segment: Segment) -> Iterator[Record]:
        at, end = segment.offset, segment.offset + segment.used
        while at < end:
            file.seek(at)
            head = file.read(BLOCK_HEAD.size)
            packed_bytes, checksum, raw_bytes, count = (
                BLOCK_HEAD.unpack(head) if len(head) == BLOCK_HEAD.size else (0,) * 4
            )
            packed = file.read(packed_bytes) if 0 < packed_bytes <= end - at - BLOCK_HEAD.size else b""
            records = _records(packed, checksum, raw_bytes)
            if records is None:
                if self._read_segment(file, segment.offset - SEGMENT_BYTES).number != segment.number:
                    return  # its writer has begun to overwrite this segment
                self.damaged += 1
                likely = packed and 0 < count <= raw_bytes <= MOST_BLOCK_BYTES
                records = [Dropped(segment.first, count if likely else 1)]
                if not packed:
                    at = end
            yield from records
            at += BLOCK_HEAD.size + packed_bytes

    def _cut(self) -> ConfigError:
        return ConfigError(f"{self.path}: is cut: it ends at byte {self.nbytes:,}, in the middle; copy it again")

    def _damaged(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: {what} is damaged; copy or record it again")


def _records(packed: bytes, checksum: int, raw_bytes: int) -> list[Record] | None:
    """A block's records; None = it is damaged."""
    if not packed or zlib.crc32(packed) != checksum or not 0 < raw_bytes <= MOST_BLOCK_BYTES:
        return None
    try:
        found: list[Record] = decoder.decode(zlib.decompressobj().decompress(packed, raw_bytes))
    except (zlib.error, msgspec.DecodeError):
        return None
    return found
