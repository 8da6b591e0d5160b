"""Pages of SGLang's requests: their hashes as its stores have them, their slots, and which a batch makes whole."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from layerflow.connectors.sglang.page_saves import ComputedPages

PROMPT_MODES = ("EXTEND", "MIXED")
"""SGLang's forward modes whose pages are final: verifying drafts and diffusion write some several times."""


def whole_pages(tokens: int, page: int, *, pairs: bool) -> int:
    """How many pages of so many tokens are whole: with `pairs` the token behind a page's last one must be there."""
    return max(0, tokens - pairs) // page


def page_hashes(
    tokens: array[int],
    page: int,
    *,
    extra_key: str | None,
    cache_salt: str | None,
    prior: str | None = None,
    pairs: bool = False,
) -> list[str]:
    """Of the leading whole pages.

    :param prior: hash of the page before them; None = they are a prompt's first.
    :param pairs: keys are of each token and the next one, as SGLang has them with EAGLE: a draft model's row of a token
        depends on both.
    """
    pages = whole_pages(len(tokens), page, pairs=pairs)
    if not pages:
        return []
    key = RadixKey(tokens[: pages * page + pairs], extra_key, is_bigram=pairs, cache_salt=cache_salt)
    return list(get_storage_hash_str(key, prior, page_size=page))


def fetch_slots(pool: Any, spans: Sequence[tuple[int, int, int]], page: int) -> Callable[[], list[np.ndarray]]:
    """Fetch the slots of requests' pages from the device in one go. Asked for them, int64, this waits for the copy.

    :param pool: SGLang's request pool.
    :param spans: of each request: its row, its first page, and the end of its pages, the last of which may be a part
        of one.
    """
    rows = [pool.req_to_token[row, first * page : end * page : page] for row, first, end in spans]
    there = torch.cat(rows)
    copied: Any = None
    if there.device.type == "cpu":
        here = there
    else:
        here = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
        here.copy_(there, non_blocking=True)
        copied = torch.get_device_module(there.device).Event()
        copied.record()

    def slots() -> list[np.ndarray]:
        if copied is not None:
            copied.synchronize()
        starts = here.to(torch.int64).numpy()
        ends = np.cumsum([(end - first) * page for _, first, end in spans])
        return np.split((starts[:, None] + np.arange(page)).reshape(-1), ends[:-1])

    return slots


class PromptHashes:
    """Page hashes of requests that are computed in several batches: each page is hashed once.

    What a request has generated may be generated anew, so only pages of its prompt are remembered.

    :param pairs: as of :func:`page_hashes`.
    """

    def __init__(self, page: int, *, pairs: bool = False) -> None:
        self._page = page
        self._pairs = pairs
        self._known: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()

    def of(self, request: Any, first: int, end: int) -> list[str]:
        """Of its pages `first` to `end`, as the radix cache's nodes have them."""
        known, page = self._known.get(request, []), self._page
        known = known + page_hashes(
            request.full_untruncated_fill_ids[len(known) * page : end * page + self._pairs],
            page,
            extra_key=request.extra_key,
            cache_salt=request.cache_salt,
            prior=known[-1] if known else None,
            pairs=self._pairs,
        )
        self._known[request] = known[: whole_pages(len(request.origin_input_ids), page, pairs=self._pairs)]
        return known[first:end]


class BatchPages:
    """What batches make whole, the same on every rank.

    :param pool: SGLang's request pool. :param pairs: as of :func:`page_hashes`.
    """

    def __init__(self, pool: Any, page: int, *, pairs: bool = False) -> None:
        self._pool = pool
        self._page = page
        self._pairs = pairs
        self._hashes = PromptHashes(page, pairs=pairs)

    def computed(self, batch: Any, loading: Collection[str]) -> Iterator[ComputedPages]:
        """Tell the pages of a batch's requests that are whole once it has run. Their slots are fetched meanwhile.

        Not of those that only decode: the token that one of them computes with may still be on the device, so the hash
        of its page is not known.

        :param batch: SGLang's. :param loading: ids of its requests of which it loads some.
        """
        requests, spans = [], []
        if batch.forward_mode.name in PROMPT_MODES:
            decoding = {id(each) for each in batch.decoding_reqs or ()}
            for request, start, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=False):
                known = whole_pages(len(request.full_untruncated_fill_ids), self._page, pairs=self._pairs)
                first, end = start // self._page, min((start + count) // self._page, known)
                if first < end and id(request) not in decoding and not _stays_out(request):
                    requests.append(request)
                    spans.append((request.kv.req_pool_idx, first, end))
        if not spans:
            return iter(())
        return self._computed(requests, spans, fetch_slots(self._pool, spans, self._page), frozenset(loading))

    def _computed(
        self,
        requests: Sequence[Any],
        spans: Sequence[tuple[int, int, int]],
        slots: Callable[[], list[np.ndarray]],
        loading: Collection[str],
    ) -> Iterator[ComputedPages]:
        for request, (_, first, end), taken in zip(requests, spans, slots(), strict=True):
            hashes = self._hashes.of(request, first, end)
            yield ComputedPages(request.rid, hashes, taken, loads=request.rid in loading)


def _stays_out(request: Any) -> bool:
    """Does what a request computes never come into the radix cache under its tokens' keys?"""
    return request.skip_radix_cache_insert or (request.session is not None and request.session.streaming)
