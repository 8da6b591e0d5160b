"""Are the bytes the same? And would anybody notice if they were not: one layer spoilt on purpose."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import TracebackType

import numpy as np
import torch

from layerflow_cli.demo.engines import KvBytes
from layerflow_engine.cache import PagedCache
from layerflow_engine.connection import StepHooks
from layerflow_engine.glue import LayerflowConnection
from layerflow_engine.request import TokenSpan


def wrong_bytes(expected: KvBytes, found: KvBytes) -> int:
    """Bytes that differ, over all layers and planes; a plane that one side lacks is wrong as a whole."""
    wrong = 0
    for key in expected.keys() | found.keys():
        one, other = expected.get(key), found.get(key)
        if one is None or other is None or one.shape != other.shape:
            wrong += max(0 if one is None else one.size, 0 if other is None else other.size)
        else:
            wrong += int(np.count_nonzero(one != other))
    return wrong


class Spoiling(LayerflowConnection):
    """Turns the sign of one layer's KV after it was loaded, before the engine sees it.

    :param layer: the numbers of its caches.
    """

    def __init__(self, honest: LayerflowConnection, cache: PagedCache, layer: Sequence[int]) -> None:
        super().__init__(honest.agent, honest.mode)
        self._cache, self._layer = cache, layer

    def open_step(self, spans: Sequence[TokenSpan]) -> StepHooks:
        """See :class:`LayerflowConnection`."""
        return _SpoilingStep(super().open_step(spans), spans, self._cache, self._layer)


class _SpoilingStep:
    def __init__(self, honest: StepHooks, spans: Sequence[TokenSpan], cache: PagedCache, layer: Sequence[int]) -> None:
        self._honest, self._spans, self._cache, self._layer = honest, spans, cache, layer

    def wait_layer(self, layer: int) -> Collection[str]:
        failed = self._honest.wait_layer(layer)
        if layer in self._layer:
            group = self._cache.group_of[layer]
            for span in self._spans:
                table = span.request.tables[group][: span.load // self._cache.groups[group].block_size]
                blocks = torch.from_numpy(table[table >= 0])
                for plane in self._cache.tensors[layer].values():
                    self._cache.put(plane, blocks, -self._cache.read(plane, blocks))
        return failed

    def layer_done(self, layer: int) -> None:
        self._honest.layer_done(layer)

    def __enter__(self) -> StepHooks:
        self._honest.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._honest.__exit__(kind, error, trace)
