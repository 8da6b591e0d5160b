"""SGLang's KV pools, with what the connector reads of them, and a worker with such pools and no model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from e2e.known import LOOKUP_S, PATIENCE_S, POISON, eventually

from layerflow.agent import Agent
from layerflow.connectors.sglang.batch_saves import BatchSaves
from layerflow.connectors.sglang.breaker import LoadBreaker
from layerflow.connectors.sglang.layout import KV, MAMBA, SWA, PoolLayout, layout_of
from layerflow.connectors.sglang.loads import Loads
from layerflow.connectors.sglang.page_saves import PageSaves
from layerflow.connectors.sglang.saves import Saves
from layerflow.server import EmbeddedServer
from layerflow.spec import Shard

PAGE, SLOTS, HEADS, SIZE = 4, 128, 4, 8
STATES = 16
WINDOW = 6


class MHATokenToKVPool:
    """Keys and values of every layer: shape ``(slots, heads, size)``."""

    def __init__(self, layers: int, heads: int = HEADS, slots: int = SLOTS, size: int = SIZE) -> None:
        self.layer_num = layers
        self.k_buffer = [torch.full((slots, heads, size), POISON, dtype=torch.uint8) for _ in range(layers)]
        self.v_buffer = [torch.full((slots, heads, size), POISON, dtype=torch.uint8) for _ in range(layers)]


class MLATokenToKVPool:
    """A latent row of every layer: shape ``(slots, 1, size)``."""

    def __init__(self, layers: int, slots: int = SLOTS, size: int = 24) -> None:
        self.layer_num = layers
        self.kv_buffer = [torch.full((slots, 1, size), POISON, dtype=torch.uint8) for _ in range(layers)]


class SWAKVPool:
    """Even layers see all, odd ones a window."""

    def __init__(self, layers: int, heads: int = HEADS) -> None:
        self.full_kv_pool = MHATokenToKVPool((layers + 1) // 2, heads)
        self.swa_kv_pool = MHATokenToKVPool(layers // 2, heads, slots=SLOTS // 2)
        self.layers_mapping = {layer: (layer // 2, bool(layer % 2)) for layer in range(layers)}


class HybridLinearKVPool:
    """One layer in four has attention, the others have states of their own (:func:`states`)."""

    def __init__(self, full_kv_pool: Any) -> None:
        self.full_kv_pool = full_kv_pool
        self.full_attention_layer_id_mapping = {4 * at + 3: at for at in range(full_kv_pool.layer_num)}


def states(layers: int = 3, width: int = 40, **side: Any) -> Any:
    """A request pool of SGLang's, as far as it is about states."""
    cache = SimpleNamespace(
        temporal=torch.full((layers, STATES, 2, width), POISON, dtype=torch.uint8),
        conv=[torch.full((layers, STATES, width), POISON, dtype=torch.uint8)],
        **{name: side.pop(name) for name in list(side) if name.startswith("replayssm")},
    )
    numbers = {layer: at for at, layer in enumerate(each for each in range(4 * layers) if each % 4 != 3)}
    mamba_map = {layer: at for layer, at in numbers.items() if at < layers}
    return SimpleNamespace(mamba_pool=SimpleNamespace(mamba_cache=cache), mamba_map=mamba_map, **side)


