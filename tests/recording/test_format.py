"""Recordings as files: what is written is read, the newest is kept, and what is no recording is refused."""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from layerflow.errors import ConfigError
from layerflow.flow import commands as wanted
from layerflow.flow import events as told
from layerflow.recording.format import (
    BLOCK_HEAD,
    COMMANDS,
    EVENTS,
    HEADER_BYTES,
    LEAST_BYTES,
    PRELUDE,
    RECORDS,
    SEGMENT_BYTES,
    Dropped,
    LookupsMissed,
    SessionSeen,
    SettingsInForce,
    Told,
    Wanted,
)
from layerflow.recording.notes import Transcript
from layerflow.recording.reader import Recording
from layerflow.recording.renumbering import WITH_TEXT, Numbers, Renumbering, word
from layerflow.recording.summary import summary
from layerflow.recording.writer import RecordingWriter

STANDING = SettingsInForce(0.0, {"pool": {"size": 1}})


def writer_of(path: Path, max_bytes: int = LEAST_BYTES, now: float = 100.0) -> RecordingWriter:
    return RecordingWriter(path, max_bytes, now=now, unix=1e9, standing=lambda at: [STANDING])


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A recording of 3,000 records."""
    path = tmp_path / "made.lfr"
    writer = writer_of(path)
    for number in range(3000):
        writer.add([LookupsMissed(100.0 + number, number, 1, number * 7919 % 1000)], 100.0 + number)
    writer.flush()
    writer.close()
    return path


def test_what_was_written_is_read_in_its_order(made: Path) -> None:
    recording = Recording(made)
    assert (recording.header.began, recording.header.began_unix) == (100.0, 1e9)
    assert [record.session for record in recording.records()] == list(range(3000))
    assert (recording.segments[0].first, recording.segments[-1].last) == (100.0, 3099.0)


EXAMPLES: tuple[Any, ...] = (
    told.SessionOpened(3, (told.LayerShape(0, 64), told.LayerShape(1, 32))),
    told.StepOpened(3, 1, 5.0, 9.0, (told.Part("7", 0, 4, (told.Need(1, 2, 0, 4),)),), (told.Part("8", 1, 2),), True),
    told.FetchOpened(1, "2", (0, 2), (told.Item(64, 4), told.Item(32, 2)), hop=told.Hop.PEER),
    told.CallDone(told.Hop.WRITE, 4, ((1, "broken"),)),
    told.LoadsMoved(3, 1, 640, (told.FailedRange(0, 1, 3, "broken"),)),
    told.LoadsLost(3, 1, (told.FailedRange(0, 1, 3, "broken"),)),
    told.LimitsChanged(told.Limits(prefetch_layers=3, stagger_us=40)),
    told.Tick(),
    wanted.Submit(3, 1, 9, told.Direction.LOAD, 5, 0, 4, 0, 0, 256, -1, True),
    wanted.Call(told.Hop.FETCH, 1, 2, 0, 1, 0, 1, 64),
    wanted.Revoke(3, 1, (0, 2), "shed"),
)


def test_events_and_commands_of_the_core_come_back_as_they_are(tmp_path: Path) -> None:
    writer, numbers = writer_of(tmp_path / "x"), {**EVENTS, **COMMANDS}
    writer.add([(numbers[type(one)], 100.0, one) for one in EXAMPLES], 100.0)
    writer.flush()
    writer.close()
    found = [one for one in Recording(tmp_path / "x").records() if isinstance(one, Told | Wanted)]
    assert tuple(one.event if isinstance(one, Told) else one.command for one in found) == EXAMPLES


def test_every_event_of_the_core_has_a_number_and_no_number_is_there_twice() -> None:
    assert set(EVENTS) == set(get_args(told.Event))
    numbers = [kind.__struct_config__.tag for kind in RECORDS]
    assert len(set(numbers)) == len(numbers)


def test_every_kind_with_a_text_has_a_way_to_leave_it_out() -> None:
    def texts(kind: Any) -> bool:
        if kind is str:
            return True
        if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
            return any(texts(each) for each in typing.get_type_hints(kind).values())
        return any(texts(each) for each in get_args(kind))

    assert {kind for kind in (*EVENTS, *COMMANDS) if texts(kind)} == set(WITH_TEXT)


def test_names_and_texts_are_left_out() -> None:
    numbers, engines = Renumbering(), {3: "vllm-secret", 4: "other"}
    step = told.StepOpened(3, 1, 5.0, 9.0, (told.Part("alice", 0, 4),), (told.Part("bob", 0, 4),))
    found = numbers.change(step, engines)
    assert [part.request for part in (*found.loads, *found.saves)] == ["1", "2"]
    assert numbers.change(told.RequestAborted(3, "alice"), engines).request == "1"
    assert numbers.change(told.RequestAborted(4, "alice"), engines).request == "3", "another engine's"
    assert numbers.change(told.BatchFailed(3, 1, "cannot read /home/alice: gone"), engines).reason == "cannot read"
    lost = numbers.change(wanted.LoadFailed(3, 1, "bob", 0, 1, 2, "broken: object ab12"), engines)
    assert (lost.request, lost.reason) == ("2", "broken")


@pytest.mark.parametrize(
    ("reason", "head"),
    [("shed", "shed"), ("'alice' has gone", ""), ("layer 3 is late", "layer"), ("slow (17 ms)", "slow")],
)
def test_of_a_reason_its_head_is_kept(reason: str, head: str) -> None:
    assert word(reason) == head


def test_numbers_are_kept_for_what_was_seen_last() -> None:
    numbers: Numbers[str] = Numbers(3)
    assert [numbers.of(key) for key in "abab"] == [1, 2, 1, 2]
    for key in "cdbefgb":
        numbers.of(key)
    assert numbers.of("b") == 2, "it was seen again and again"
    assert numbers.of("a") > 7, "it was not seen for long"


def test_a_day_stays_within_its_size_and_the_newest_is_kept(tmp_path: Path) -> None:
    path, second, per_second = tmp_path / "day.lfr", 1.0, 10
    writer = writer_of(path, now=0.0)
    transcript = Transcript()
    for now in range(0, 86_400, 10):
        notes: list[Any] = []
        for number in range(10 * per_second):
            at = now + number * second / per_second
            notes.append((at, told.BatchDone(number % 64, now * 31 + number), ()))
        writer.add(transcript.records_of(notes), now + 10.0)
        writer.flush()
        assert path.stat().st_size <= LEAST_BYTES
    writer.close()
    recording = Recording(path)
    assert recording.segments[0].number > 1 and len(recording.segments) == recording.header.segments
    kept = list(recording.records())
    assert kept[-1].at == pytest.approx(86_400, abs=1)
    assert recording.segments[-1].last - recording.segments[0].first > 3600
    starts = [place for place, record in enumerate(kept) if isinstance(record, SettingsInForce)]
    assert len(starts) == len(recording.segments), "each segment says what holds"


def test_a_recording_that_is_being_written_is_readable(tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "x")
    assert list(Recording(tmp_path / "x").records()) == []
    writer.add([LookupsMissed(101.0, 1, 1, 5)], 101.0)
    assert list(Recording(tmp_path / "x").records()) == [], "it is written when it is flushed"
    writer.flush()
    assert list(Recording(tmp_path / "x").records()) == [LookupsMissed(101.0, 1, 1, 5)]
    writer.close()


def test_what_is_larger_than_a_segment_is_counted_as_dropped(tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "x")
    noise = (i * 2_654_435_761 % 2**32 for i in range(10**9))
    chunks = tuple(next(noise) for _ in range(60_000))
    writer.add([(4, 100.0, 100.1, 1, 1, 10, chunks, 0, 0, 0, 0, False)], 100.0)
    writer.flush()
    writer.close()
    assert list(Recording(tmp_path / "x").records()) == [STANDING, Dropped(100.0, 1)]


def test_a_damaged_block_is_counted_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    writer, starts = writer_of(path), [HEADER_BYTES + SEGMENT_BYTES]
    for block in range(3):
        writer.add([LookupsMissed(100.0, block, 1, number) for number in range(10)], 100.0)
        writer.flush()
        starts.append(path.stat().st_size)
    writer.close()
    whole = path.read_bytes()
    for at, missing, left in (
        (starts[1] + BLOCK_HEAD.size + 5, 10, 20),  # its stream
        (starts[1] + 5, 10, 20),  # its checksum
        (starts[1] + 3, 1, 10),  # its length: what follows cannot be found
        (starts[0] + 3, 1, 0),
        (starts[2] + 15, 1, 20),  # its count
    ):
        data = bytearray(whole)
        data[at] ^= 0x7F
        if at == starts[2] + 15:
            data[starts[2] + 5] ^= 0x7F
        path.write_bytes(bytes(data))
        recording = Recording(path)
        found = list(recording.records())
        assert [record for record in found if isinstance(record, Dropped)] == [Dropped(100.0, missing)]
        assert len(found) == left + 1 and recording.damaged == 1
        counts = summary(recording)["counts"]
        assert (counts["dropped"], counts["damaged_blocks"]) == (missing, 1)


class TestRefused:
    @pytest.fixture
    def refusal(self, made: Path) -> Iterator[Any]:
        def of(data: bytes) -> str:
            made.write_bytes(data)
            with pytest.raises(ConfigError) as error:
                list(Recording(made).records())
            assert "\n" not in str(error.value) and str(made) in str(error.value)
            return str(error.value)

        yield of

    def test_cut_files(self, made: Path, refusal: Any) -> None:
        whole = made.read_bytes()
        for nbytes in (PRELUDE.size, HEADER_BYTES, HEADER_BYTES + 10, HEADER_BYTES + SEGMENT_BYTES, len(whole) - 1):
            assert "is cut" in refusal(whole[:nbytes])

    def test_a_file_cut_between_two_segments(self, tmp_path: Path, refusal: Any) -> None:
        writer = writer_of(tmp_path / "x")
        while writer.nbytes < LEAST_BYTES // 2:
            writer.add([LookupsMissed(1.0, 1, 1, 5)], 1.0)
            writer.flush()
        writer.close()
        assert "is cut" in refusal((tmp_path / "x").read_bytes()[: Recording(tmp_path / "x").header.segment_bytes * 2])

    def test_foreign_files(self, refusal: Any) -> None:
        for data in (b"", b"x" * 9000, b'{"hash_ids": []}\n'):
            assert "no recording" in refusal(data)

    def test_another_version(self, made: Path, refusal: Any) -> None:
        data = bytearray(made.read_bytes())
        data[16] = 9
        assert "version 9" in refusal(bytes(data))

    def test_a_damaged_head_of_a_segment(self, made: Path, refusal: Any) -> None:
        data = bytearray(made.read_bytes())
        data[HEADER_BYTES + 12] ^= 0xFF
        assert "damaged" in refusal(bytes(data))

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="No such file"):
            Recording(tmp_path / "none")


def test_an_earlier_recording_is_kept_and_another_file_is_not_touched(made: Path) -> None:
    before = made.read_bytes()
    writer_of(made).close()
    assert made.with_name("made.lfr.1").read_bytes() == before
    made.write_text("a letter")
    with pytest.raises(ConfigError, match="no recording"):
        writer_of(made)
    assert made.read_text() == "a letter"


def test_what_stands_where_an_earlier_recording_would_go_is_not_touched(made: Path) -> None:
    before, kept = made.read_bytes(), made.with_name("made.lfr.1")
    kept.write_text("precious")
    with pytest.raises(ConfigError, match=r"made\.lfr\.1: there is a file that is no recording"):
        writer_of(made)
    assert kept.read_text() == "precious" and made.read_bytes() == before
    made.write_bytes(b"")
    writer_of(made).close()
    assert kept.read_text() == "precious" and Recording(made).nbytes, "an empty file is not kept"


def test_what_is_no_plain_file_is_neither_opened_nor_moved(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    there = sorted(tmp_path.iterdir())
    for path in there:
        with pytest.raises(ConfigError, match="no plain file"):
            writer_of(path)
    assert sorted(tmp_path.iterdir()) == there


def names(count: int) -> list[SessionSeen]:
    return [SessionSeen(0.0, n, n, f"{n * 2_654_435_761 % 2**32:x}" * 9, 1, True) for n in range(count)]


def test_what_segments_begin_with_takes_at_most_half_of_them(tmp_path: Path) -> None:
    path, standing = tmp_path / "x", names(100)
    writer = RecordingWriter(path, LEAST_BYTES, now=0.0, unix=1e9, standing=lambda at: standing)
    with pytest.raises(OSError, match="give it at least") as error:
        for number in range(200_000):
            if number == 50_000:
                standing += names(8000)
            writer.add([LookupsMissed(1.0, number, 1, number * 7919 % 65_536)], 1.0)
    writer.close()
    assert path.stat().st_size <= LEAST_BYTES
    assert sum(isinstance(record, LookupsMissed) for record in Recording(path).records()) > 10_000, "it reads"
    least = int(error.value.strerror.split()[-2].replace(",", ""))
    larger = RecordingWriter(tmp_path / "y", least, now=0.0, unix=1e9, standing=lambda at: standing)
    larger.add(standing, 0.0)
    larger.flush()
    larger.close()


def test_models_and_sessions_of_a_block_that_is_dropped_are_told(tmp_path: Path) -> None:
    standing = names(3)
    writer = RecordingWriter(tmp_path / "x", LEAST_BYTES, now=0.0, unix=1e9, standing=lambda at: standing)
    chunks = tuple(number * 2_654_435_761 % 2**32 for number in range(60_000))
    writer.add([*standing, (4, 100.0, 100.1, 1, 1, 10, chunks, 0, 0, 0, 0, False)], 100.0)
    writer.flush()
    writer.close()
    assert list(Recording(tmp_path / "x").records()) == [*standing, Dropped(100.0, 4)]


def test_a_full_disk_leaves_a_file_that_can_be_read(tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "x", 8 << 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    try:
        with pytest.raises(OSError) as error:
            for number in range(1_000_000):
                writer.add([LookupsMissed(1.0, number, 1, number * 7919 % 65_536)], 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        writer.close()
    assert error.value.errno in (errno.EFBIG, errno.ENOSPC)
    found = [record for record in Recording(tmp_path / "x").records() if isinstance(record, LookupsMissed)]
    assert found and [record.session for record in found] == list(range(len(found)))
