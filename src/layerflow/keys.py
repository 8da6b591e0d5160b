"""Token ids to chained chunk digests and object keys.

``digest(chunk) = H(digest(previous chunk), tokens, media)`` and the chain starts at
:func:`root_digest`, so every fact that changes cached bytes changes every key, and nothing else
does: no environment variable, no process-local hash seed.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from layerflow.boxes import worker_box
from layerflow.errors import BadKey
from layerflow.spec import Shard

DIGEST_BYTES = 16
KEY_BYTES = 24
_MAX_TOKEN = 2**63 - 1
_TOKEN_BYTES = 8
_HIGH_BYTE = 7 if sys.byteorder == "little" else 0
_PIECE_BYTES = 1024
"""hashlib lets go of the interpreter from 2 KiB on. Beside a thread that runs Python, that costs 5 ms each time, and
this happens while an engine schedules."""
_DRAFT = 1 << 15
_RANKED = 0xFFF
_SUFFIX = struct.Struct("<HHHBB")


class Media(NamedTuple):
    """A multimodal input's place in the prompt: its content decides the KV of those positions."""

    start: int
    length: int
    content: bytes


@functools.lru_cache(1024)
def root_digest(fingerprint: bytes, *, adapter: str = "", salt: str = "") -> bytes:
    """Where a request's chain starts.

    :param fingerprint: :attr:`layerflow.spec.ModelSpec.fingerprint`.
    :param adapter: identity of a LoRA or other adapter, by content or version, never by slot number.
    :param salt: the tenant's cache salt.
    """
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"layerflow-root")
    for part in (fingerprint, adapter.encode(), salt.encode()):
        hasher.update(struct.pack("<I", len(part)))
        hasher.update(part)
    return hasher.digest()


def chunk_digest(parent: bytes, ids: memoryview, media: Sequence[Media] = ()) -> bytes:
    """Digest of one chunk, full or partial.

    :param parent: digest of the chunk before, or the root.
    :param ids: bytes of the chunk's token ids, int64, little-endian.
    :param media: those that overlap this chunk, starts relative to the chunk.
    """
    hasher = chunk_hasher(parent)
    feed(hasher, ids)
    for start, length, content in media:
        hasher.update(struct.pack("<qqI", start, length, len(content)))
        hasher.update(content)
    return hasher.digest()


def chunk_hasher(parent: bytes) -> hashlib.blake2b:
    """For a chunk after `parent`, before its first token."""
    return hashlib.blake2b(parent, digest_size=DIGEST_BYTES, person=b"layerflow-chunk")


def feed(hasher: hashlib.blake2b, ids: memoryview) -> None:
    """Hash token ids in pieces for which hashlib keeps the interpreter."""
    for start in range(0, len(ids), _PIECE_BYTES):
        hasher.update(ids[start : start + _PIECE_BYTES])


