"""The other tests' proof: a loaded byte that is wrong changes tokens, so equal tokens mean right bytes."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import zmq
from comparison import MAX_TOKENS, prompt, settled
from engines import Engine, connector

from layerflow.agent.handshake import Handshake, dial, fetch_arena
from layerflow.objects import HEADER_BYTES, MAGIC
from layerflow_cli.bench.harness import ServerProcess

CHUNK = 64
LAYERS = 8  # of the llama model
_SIZES = struct.Struct("<8xIIQ")


@contextmanager
def arena_of(endpoint: str) -> Iterator[np.ndarray]:
    """The server's arena, writable, uint8: what an agent maps."""
    deadline = time.monotonic() + 10
    with zmq.Context() as context:
        conversation = Handshake(dial(context, endpoint))
        welcome = conversation.introduce("vandal", "agent", deadline)
        connection, fd, _ = fetch_arena(Path(welcome.fd_server), welcome.token, deadline)
        mapped = mmap.mmap(fd, os.fstat(fd).st_size)
        try:
            yield np.frombuffer(mapped, np.uint8)
        finally:
            os.close(fd)
            connection.close()
            conversation.dealer.close()


def whole_chunks(arena: np.ndarray) -> list[tuple[int, int]]:
    """Offset and bytes of the first layer of every object that holds a whole chunk."""
    words = arena.view("<u4")[:: HEADER_BYTES // 4]
    found = []
    for header in np.flatnonzero(words == int.from_bytes(MAGIC, "little")) * HEADER_BYTES:
        _, tokens, payload = _SIZES.unpack(bytes(arena[header : header + _SIZES.size]))
        if tokens == CHUNK:
            found.append((int(header) + HEADER_BYTES, payload // LAYERS))
    return found


def test_one_layer_of_one_object(
    serve: Callable[..., ServerProcess], vllm: Callable[..., Engine], plain: Callable[..., Engine]
) -> None:
    server = serve(pool__size="32MiB")
    engine = vllm("llama", kv_transfer_config=connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK))
    asked = prompt(1, 4 * CHUNK)
    wanted = plain("llama").one(asked, max_tokens=MAX_TOKENS).tokens
    engine.one(asked)
    settled(server.endpoint)
    hit = engine.one(asked, max_tokens=MAX_TOKENS)
    assert (hit.tokens, hit.cached) == (wanted, len(asked) - 1)
    settled(server.endpoint)
    with arena_of(server.endpoint) as arena:
        objects = whole_chunks(arena)
        assert len(objects) == 4
        at, size = objects[0]
        for layer in (0, 3, LAYERS - 1):
            values = arena[at + layer * size : at + (layer + 1) * size].view(np.float32)
            assert values.any()
            right = values.copy()
            values *= -10
            hit = engine.one(asked, max_tokens=MAX_TOKENS)
            assert hit.cached == len(asked) - 1
            assert hit.tokens != wanted, f"layer {layer}"
            settled(server.endpoint)
            values[:] = right
    hit = engine.one(asked, max_tokens=MAX_TOKENS)
    assert (hit.tokens, hit.cached) == (wanted, len(asked) - 1)
