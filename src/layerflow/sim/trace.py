"""Traces of requests: when each came, how long its prompt was, and which of its blocks other prompts share.

One JSON object a line, as Mooncake publishes them: ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and
``hash_ids``, one for each block of the prompt. Equal ids stand for equal content of a block and of all before it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerflow.errors import ConfigError, shown
from layerflow.keys import DIGEST_BYTES

BLOCK_TOKENS = 512
"""Of a block of Mooncake's traces, whose lines do not tell."""

MOST_TOKENS = 10_000_000
"""Of a prompt, an answer or a block: tenfold what models take today."""

MOST_MS = 1e15
"""Of a timestamp: milliseconds since 1970 have 13 digits."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request.

    :param at: seconds since the first request.
    :param tokens: of the prompt. :param output: tokens that it generates, at least one.
    :param chunks: digests of the prompt's full blocks. :param tail: of what they leave of it; empty = nothing.
    """

    number: int
    at: float
    tokens: int
    output: int
    chunks: tuple[bytes, ...]
    tail: bytes = b""


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Requests in the order of their times.

    :param block_tokens: tokens of a full block.
    :param purges: when the pool was emptied, in seconds since the first request; in order.
    """

    name: str
    requests: tuple[TracedRequest, ...]
    block_tokens: int
    purges: tuple[float, ...] = ()

    @property
    def tokens(self) -> int:
        """Of all prompts."""
        return sum(request.tokens for request in self.requests)


def read_trace(path: Path, *, block_tokens: int = BLOCK_TOKENS) -> RequestTrace:
    """Read a file of such lines, compressed by gzip where its name ends so.

    :param block_tokens: where its lines do not tell ``block_size``.
    :raises ConfigError: it cannot be read, or a line is no request.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            return parse_trace(lines, name=path.name, block_tokens=block_tokens)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def parse_trace(lines: Iterable[str], *, name: str, block_tokens: int = BLOCK_TOKENS) -> RequestTrace:
    """Take requests from lines.

    :raises ConfigError: a line is no request, or there is none.
    """
    requests: list[TracedRequest] = []
    size = block_tokens
    first = 0.0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("should be a JSON object")
            told = _whole(record, "block_size", block_tokens, least=1)
            if requests and told != size:
                raise ValueError(f"blocks of {told} tokens, and of {size} before")
            size = told
            if not requests:
                first = _real(record, "timestamp")
            requests.append(_request(len(requests), record, first, size))
        except (ValueError, RecursionError) as error:  # thousands of nested lists
            raise ConfigError(f"{name}, line {number}: {error}; it is no request of a trace") from error
    if not requests:
        raise ConfigError(f"{name}: no request in it")
    requests.sort(key=lambda request: (request.at, request.number))
    return RequestTrace(name, tuple(requests), size)


def _request(number: int, record: dict[str, Any], first: float, size: int) -> TracedRequest:
    tokens, output = _whole(record, "input_length", least=1), max(1, _whole(record, "output_length", 1, least=0))
    told = record.get("hash_ids")
    if not isinstance(told, list):
        raise ValueError("hash_ids should be a list of numbers")
    ids = [numbered_digest(_checked("a hash id", each, 0, (1 << 64) - 1)) for each in told]
    if len(ids) != -(-tokens // size):
        raise ValueError(f"{len(ids)} hash_ids for {tokens} tokens in blocks of {size}")
    full = tokens // size
    at = (_real(record, "timestamp") - first) / 1e3
    if not 0.0 <= at < 1e9:
        raise ValueError(f"timestamp {record['timestamp']} is before the first one, or decades later")
    return TracedRequest(number, at, tokens, output, tuple(ids[:full]), b"".join(ids[full:]))


def _whole(record: dict[str, Any], name: str, default: int | None = None, *, least: int) -> int:
    """A whole number of a line, within bounds; `default` where it is absent or null."""
    value = record.get(name)
    if value is None and default is not None:
        return default
    return _checked(name, value, least, MOST_TOKENS)


def _checked(name: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} = {shown(value)}: should be a whole number, {least:,} to {most:,}")
    return value


def _real(record: dict[str, Any], name: str) -> float:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST_MS:  # nor NaN
        raise ValueError(f"{name} = {shown(value)}: should be a number of milliseconds")
    return float(value)


def numbered_digest(number: int) -> bytes:
    """A digest for a number below 2**64, another one for each: spread as a hash is."""
    mixed = (number * 0x9E3779B97F4A7C15 + 0x1234567) % (1 << 64)
    return mixed.to_bytes(8, "little") + number.to_bytes(DIGEST_BYTES - 8, "little")