class Chain:
    """The digests of one request, computed once.

    :param root: from :func:`root_digest`.
    :param tokens: the prompt's token ids.
    :param chunk_tokens: tokens of a full chunk.
    :param media: multimodal inputs, in prompt order.
    :param model: the fingerprint that `root` was made from, so that chains of replaced weights are told from others;
        empty = not known.
    :raises BadKey: for token ids that are not integers of 63 bits, or a chunk length below 1.
    """

    def __init__(
        self,
        root: bytes,
        tokens: Sequence[int] | np.ndarray,
        chunk_tokens: int,
        media: Sequence[Media] = (),
        *,
        model: bytes = b"",
    ):
        if chunk_tokens < 1:
            raise BadKey(f"chunk_tokens {chunk_tokens} must be at least 1")
        self._ids = _token_ids(tokens)
        self.model = model
        self.chunk_tokens = chunk_tokens
        self._media = tuple(media)
        self.digests: list[bytes] = []
        self._parents = [root]
        self._block_digests: dict[tuple[int, int], bytes] = {}
        self._digest_full_chunks()

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append what was generated, so that chunks which fill up while decoding can be saved too.

        :raises BadKey: as the constructor.
        """
        self._ids = self._ids + _token_ids(tokens)  # another array: somebody may be reading the old one
        self._digest_full_chunks()

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def tokens(self) -> np.ndarray:
        """The token ids: int64, shape ``(n,)``. Not to be written to."""
        return np.frombuffer(self._ids, np.int64)

    def _digest_full_chunks(self) -> None:
        for index in range(len(self.digests), len(self._ids) // self.chunk_tokens):
            digest = self.partial(index, self.chunk_tokens)
            self.digests.append(digest)
            self._parents.append(digest)

    def parent(self, chunk: int) -> bytes:
        """Digest of what comes before chunk `chunk`."""
        return self._parents[chunk]

    @property
    def tail(self) -> bytes:
        """Digest of what the full chunks leave of the prompt; empty = they leave nothing."""
        full = len(self.digests)
        rest = len(self) - full * self.chunk_tokens
        return self.partial(full, rest) if rest else b""

    def partial(self, chunk: int, tokens: int) -> bytes:
        """Digest of chunk `chunk` if it held only its first `tokens` tokens."""
        media = self._media_of(chunk, tokens)
        return chunk_digest(self._parents[chunk], self._bytes_of(chunk, tokens), media)

    def block_digests(self, chunk: int, block_tokens: int, tokens: int = 0) -> bytes:
        """:meth:`partial` of the chunk's first block, its first two, and so on, as far as there are tokens.

        :param block_tokens: tokens of a block.
        :param tokens: of the chunk; 0 = as many as it has.
        """
        held = min(tokens or self.chunk_tokens, len(self) - chunk * self.chunk_tokens)
        count = max(0, held // block_tokens)
        known = self._block_digests.get((chunk, block_tokens), b"")
        if len(known) < count * DIGEST_BYTES:
            known = self._digest_blocks(chunk, block_tokens, count)
            self._block_digests[chunk, block_tokens] = known
        return known[: count * DIGEST_BYTES]

    def _digest_blocks(self, chunk: int, block_tokens: int, count: int) -> bytes:
        held = count * block_tokens
        if self._media_of(chunk, held):
            return b"".join(self.partial(chunk, end) for end in range(block_tokens, held + 1, block_tokens))
        hasher, ids = chunk_hasher(self._parents[chunk]), self._bytes_of(chunk, held)
        digests = []
        for end in range(block_tokens, held + 1, block_tokens):
            feed(hasher, ids[(end - block_tokens) * _TOKEN_BYTES : end * _TOKEN_BYTES])
            digests.append(hasher.copy().digest())
        return b"".join(digests)

    def _media_of(self, chunk: int, tokens: int) -> list[Media]:
        start = chunk * self.chunk_tokens
        return [
            Media(item.start - start, item.length, item.content)
            for item in self._media
            if item.start < start + tokens and item.start + item.length > start
        ]

    def _bytes_of(self, chunk: int, tokens: int) -> memoryview:
        start, ids = chunk * self.chunk_tokens, self._ids
        if sys.byteorder != "little":
            ids = ids[:]
            ids.byteswap()
        return memoryview(ids)[start : start + tokens].cast("B")


class HashedChain(Chain):
    """A prompt's digests, made from page hashes of the engine's own; its tokens are not known.

    A page is a chunk. The engine has left out the token that it computes itself, so a hit may end with the last page.
    Nothing but whole pages has a digest: no hit ends inside of one.

    :param root: from :func:`root_digest`.
    :param hashes: of the leading full pages, in order. Each stands for all tokens before its page's end, and for
        whatever else of the request decides its KV. They may begin at any page of the prompt: the chain is then that of
        the rest.
    :param page_tokens: tokens of a page.
    :param model: as of :class:`Chain`.
    :raises BadKey: a page length below 1.
    """

    def __init__(self, root: bytes, hashes: Sequence[bytes], page_tokens: int, *, model: bytes = b""):
        super().__init__(root, [], page_tokens, model=model)
        for each in hashes:
            hasher = hashlib.blake2b(each, digest_size=DIGEST_BYTES, key=root, person=b"layerflow-page")
            self.digests.append(hasher.digest())
        self._length = len(hashes) * page_tokens + 1
        if page_tokens == 1:  # the token that was left out is a chunk of its own, which nobody ever stores
            self.digests.append(hashlib.blake2b(digest_size=DIGEST_BYTES, key=root, person=b"layerflow-left").digest())
        self._parents += self.digests

    def __len__(self) -> int:
        return self._length

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """:raises BadKey: always."""
        raise BadKey("a chain of page hashes has no tokens; make another one of more hashes")

    @property
    def tokens(self) -> np.ndarray:
        """:raises BadKey: always."""
        raise BadKey("a chain of page hashes has no tokens")

    @property
    def tail(self) -> bytes:
        """Empty: only whole pages have digests."""
        return b""

    def partial(self, chunk: int, tokens: int) -> bytes:
        """Digest of a whole page; empty for a part of one."""
        return self.digests[chunk] if tokens == self.chunk_tokens and chunk < len(self.digests) else b""

    def block_digests(self, chunk: int, block_tokens: int, tokens: int = 0) -> bytes:
        """Empty."""
        return b""


def _token_ids(tokens: Sequence[int] | np.ndarray) -> array[int]:
    """Without numpy for what an engine passes, a list: each of its calls costs 10 us where nothing is in the caches."""
    ids = array("Q")
    try:
        if not isinstance(tokens, np.ndarray):
            ids = array("Q", tokens if isinstance(tokens, list) else list(tokens))
        elif tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise TypeError(f"{tokens.dtype} of shape {tokens.shape}")
        else:
            ids.frombytes(tokens.astype(np.int64).tobytes())
    except (TypeError, OverflowError) as error:
        raise BadKey(f"token ids must be one list of integers, 0 to {_MAX_TOKEN}: {error}") from None
    if not memoryview(ids).cast("B")[_HIGH_BYTE::8].tobytes().isascii():  # a number of 64 bits, or negative in numpy
        raise BadKey(f"token ids must be 0 to {_MAX_TOKEN}; the largest is {max(ids)}")
    return ids


def leading_blocks(own: bytes, other: bytes) -> int:
    """How many leading blocks two chunks share, by their block digests: of these each stands for all before it."""
    low, high = 0, min(len(own), len(other)) // DIGEST_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        at = slice((middle - 1) * DIGEST_BYTES, middle * DIGEST_BYTES)
        if own[at] == other[at]:
            low = middle
        else:
            high = middle - 1
    return low


def object_key(digest: bytes, group: int, shard: Shard) -> bytes:
    """24 bytes: the chunk's digest, the group, and the layers and heads that its objects of this shard cover.

    Shards that hold the same ones have the same key. Where neither is known, the key holds the worker's ranks.
    """
    return digest + covered_by(group, shard)


def object_keys(digests: Iterable[bytes], groups: Iterable[int], shards: Sequence[Shard]) -> list[bytes]:
    """:func:`object_key` of many: by digest, then group, then shard."""
    ends = [covered_by(group, shard) for group in groups for shard in shards]
    return [digest + end for digest in digests for end in ends]


def several_key(fingerprint: bytes) -> bytes:
    """What stands in the presence table once a model runs in several partitions: then it does not tell of a miss."""
    return fingerprint + b"\xff" * (KEY_BYTES - DIGEST_BYTES)


@functools.lru_cache(4096)
def covered_by(group: int, shard: Shard) -> bytes:
    """The end of an object's key: the group, and the layers and heads that its objects of this shard cover.

    Little-endian, from the lowest bit: group 16; first head, or tensor rank, 16; first layer, or pipeline rank, 12;
    layers 12 (0 = to the group's end; all bits set: a pipeline rank is told); heads 8, less one. Of a draft model's
    group: a digest of these and of what the draft model is, with the highest bit of the group set. So an object of all
    layers and of one tensor rank, and one of a whole model in one piece, has the same key whether or not heads and
    stages are known."""
    heads, (first, end, count) = shard.heads_of(group), shard.span_of(group)
    box = worker_box((0, 1), heads or shard.tp_size, shard.tp_rank, shard.tp_size)
    layers = 0 if end == count else end - first
    if shard.pp_size > 1 and not shard.stages:  # a rank, which no other model's first layer may be taken for
        layers = _RANKED
    end_of_key = _SUFFIX.pack(
        group,
        box.first_head,
        (first if shard.stages else shard.pp_rank) | (layers & 0xF) << 12,
        layers >> 4,
        box.heads - 1,
    )
    draft = shard.draft_of(group)
    if not draft:
        return end_of_key
    hashed = hashlib.blake2b(end_of_key + draft.encode(), digest_size=_SUFFIX.size, person=b"layerflow-draft")
    return bytes(byte | (at == 1) << 7 for at, byte in enumerate(hashed.digest()))


def describe_key(key: bytes) -> str:
    """A key as people read it in logs: the digest's head, the group, the first layer and the first head.

    Those of an object that is bound to its worker's ranks are the ranks.
    """
    group, head, place, layers, heads = _SUFFIX.unpack(key[DIGEST_BYTES:])
    if group >= _DRAFT:
        return f"{key[:6].hex()}/draft/{key[DIGEST_BYTES:].hex()}"
    first, count = place & 0xFFF, layers << 4 | place >> 12
    span = (f"+{count}" if count not in (0, _RANKED) else "", f"+{heads + 1}" if heads else "")
    return f"{key[:6].hex()}/g{group}/layer{first}{span[0]}/head{head}{span[1]}"
