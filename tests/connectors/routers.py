"""What routers make of KV cache events, by the rules of their sources: llm-d's KV-cache indexer and Dynamo's router.

Both get the same events. Neither knows layerflow's chunks: they see blocks, parents, tokens and mediums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from layerflow.connectors.common.block_ledger import BlockEvent, StoredBlocks

Prefix = bytes
"""Tokens of a prompt up to the end of a block, behind what a router sees besides tokens (a salt, an adapter): what a
router's own hash stands for."""


@dataclass
class LlmdIndexer:
    """Pods by the router's own key of a block; the engine's hashes only lead to these keys.

    An event whose parent is not known is skipped. A key without pods breaks the prefix. Clearing is for a whole pod.
    """

    pods: dict[Prefix, set[tuple[str, int]]] = field(default_factory=dict)
    keys: dict[bytes, Prefix] = field(default_factory=dict)
    skipped: int = 0

    def take(self, pod: str, events: Sequence[BlockEvent]) -> None:
        for event in events:
            if not isinstance(event, StoredBlocks):
                for block in event.hashes:
                    self._evict(pod, event.state, block)
                continue
            if event.parent is not None and event.parent not in self.keys:
                self.skipped += 1
                continue
            prefix = self.keys[event.parent] if event.parent is not None else event.extra
            size = event.block_tokens * 4
            for at, block in enumerate(event.hashes):
                prefix += event.tokens[at * size : (at + 1) * size]
                self.keys[block] = prefix
                self.pods.setdefault(prefix, set()).add((pod, event.state))

    def _evict(self, pod: str, state: int, block: bytes) -> None:
        prefix = self.keys.get(block)
        if prefix is None:
            return
        there = self.pods.get(prefix, set())
        there.discard((pod, state))
        if not there:
            self.pods.pop(prefix, None)
            del self.keys[block]

    def blocks(self, pod: str, prompt: bytes, size: int, view: bytes = b"") -> int:
        """Leading blocks of a prompt with which a pod is credited, wherever they are."""
        for count in range(len(prompt) // size):
            if not any(pod == each for each, _ in self.pods.get(view + prompt[: (count + 1) * size], ())):
                return count
        return len(prompt) // size


@dataclass
class DynamoRouter:
    """Per worker and tier: how often each block was stored; a block goes when it was removed as often.

    Blocks of another size than the router's are dropped, and so is what follows a parent that no tier has.
    """

    size: int
    counts: dict[tuple[str, int], dict[bytes, int]] = field(default_factory=dict)
    prefixes: dict[tuple[str, bytes], Prefix] = field(default_factory=dict)
    dropped: int = 0

    def take(self, worker: str, events: Sequence[BlockEvent]) -> None:
        for event in events:
            counts = self.counts.setdefault((worker, event.state), {})
            if not isinstance(event, StoredBlocks):
                for block in event.hashes:
                    if block in counts:
                        counts[block] -= 1
                        if not counts[block]:
                            del counts[block]
                continue
            size = event.block_tokens * 4
            repeated = len({event.parent, *event.hashes}) <= len(event.hashes)
            orphan = event.parent is not None and (worker, event.parent) not in self.prefixes
            if size != self.size or repeated or orphan:
                self.dropped += 1
                continue
            prefix = self.prefixes[worker, event.parent] if event.parent is not None else event.extra
            for at, block in enumerate(event.hashes):
                prefix += event.tokens[at * size : (at + 1) * size]
                self.prefixes[worker, block] = prefix
                counts[block] = counts.get(block, 0) + 1

    def blocks(self, worker: str, prompt: bytes, view: bytes = b"") -> int:
        """Leading blocks of a prompt that a worker has, in any tier."""
        held = {
            self.prefixes[worker, block]
            for (each, _), counts in self.counts.items()
            if each == worker
            for block in counts
        }
        count = 0
        while (count + 1) * self.size <= len(prompt) and view + prompt[: (count + 1) * self.size] in held:
            count += 1
        return count


@dataclass
class BlockPlaces:
    """Who reads everything: by pod and cache group, in which states each block is."""

    states: dict[tuple[str, int, bytes], set[int]] = field(default_factory=dict)
    prefixes: dict[tuple[str, bytes], Prefix] = field(default_factory=dict)

    def take(self, pod: str, events: Sequence[BlockEvent]) -> None:
        for event in events:
            if not isinstance(event, StoredBlocks):
                for block in event.hashes:
                    self.states.get((pod, event.group, block), set()).discard(event.state)
                continue
            prefix = self.prefixes[pod, event.parent] if event.parent is not None else event.extra
            size = event.block_tokens * 4
            for at, block in enumerate(event.hashes):
                prefix += event.tokens[at * size : (at + 1) * size]
                self.prefixes[pod, block] = prefix
                self.states.setdefault((pod, event.group, block), set()).add(event.state)

    def of(self, pod: str) -> set[tuple[int, Prefix, int]]:
        """Group, prefix and state of each block of a pod."""
        return {
            (group, self.prefixes[pod, block], state)
            for (each, group, block), states in self.states.items()
            if each == pod
            for state in states
        }
