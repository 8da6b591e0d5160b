"""Storages of HiCache that are measured beside layerflow's linker: files behind a slow link, and layerflow's own pool.

SGLang loads them by name (``--hicache-storage-backend dynamic``). Both move whole pages, all layers of each, as HiCache
does with any storage.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorage

from layerflow.agent import Agent
from layerflow.agent.values import StepRequest
from layerflow.spec import GroupSpec, ModelSpec, Plane

LOAD_S = 30.0


class PacedFiles(HiCacheFile):  # type: ignore[misc]
    """SGLang's own files, read no faster than ``bytes_per_s``: what the link of a remote file system is."""

    def __init__(self, config: Any, options: Any) -> None:
        super().__init__(config)
        self._rate = float(config.extra_config["bytes_per_s"])
        self._free_at = 0.0

    def get(self, key: str, target_location: torch.Tensor, target_sizes: Any = None) -> torch.Tensor | None:
        """One page."""
        page = super().get(key, target_location, target_sizes)
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + target_location.nbytes / self._rate
        time.sleep(self._free_at - now)
        return page


class PoolPages(HiCacheStorage):  # type: ignore[misc]
    """HiCache's pages in the pool of a ``layerflow run``, over the same link as the linker's."""

    def __init__(self, config: Any, options: Any) -> None:
        self._endpoint = config.extra_config["endpoint"]
        self._names = itertools.count()
        self._opening = threading.Lock()  #: one thread reads, another one writes

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """A page of host memory, all layers of it, is one block of a model of one layer."""
        super().register_mem_pool_host(mem_pool_host)
        planes = {
            name: buffer.view(buffer.shape[0], -1, *buffer.shape[3:])
            for name, buffer in zip("kv", mem_pool_host.kv_buffer, strict=True)
        }
        rows = planes["k"].shape[1]
        kinds = tuple(
            Plane(name, str(plane.dtype).removeprefix("torch."), tuple(plane.shape[2:]))
            for name, plane in planes.items()
        )
        spec = ModelSpec("hicache", "pages", (GroupSpec("full", rows, (0,), kinds),), chunk_tokens=rows)
        self._rows = rows
        self._agent = Agent(self._endpoint, spec, {0: planes}, "hicache", name="hicache", lookup_timeout_s=1.0)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages are stored."""
        return self._agent.lookup(self._name(), self._chain(keys)).tokens // self._rows

    def exists(self, key: str) -> bool:
        """Is it stored?"""
        return bool(self.batch_exists([key]))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Load pages into host memory."""
        chain, name = self._chain(keys), self._name()
        with self._opening:
            hit = self._agent.lookup(name, chain)
            request = StepRequest(name, chain, self._blocks(host_indices), load=(0, hit.tokens), hit=hit)
            step = self._agent.open_step([request], LOAD_S)
        with step:
            step.wait_loaded(LOAD_S)
            there = step.wait_all().ready
        return [there and number < hit.tokens // self._rows for number in range(len(keys))]

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Save pages of host memory."""
        chain, name = self._chain(keys), self._name()
        with self._opening:
            request = StepRequest(name, chain, self._blocks(host_indices), save=(0, len(keys) * self._rows))
            step = self._agent.open_step([request])
        with step:
            step.layer_done(0, None)
        return [self._agent.wait_idle(name, LOAD_S)] * len(keys)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Unused: pages are read in batches."""
        raise NotImplementedError

    batch_get = set = batch_set = get

    def _name(self) -> str:
        return f"pages-{next(self._names)}"

    def _chain(self, keys: Sequence[str]) -> Any:
        return self._agent.hashed_chain([key.encode() for key in keys])

    def _blocks(self, host_indices: torch.Tensor) -> list[np.ndarray]:
        page = self.mem_pool_host.page_size
        return [(host_indices[::page] // page).to("cpu", torch.int64).numpy()]
