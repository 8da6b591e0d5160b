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


def test_what_a_line_says_wrong_is_named_and_not_quoted_at_length():
    for line, words in (
        ([], "should be a JSON object"),
        (LINE | {"hash_ids": None}, "hash_ids should be a list"),
        (LINE | {"output_length": 10**400}, "output_length = a huge number: should be a whole number, 0 to"),
        (LINE | {"input_length": "x" * 500}, "input_length = "),
    ):
        with pytest.raises(ConfigError, match=words) as error:
            parse_trace([json.dumps(line)], name="t")
        assert len(str(error.value)) < 200


def test_an_answer_of_no_token_counts_as_one():
    lines = [json.dumps(LINE | {"output_length": 0}), json.dumps(LINE | {"output_length": None, "block_size": None})]
    assert [request.output for request in parse_trace(lines, name="t").requests] == [1, 1]


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
        {"block_size": 0}, {"block_size": "512"}, {"input_length": 1100.7}, {"input_length": "1100"},
        {"input_length": True}, {"output_length": -1}, {"output_length": 10**400}, {"output_length": 1e9},
        {"output_length": "3"}, {"timestamp": "7500"}, {"timestamp": True}, {"timestamp": 10**400},
        {"timestamp": None}, {"hash_ids": None}, {"hash_ids": {"1": 2}}, {"hash_ids": [1, 2, 10**400]}, "[" * 100_000,
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
