"""Who computed which beginnings of prompts: a bounded table of hashed prefixes.

A prompt's bytes are cut into blocks of 1 KiB. Each block has a digest over itself and all before it, so one number
stands for a whole beginning. Least recently used beginnings are forgotten first.
"""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from layerflow.proxy.instances.instance import Instance

BLOCK_BYTES = 1024
MAX_BLOCKS = 1024
MAX_HOLDERS = 4
"""Engines that are remembered for one beginning: more of them would not make a pick better."""


def prompt_bytes(body: Mapping[str, Any]) -> bytes:
    """What decides a prompt's KV, as bytes: the same beginning of a prompt gives the same beginning of bytes.

    :param body: a completion (of a list of prompts the first counts), or a chat completion.
    """
    head = msgspec.json.encode([body.get("model"), body.get("cache_salt"), body.get("tools")])
    if "messages" in body:
        return head + msgspec.json.encode(body["messages"])
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return head + prompt.encode(errors="surrogatepass")
    try:
        return head + array("q", prompt or []).tobytes()
    except (TypeError, OverflowError):
        return head  # not a prompt: the engine says so


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
