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

from layerflow.errors import ConfigError
from layerflow.keys import DIGEST_BYTES

BLOCK_TOKENS = 512
"""Of a block of Mooncake's traces, whose lines do not tell."""


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
        raise ConfigError(f"{path}: cannot be read: {error}") from error


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
            told = int(record.get("block_size") or block_tokens)
            if requests and told != size:
                raise ValueError(f"blocks of {told} tokens, and of {size} before")
            size = told
            if not requests:
                first = float(record["timestamp"])
            requests.append(_request(len(requests), record, first, size))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            what = f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{name}, line {number}: {what}; it is no request of a trace") from error
    if not requests:
        raise ConfigError(f"{name}: no request in it")
    requests.sort(key=lambda request: (request.at, request.number))
    return RequestTrace(name, tuple(requests), size)


def _request(number: int, record: dict[str, Any], first: float, size: int) -> TracedRequest:
    tokens, output = int(record["input_length"]), max(1, int(record.get("output_length", 1)))
    ids = [_digest(each) for each in record["hash_ids"]]
    if size < 1:
        raise ValueError(f"block_size {size} must be positive")
    if tokens < 1 or len(ids) != -(-tokens // size):
        raise ValueError(f"{len(ids)} hash_ids for {tokens} tokens in blocks of {size}")
    full = tokens // size
    at = (float(record["timestamp"]) - first) / 1e3
    if not 0.0 <= at < 1e9:
        raise ValueError(f"timestamp {record['timestamp']} is before the first one, or decades later")
    return TracedRequest(number, at, tokens, output, tuple(ids[:full]), b"".join(ids[full:]))


def _digest(number: object) -> bytes:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 64:
        raise ValueError(f"hash id {number!r} is no number")
    return numbered_digest(number)


def numbered_digest(number: int) -> bytes:
    """A digest for a number below 2**64, another one for each: spread as a hash is."""
    mixed = (number * 0x9E3779B97F4A7C15 + 0x1234567) % (1 << 64)
    return mixed.to_bytes(8, "little") + number.to_bytes(DIGEST_BYTES - 8, "little")
