"""Who computed which beginnings of prompts: a bounded table of hashed prefixes.

A prompt's bytes are cut into blocks of 1 KiB. Each block has a digest over itself and all before it, so one number
stands for a whole beginning. Least recently used beginnings are forgotten first.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec
import xxhash

from layerflow.proxy.body import NOT_JSON, Body
from layerflow.proxy.instances.instance import Instance

BLOCK_BYTES = 1024
MAX_BLOCKS = 1024
_MOST_BYTES = MAX_BLOCKS * BLOCK_BYTES
_BUILT_BYTES = 256 << 10
"""Of JSON, whose values the loop builds: 2 ms of a usual conversation."""
_BLANKS = b" \t\r\n"
_LONGEST_ESCAPE = 12  # bytes of JSON for one character: two surrogates
MAX_HOLDERS = 4
"""Engines that are remembered for one beginning: more of them would not make a pick better."""


def prompt_bytes(body: Body, prompt: bytes) -> bytes:
    """What decides a prompt's KV, as bytes: the same beginning of a prompt gives the same beginning of bytes.

    At most what :func:`digests` looks at, whatever the prompt's length.

    :param body: a completion, or a chat completion.
    :param prompt: the JSON of its prompt, or of the first one of its list.
    """
    head = b"".join(_canonical(body.raw(name)) for name in ("model", "cache_salt", "tools"))
    if "messages" in body:
        return head + _canonical(body.raw("messages"))
    start = prompt[:_MOST_BYTES]
    if start[:1] != b'"':
        return head + start.translate(None, _BLANKS)  # JSON has one way to write a token's number
    try:
        return head + _text(start).encode(errors="surrogatepass")
    except NOT_JSON:
        return head + start  # one that only the engine can read: it says so


def _text(start: bytes) -> str:
    """Of a text's JSON that may end anywhere. :raises msgspec.DecodeError: it is none."""
    whole = start[-1:] == b'"'
    for cut in range(_LONGEST_ESCAPE):
        try:
            return msgspec.json.decode(start if whole and not cut else start[: len(start) - cut] + b'"', type=str)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    raise msgspec.DecodeError("the prompt is not a text")


def _canonical(raw: bytes) -> bytes:
    """The same for every client, however its JSON is written; of what is long, the beginning as it is."""
    if len(raw) > _BUILT_BYTES:
        return raw[:_MOST_BYTES]
    try:
        return msgspec.json.encode(msgspec.json.decode(raw))
    except NOT_JSON:
        return raw


def digests(content: bytes) -> list[int]:
    """Of each beginning that ends at a block, shortest first; at most :data:`MAX_BLOCKS`."""
    found: list[int] = []
    before = 0
    for number in range(min(len(content) // BLOCK_BYTES, MAX_BLOCKS)):
        block = content[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
        before = xxhash.xxh3_64_intdigest(struct.pack("<Q", before) + block)
        found.append(before)
    return found


class PrefixTable:
    """Which engines have which beginnings.

    :param most: beginnings remembered.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # Holders by the generation in which they had it: an engine that was down has lost it.
        self._holders: OrderedDict[int, dict[Instance, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def matched(self, beginnings: Sequence[int], instances: Iterable[Instance]) -> dict[Instance, int]:
        """How many of the leading blocks each of the instances has; those that have none are left out."""
        longest: dict[Instance, int] = {}
        wanted = set(instances)
        for count, digest in enumerate(beginnings, 1):
            holders = self._holders.get(digest)
            if holders is None:
                break
            self._holders.move_to_end(digest)
            for instance, generation in holders.items():
                if instance in wanted and generation == instance.generation:
                    longest[instance] = count
        return longest

    def record(self, beginnings: Sequence[int], instance: Instance) -> None:
        """The instance has computed a prompt with these beginnings."""
        for digest in beginnings if self._most else ():
            holders = self._holders.setdefault(digest, {})
            self._holders.move_to_end(digest)
            holders.pop(instance, None)
            holders[instance] = instance.generation
            if len(holders) > MAX_HOLDERS:
                del holders[next(iter(holders))]
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def clear(self) -> None:
        """The engines' prefix caches were emptied."""
        self._holders.clear()
