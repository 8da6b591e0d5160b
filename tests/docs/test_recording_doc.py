"""docs/recording.md says what the format is."""

from __future__ import annotations

import msgspec
from pages import page, rows, sections

from layerflow.recording.format import COMMANDS, EVENTS, HEADER_BYTES, NEWEST, RECORDS, SEGMENT_BYTES, Told, Wanted
from layerflow.recording.renumbering import MOST_CHUNKS
from layerflow.server.recorder import MOST_NOTES

TEXT = page("recording.md")


def test_every_record_is_there_with_its_number_and_fields() -> None:
    table = [cells for cells in rows(sections(TEXT)["Records"])[1:] if len(cells) == 3]
    told = [(int(number), name, fields.replace("`", "")) for number, name, fields in table]
    kinds = [kind for kind in RECORDS if not issubclass(kind, Told | Wanted)]
    expected = [
        (kind.__struct_config__.tag, kind.__name__, ", ".join(field.name for field in msgspec.structs.fields(kind)))
        for kind in kinds
    ]
    assert told == expected


def test_every_event_and_command_is_there_with_its_number() -> None:
    for kind, number in {**EVENTS, **COMMANDS}.items():
        assert f"| {number} | {kind.__name__} |" in TEXT


def test_sizes_are_the_current_ones() -> None:
    assert f"| {HEADER_BYTES - NEWEST.size} | 8 |" in TEXT and f"| {HEADER_BYTES} | `segment_bytes` each |" in TEXT
    assert f"head of {SEGMENT_BYTES} bytes" in TEXT
    assert f"{MOST_CHUNKS:,}" in TEXT and f"{MOST_NOTES:,}" in TEXT
