"""Chunks in their engines' words: described by one, read by all engines of the model, which tell their routers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerflow.errors import ProtocolError
from layerflow.keys import DIGEST_BYTES
from layerflow.server.account import Refused
from layerflow.server.chunk_journal import Described
from layerflow.server.mailboxes import in_slices, next_turn
from layerflow.wire.messages import ChunkChange, ChunkChanges, DescribeChunks, ReadChunks

if TYPE_CHECKING:
    from layerflow.server.clients import ClientSession
    from layerflow.server.handlers.context import ServerContext
    from layerflow.spec import ModelSpec

PER_SLICE = 16
"""Descriptions taken before others get their turn."""
MOST_CHANGES = 256
"""In one answer: 273 KB with chunks of 256 tokens."""


async def describe_chunks(context: ServerContext, session: ClientSession, message: DescribeChunks) -> None:
    """Note what these chunks hold."""
    spec = _spec(session)
    for chunk in message.chunks:
        if len(chunk.tokens) % 4 or len(chunk.tokens) > 4 * spec.chunk_tokens:
            raise ProtocolError(f"a chunk of {len(chunk.tokens)} bytes of tokens: at most {spec.chunk_tokens}, 4 each")
        if len(chunk.parent) not in (0, DIGEST_BYTES):
            raise ProtocolError(f"a parent of {len(chunk.parent)} bytes: {DIGEST_BYTES}, or none for a first chunk")
    for at, chunk in enumerate(message.chunks, 1):
        context.journal.describe(spec, Described(chunk.digest, chunk.parent, chunk.tokens, chunk.extra))
        if at % PER_SLICE == 0:
            await in_slices(context.journal.shrink())
            await next_turn()
    await in_slices(context.journal.shrink())


async def read_chunks(context: ServerContext, session: ClientSession, message: ReadChunks) -> None:
    """Answer with the next changes of the client's model."""
    spec, epoch = _spec(session), context.incarnation
    after, begun = (message.after, message.begun) if message.epoch == epoch else (0, 0)
    read = await in_slices(context.journal.read(spec.fingerprint, after, begun, MOST_CHANGES))
    changes = [
        ChunkChange(digest, states) if chunk is None else ChunkChange(digest, states, *chunk[1:])
        for digest, states, chunk in read.changes
    ]
    context.send(session, ChunkChanges(message.id, epoch, read.upto, read.begun, read.more, changes))


def _spec(session: ClientSession) -> ModelSpec:
    if session.spec is None:
        raise Refused("not_attached", "attach a spec first: chunks are those of a model")
    return session.spec
