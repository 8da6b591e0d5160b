"""Requests from lines of JSON, and lines that are none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from layerflow.errors import ConfigError
from layerflow.sim.trace import parse_trace, read_trace

LINE = {"timestamp": 5000, "input_length": 1100, "output_length": 3, "hash_ids": [4, 5, 6]}


def test_full_blocks_and_the_rest():
    trace = parse_trace([json.dumps(LINE), "", json.dumps(LINE | {"timestamp": 7500})], name="t")
    first, second = trace.requests
    assert (first.at, second.at) == (0.0, 2.5)
    assert (len(first.chunks), len(first.tail), first.tokens, first.output) == (2, 16, 1100, 3)
    assert first.chunks == second.chunks and len({*first.chunks, first.tail}) == 3
    assert trace.block_tokens == 512 and trace.tokens == 2200


def test_a_prompt_of_whole_blocks_has_no_rest():
    [request] = parse_trace([json.dumps(LINE | {"input_length": 1536})], name="t").requests
    assert len(request.chunks) == 3 and not request.tail


def test_blocks_of_another_size():
    line = LINE | {"block_size": 16, "input_length": 48}
    assert parse_trace([json.dumps(line)], name="t").block_tokens == 16


def test_compressed_or_not(tmp_path: Path):
    plain, packed = tmp_path / "t.jsonl", tmp_path / "t.jsonl.gz"
    plain.write_text(json.dumps(LINE))
    packed.write_bytes(gzip.compress(json.dumps(LINE).encode()))
    assert read_trace(plain).requests == read_trace(packed).requests


@pytest.mark.parametrize(
    "line",
    [
        "{", "[]", "3", "null", '"x"',
        {}, {"timestamp": "soon"}, {"input_length": 0}, {"input_length": 5000}, {"hash_ids": [1, 2]},
        {"hash_ids": [1, 2, "x"]}, {"hash_ids": [1, 2, -3]}, {"hash_ids": [1, True, 3]}, {"hash_ids": 3},
        {"timestamp": -1e300}, {"timestamp": float("nan")}, {"block_size": -512}, {"block_size": 256},
    ],
)  # fmt: skip
def test_a_line_that_is_no_request_is_named(line: str | dict[str, Any]):
    text = line if isinstance(line, str) else json.dumps(LINE | line if line else {})
    with pytest.raises(ConfigError, match=r"t, line 2: .*no request"):
        parse_trace([json.dumps(LINE), text], name="t")


def test_nothing_to_read(tmp_path: Path):
    with pytest.raises(ConfigError, match="no request in it"):
        parse_trace(["", " "], name="t")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(json.dumps(LINE).encode() * 1000)[:60])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(cut)
