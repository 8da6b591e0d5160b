"""Chunks in their engines' words: described by one, read by all engines of the model, which tell their routers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerflow.errors import ProtocolError
from layerflow.keys import DIGEST_BYTES
from layerflow.server.account import Refused
from layerflow.server.chunk_journal import KEYS_AT_ONCE, MOST_KEYS, Described, keys_of_chunk
from layerflow.server.mailboxes import in_slices, next_turn
from layerflow.wire.messages import ChunkChange, ChunkChanges, DescribeChunks, ReadChunks
from layerflow.wire.rights import NotAllowed

if TYPE_CHECKING:
    from layerflow.server.clients import ClientSession
    from layerflow.server.handlers.context import ServerContext
    from layerflow.spec import ModelSpec

PER_SLICE = 16
"""Descriptions taken before others get their turn; fewer where chunks have many objects."""
MOST_CHANGES = 256
"""In one answer: 273 KB with chunks of 256 tokens."""


async def describe_chunks(context: ServerContext, session: ClientSession, message: DescribeChunks) -> None:
    """Note what these chunks hold."""
    spec = _spec(context, session)
    objects = keys_of_chunk(spec)
    if objects > MOST_KEYS:
        raise Refused("quota", f"groups x shards of model {spec.name!r} are {objects}, and may be {MOST_KEYS}")
    for chunk in message.chunks:
        if len(chunk.tokens) % 4 or len(chunk.tokens) > 4 * spec.chunk_tokens:
            raise ProtocolError(f"a chunk of {len(chunk.tokens)} bytes of tokens: at most {spec.chunk_tokens}, 4 each")
        if len(chunk.parent) not in (0, DIGEST_BYTES):
            raise ProtocolError(f"a parent of {len(chunk.parent)} bytes: {DIGEST_BYTES}, or none for a first chunk")
    per_slice = max(1, KEYS_AT_ONCE // max(objects, KEYS_AT_ONCE // PER_SLICE))
    for at, chunk in enumerate(message.chunks, 1):
        described = Described(chunk.digest, chunk.parent, chunk.tokens, chunk.extra)
        await in_slices(context.journal.describe(spec, described))
        await in_slices(context.journal.shrink())
        if at % per_slice == 0:
            await next_turn()


async def read_chunks(context: ServerContext, session: ClientSession, message: ReadChunks) -> None:
    """Answer with the next changes of the client's model."""
    spec, epoch = _spec(context, session), context.incarnation
    after, begun = (message.after, message.begun) if message.epoch == epoch else (0, 0)
    read = await in_slices(context.journal.read(spec.fingerprint, after, begun, MOST_CHANGES))
    changes = [
        ChunkChange(digest, states) if chunk is None else ChunkChange(digest, states, *chunk[1:])
        for digest, states, chunk in read.changes
    ]
    context.send(session, ChunkChanges(message.id, epoch, read.upto, read.begun, read.more, changes))


def _spec(context: ServerContext, session: ClientSession) -> ModelSpec:
    """The model whose chunks a client may describe and read.

    :raises Refused: it has attached none.
    :raises NotAllowed: it is of another machine, and acts for no engine that runs this model here.
    """
    spec, rights = session.spec, session.rights
    if spec is None:
        raise Refused("not_attached", "attach a spec first: chunks are those of a model")
    if rights.key and not any(
        worker.memory and worker.spec is not None and worker.spec.fingerprint == spec.fingerprint
        and rights.acts_for(worker.engine) for worker in context.sessions
    ):  # fmt: skip
        raise NotAllowed(
            "not_allowed",
            f"chunks of model {spec.name!r} are told to its engines: no worker of an engine that key "
            f"{rights.key[:8]}... acts for is attached to this server with that model",
        )
    return spec