def pools_of(kind: str, shard: Shard) -> tuple[Any, Any, int]:
    """One worker's pools of a kind of model: its cache, its states, its window."""
    heads = max(1, HEADS // shard.tp_size)
    if kind == "swa":
        return SWAKVPool(4, heads), None, WINDOW
    if kind == "hybrid":
        return HybridLinearKVPool(MHATokenToKVPool(1, heads)), states(width=40 // shard.tp_size), 0
    if kind == "hybrid-mla":
        return HybridLinearKVPool(MLATokenToKVPool(1)), states(width=40 // shard.tp_size), 0
    if kind == "mla":
        return MLATokenToKVPool(3), None, 0
    if kind == "one-head":
        return MHATokenToKVPool(3, 1), None, 0
    return MHATokenToKVPool(3, heads), None, 0


def layout(kind: str, rank: int = 0, size: int = 1, page: int = PAGE) -> PoolLayout:
    """Of a kind of model, ``-draft`` behind which is one with a draft model of two layers."""
    shard = Shard(rank, size)
    kind, draft, _ = kind.partition("-draft")
    kvcache, held, window = pools_of(kind, shard)
    heads = 1 if kind == "one-head" else HEADS
    drafts = [(MHATokenToKVPool(2, max(1, HEADS // size)), HEADS)] if draft else []
    return layout_of(kvcache, held, page, window, {KV: heads, SWA: heads}, shard, drafts)


class PoolWorker:
    """One rank of an SGLang whose cached bytes follow from the page's hash alone.

    :param kind: of model, see :func:`pools_of`.
    """

    def __init__(
        self,
        server: EmbeddedServer,
        kind: str = "mha",
        rank: int = 0,
        size: int = 1,
        engine: str = "sglang",
        timeout_s: float | None = PATIENCE_S,
    ) -> None:
        self.layout = layout(kind, rank, size)
        self.rank = rank
        spec = msgspec.structs.replace(self.layout.spec, content=f"known {kind}")
        self.agent = Agent(
            server.endpoint,
            spec,
            self.layout.tensors,
            engine,
            context=server.context,
            wait_s=PATIENCE_S,
            lookup_timeout_s=LOOKUP_S,
        )
        self.breaker = LoadBreaker()
        self.loads = Loads(self.agent, self.layout, after=self.agent.record, timeout_s=timeout_s, breaker=self.breaker)
        self.batches = BatchSaves(self.agent, self.layout, written=self.agent.record, passed=self.agent.record)
        self.pages = PageSaves(self.agent, self.layout, self.batches)
        self.saves = Saves(self.agent, self.layout, self.pages, written=self.agent.record)
        self._random = np.random.default_rng(rank)

    def __enter__(self) -> PoolWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.agent.close()

    # -- slots and bytes --------------------------------------------------------------------------

    def slots(self, pages: int) -> dict[str, np.ndarray]:
        """Slots that a request of so many pages is given, whole pages in no order, as SGLang hands them over."""
        found = {}
        for group in self.layout.groups:
            if group.pool == MAMBA:
                found[MAMBA] = self._random.integers(0, STATES, 1)
                continue
            held = min(pages, -(-WINDOW // PAGE)) if group.pool == SWA else pages
            limit = (SLOTS // 2 if group.pool == SWA else SLOTS) // PAGE
            numbers = self._random.permutation(limit)[:held]
            found[group.pool] = (numbers[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
        return found

    def compute(self, hashes: Sequence[str], slots: Mapping[str, np.ndarray]) -> None:
        """Write what a forward pass would."""
        for view, rows, known in self._places(hashes, slots):
            view[rows] = known

    def wrong_bytes(self, hashes: Sequence[str], slots: Mapping[str, np.ndarray]) -> int:
        return sum(int((view[rows] != known).sum()) for view, rows, known in self._places(hashes, slots))

    def changed_bytes(self, slots: Mapping[str, np.ndarray]) -> int:
        """Bytes of other slots than these that are not as they were made."""
        changed = 0
        for number, group in enumerate(self.layout.groups):
            given = slots.get(group.pool, np.empty(0, np.int64))
            for layer in self.agent.spec.groups[number].layers:
                for tensor in self.layout.tensors[layer].values():
                    view = tensor.reshape(-1, *tensor.shape[2:]).numpy()
                    others = np.setdiff1d(np.arange(len(view)), given)
                    changed += int((view[others] != POISON).sum())
        return changed

    def _places(self, hashes: Sequence[str], slots: Mapping[str, np.ndarray]) -> Any:
        """By layer and plane: its rows (tokens or states), those that the request has, and what belongs there."""
        spec = self.agent.spec
        for number, group in enumerate(self.layout.groups):
            given = slots[group.pool]
            pages = list(hashes[-1:]) if group.pool == MAMBA else list(hashes[len(hashes) - len(given) // PAGE :])
            for layer in spec.groups[number].layers:
                for name, tensor in self.layout.tensors[layer].items():
                    view = tensor.reshape(-1, *tensor.shape[2:]).numpy()
                    rows = 1 if group.pool == MAMBA else PAGE
                    known = np.concatenate(
                        [self._known(each, layer, name, rows, view.shape[1:], group.pool) for each in pages]
                    )
                    yield view, given, known

    def _known(self, page: str, layer: int, plane: str, rows: int, shape: tuple[int, ...], pool: str) -> np.ndarray:
        """Of all heads the same on every rank; this one has its own of them."""
        seed = hashlib.sha256(f"{page} {layer} {plane}".encode()).digest()
        if pool == MAMBA or plane == "latent":
            seed += bytes([self.rank]) * (pool == MAMBA)
            return np.random.default_rng(list(seed)).integers(0, 256, (rows, *shape), np.uint8)
        heads = HEADS if shape[0] > 1 else self.agent.spec.shard.heads[0]
        whole = np.random.default_rng(list(seed)).integers(0, 256, (rows, heads, shape[-1]), np.uint8)
        first = self.rank * shape[0] % heads
        return whole[:, first : first + shape[0]]

    # -- what SGLang does -------------------------------------------------------------------------

    def save(self, hashes: Sequence[str], *, wait: bool = True) -> None:
        """A node is computed and inserted."""
        slots = self.slots(len(hashes))
        self.compute(hashes, slots)
        self.saves.begin(hashes, slots, allowed=True)
        if wait:
            assert eventually(lambda: self.saves.ended() == 1)
            assert self.saves.take()

    def forward(self, number: int) -> None:
        """Every layer is asked for twice, its keys and its values."""
        layers = range(self.agent.spec.num_layers)
        for layer in [*layers, *layers]:
            self.loads.wait(number, layer)


def page_hashes(pages: int, seed: int = 0) -> list[str]:
    """As SGLang makes them: SHA-256 in hex."""
    return [hashlib.sha256(f"{seed} {number}".encode()).hexdigest() for number in range(pages)]


def crawl(agent: Agent, server: EmbeddedServer, gbps: float = 1e-7) -> None:
    """From here on the link moves so many gigabytes a second. As it is, 1 KB takes 10 s: what is moved is under way
    whenever a test goes on. Needs an emulated link.
    """

    def apply() -> None:
        running = server.server
        slow = running.settings.pool.model_copy(update={"link_gbps": gbps})
        running.settings = running.settings.model_copy(update={"pool": slow})
        transfer = running.settings.transfer.model_copy(update={"step_timeout_ms": 59_999})
        running.apply(running.settings.model_copy(update={"transfer": transfer}))

    server.call(apply)
    assert eventually(lambda: agent.terms is not None and agent.terms.link_gbps < 0.001)
