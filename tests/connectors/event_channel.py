"""What a publisher of KV cache events has told, read as a router reads it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

ANSWER_MS = 30_000
THE_END = (-1).to_bytes(8, "big", signed=True)

Place = tuple[int, str]
"""Cache group and medium; an engine that tells no groups has one."""
Prefixes = dict[Place, set[tuple[int, ...]]]
"""By place: the tokens of each block, with all before it."""


class Channel:
    """A publisher's endpoints, and what it has published so far.

    :param mediums: those of the pool.
    """

    def __init__(self, folder: Path, name: str, mediums: Sequence[str]) -> None:
        self._replay = f"ipc://{folder}/{name}-replay"
        self._mediums = mediums
        self.endpoint = f"ipc://{folder}/{name}"
        self.config = {"publisher": "zmq", "endpoint": self.endpoint, "replay_endpoint": self._replay}

    def events(self) -> list[dict[str, Any]]:
        """All events, oldest first."""
        return [event for batch in self.batches() for event in msgspec.msgpack.decode(batch)[1]]

    def batches(self) -> list[bytes]:
        """All that was published, as it came over the socket, oldest first."""
        found: list[bytes] = []
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(self._replay)
            dealer.send_multipart([b"", (0).to_bytes(8, "big")])
            while True:
                assert dealer.poll(ANSWER_MS), "the publisher does not answer"
                *_, number, batch = dealer.recv_multipart()
                if number == THE_END:
                    return found
                found.append(batch)

    def believed(self, *, mediums: Sequence[str] = ()) -> dict[Place, dict[Any, tuple[Any, list[int]]]]:
        """What a router knows that has heard all of it.

        :param mediums: others than the pool's.
        """
        return believed(self.events(), mediums or self._mediums)

    def wait(self, wanted: Prefixes) -> None:
        """Until a router knows exactly this."""
        until = time.monotonic() + ANSWER_MS / 1e3
        while (found := prefixes(self.believed())) != wanted:
            assert time.monotonic() < until, f"told {sizes(found)}, wanted {sizes(wanted)}"
            time.sleep(0.05)

    def wait_for(self, what: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Until its events are such."""
        until = time.monotonic() + ANSWER_MS / 1e3
        while not what(self.events()):
            assert time.monotonic() < until
            time.sleep(0.05)


def believed(events: Sequence[dict[str, Any]], mediums: Sequence[str]) -> dict[Place, dict[Any, tuple[Any, list[int]]]]:
    """What a router knows: by place, the parent and tokens of each block."""
    known: dict[Place, dict[Any, tuple[Any, list[int]]]] = {}
    cleared = False
    for event in events:
        if event["type"] == "AllBlocksCleared":
            cleared = True
            known.clear()
        if event.get("medium") not in mediums:
            continue
        blocks = known.setdefault((event.get("group_idx") or 0, event["medium"]), {})
        if event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                assert blocks.pop(block, None) or cleared, "a block is taken back that was not told"
            continue
        size, parent = event["block_size"], event.get("parent_block_hash")
        for at, block in enumerate(event["block_hashes"]):
            assert block not in blocks, "a block is told twice"
            blocks[block] = parent, event["token_ids"][at * size : (at + 1) * size]
            parent = block
    return known


def prefixes(known: dict[Place, dict[Any, tuple[Any, list[int]]]]) -> Prefixes:
    """The tokens of each block that a router knows, with all before it, which may lie in another medium."""
    groups: dict[int, dict[Any, tuple[Any, list[int]]]] = {}
    for (group, _), blocks in known.items():
        groups.setdefault(group, {}).update(blocks)

    def whole(blocks: dict[Any, tuple[Any, list[int]]], block: Any) -> list[int]:
        parent, tokens = blocks[block]
        return (whole(blocks, parent) if parent is not None else []) + tokens

    return {
        place: {tuple(whole(groups[place[0]], block)) for block in blocks} for place, blocks in known.items() if blocks
    }


def sizes(found: Prefixes) -> dict[Place, list[int]]:
    """Of each block, how many tokens it ends behind."""
    return {place: sorted(map(len, each)) for place, each in found.items()}
