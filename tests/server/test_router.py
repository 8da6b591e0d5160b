"""The control socket read from asyncio's loop: no message waits for the next one to be read."""

from __future__ import annotations

import asyncio

import zmq

from layerflow.server.transport.router import Router

PATIENCE_S = 20.0


async def test_a_message_that_was_only_looked_at_is_read() -> None:
    """The server's slow clock asks whether messages wait. The descriptor does not become readable again for it."""
    heard: asyncio.Queue[bytes | None] = asyncio.Queue()
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        router = Router(context, lambda _, frame: heard.put_nowait(frame), 1 << 20)
        try:
            router.bind("inproc://looked-at")
            router.start()
            client.connect("inproc://looked-at")
            client.send(b"first")
            async with asyncio.timeout(PATIENCE_S):
                assert await heard.get() == b"first"
            for number in range(20):
                await asyncio.sleep(0)  # whatever was scheduled has run
                client.send(b"%d" % number)
                while not router.pending():
                    pass
                async with asyncio.timeout(PATIENCE_S):
                    assert await heard.get() == b"%d" % number
        finally:
            router.close()
