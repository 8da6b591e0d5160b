"""How fast a link between two servers' arenas is, beside what moves its bytes, by itself.

A real exporter process lends an arena; this process reads it into another one with the importer's end of the link. In
turns with it as many bytes come from a process's own memory: for tcp between two blocking sockets into the same arena,
for another link by one read of its library, from one window to another.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from layerflow.backends import named
from layerflow.errors import LayerflowError
from layerflow.hosts.backend import ObjectLocation, ObjectStatus
from layerflow.hosts.peer.windowed import Window
from layerflow.links import links
from layerflow.objects import HEADER_BYTES, pack_header
from layerflow.system.memfd import SharedMemory
from layerflow.wire.host_messages import Frames, Lend, Start, Stop, Up, decode_to_server, encode
from layerflow.wire.packing import pack_u32, pack_u64
from layerflow.wire.peer_link import LINK_KEY_BYTES, Origin, reader_key_of

LAYERS = 32
PATIENCE_S = 60.0
SERVE_POLL_S = 5e-5


def measure(link: str = "tcp", moved_mib: int = 192, rounds: int = 9, call_mib: int = 8) -> dict[str, Any]:
    """Read all of it `rounds` times each way.

    :param link: which, by its name.
    :param moved_mib: of each round, in objects of `call_mib`.
    :param call_mib: that one call of the importer reads, all objects and some layers each, as the core hands them out.
    :returns: gigabytes (10^9) per second, medians: ``gbps`` of the link, ``raw_gbps`` of the sockets or the
        library, ``of_raw``.
    """
    if link not in links():
        raise LayerflowError(f"there is no link {link!r}; there are {', '.join(links())}")
    plugin = links()[link]
    count, layer_bytes = moved_mib // call_mib, (call_mib << 20) // LAYERS
    with ExitStack() as stack:
        source, target = (stack.enter_context(SharedMemory.create((moved_mib + 1) << 20)) for _ in range(2))
        places = _objects(source, target, count, layer_bytes)
        reading = stack.enter_context(_exported(link, source, target, places))
        raw_reading = _library(plugin.plane, moved_mib << 20) if plugin.plane else _sender(moved_mib << 20)
        sending = stack.enter_context(raw_reading)
        ours, raw = [], []
        for turn in range(rounds + 1):
            target.array[:] = 0
            took = reading(call_mib << 20)
            if not np.array_equal(source.array[: source.nbytes], target.array[: target.nbytes]):
                raise LayerflowError("what came over the link is not what was lent")
            took_raw = sending(target)
            if turn:  # the first one touches pages
                ours.append((moved_mib << 20) / took)
                raw.append((moved_mib << 20) / took_raw)
    return {
        "link": link,
        "moved_mib": moved_mib,
        "rounds": rounds,
        "gbps": round(statistics.median(ours) / 1e9, 3),
        "raw_gbps": round(statistics.median(raw) / 1e9, 3),
        "of_raw": round(statistics.median(one / other for one, other in zip(ours, raw, strict=True)), 3),
    }


def _objects(source: SharedMemory, target: SharedMemory, count: int, layer_bytes: int) -> list[ObjectLocation]:
    """Objects that lie one behind the other in both arenas; headers and random layers in the first."""
    source.array[:] = np.random.default_rng(3).integers(0, 256, source.nbytes, dtype=np.uint8)
    places, at = [], 0
    for position in range(count):
        key = secrets.token_bytes(24)
        place = ObjectLocation(key, at, target.address + at, layer_bytes, LAYERS, 1, 16, position=position)
        header = pack_header(key, blocks=1, tokens=16, payload=LAYERS * layer_bytes)
        source.view[at : at + HEADER_BYTES] = target.view[at : at + HEADER_BYTES] = header
        places.append(place)
        at += place.nbytes
    source.array[at:] = 0
    return places


@contextmanager
def _exported(which: str, source: SharedMemory, target: SharedMemory, places: list[ObjectLocation]) -> Iterator[Any]:
    """A real exporter of `source`, and what reads all of it once; seconds."""
    incarnation, token, reader = (secrets.token_bytes(16) for _ in range(3))
    exporter_key, lease_key = secrets.token_bytes(LINK_KEY_BYTES), secrets.token_bytes(LINK_KEY_BYTES)
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", "layerflow.hosts.peer.exporter", "--socket", str(theirs.fileno())]
    command += ["--arena", str(source.fd), "--arena-bytes", str(source.nbytes), "--parent", str(os.getpid())]
    command += [] if links()[which].maps_arena else ["--unmapped"]
    process = subprocess.Popen(command, pass_fds=(theirs.fileno(), source.fd))
    theirs.close()
    try:
        options = {"host": "127.0.0.1", "port": 0, "link": which, "shown": "127.0.0.1"}
        options |= {"incarnation": incarnation.hex(), "key": exporter_key.hex()}
        ours.sendall(encode(Start("exporter", options)))
        up = decode_to_server(_frame(ours))
        if not isinstance(up, Up):
            raise LayerflowError(f"the exporter did not start: {up}")
        sizes, keys = pack_u64([place.nbytes for place in places]), b"".join(place.key for place in places)
        offsets, blocks = pack_u64([place.offset for place in places]), pack_u32([1] * len(places))
        positions = pack_u32(range(len(places)))
        ours.sendall(encode(Lend(1, token, positions, keys, offsets, sizes, blocks, sizes, lease_key)))
        origin = Origin(
            "bench", which, f"127.0.0.1:{up.details['port']}", incarnation, reader,
            reader_key_of(exporter_key, reader), token, lease_key,
        )  # fmt: skip
        link = named(links()[which].reader)(target, origin, time.monotonic() + PATIENCE_S)

        def read(call_bytes: int) -> float:
            few = max(1, call_bytes // (len(places) * places[0].layer_bytes))
            for place in places:
                header = pack_header(place.key, blocks=1, tokens=16, payload=LAYERS * place.layer_bytes)
                target.view[place.offset : place.offset + HEADER_BYTES] = header
            began = time.perf_counter()
            for lo in range(0, LAYERS, few):
                results = link.read(origin, places, lo, min(lo + few, LAYERS), time.monotonic() + PATIENCE_S)
                if any(result.outcome is not ObjectStatus.OK for result in results):
                    raise LayerflowError(f"an object was not read: {results}")
            return time.perf_counter() - began

        yield read
        link.close()
        ours.sendall(encode(Stop()))
    finally:
        ours.close()
        process.wait(PATIENCE_S)


def _frame(connection: socket.socket) -> bytes:
    frames = Frames()
    while data := connection.recv(1 << 16):
        if found := frames.feed(data):
            return found[0]
    raise LayerflowError("the exporter has ended before it was up")


@contextmanager
def _sender(nbytes: int) -> Iterator[Any]:
    """Another process that sends so many bytes of its memory each time, and what receives them; seconds."""
    spawn = multiprocessing.get_context("spawn")
    pipe, other = spawn.Pipe()
    process = spawn.Process(target=_send, args=(other, nbytes), daemon=True)
    process.start()
    connection = socket.create_connection(("127.0.0.1", pipe.recv()))

    def receive(target: SharedMemory) -> float:
        began = time.perf_counter()
        connection.sendall(b"g")
        done = 0
        while done < nbytes:
            got = connection.recv_into(target.view[done:nbytes], 0, socket.MSG_WAITALL)
            if not got:
                raise LayerflowError("the sender has hung up")
            done += got
        return time.perf_counter() - began

    try:
        yield receive
    finally:
        connection.close()
        process.join(PATIENCE_S)


def _send(pipe: Connection, nbytes: int) -> None:
    memory = np.ones(nbytes, dtype=np.uint8).data
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    with connection:
        while connection.recv(1):
            connection.sendall(memory)


@contextmanager
def _library(plane: str, nbytes: int) -> Iterator[Any]:
    """Another process with so many bytes of a library's window, and what reads them in one call; seconds."""
    spawn = multiprocessing.get_context("spawn")
    pipe, other = spawn.Pipe()
    process = spawn.Process(target=_offer, args=(other, plane, nbytes), daemon=True)
    process.start()
    window = Window(nbytes)
    window.view[:] = bytes(nbytes)
    mine = named(plane)(window, "127.0.0.1")
    mine.connect(pipe.recv(), "127.0.0.1")

    def read(_target: SharedMemory) -> float:
        began = time.perf_counter()
        mine.read(0, 0, nbytes).wait(time.monotonic() + PATIENCE_S)
        return time.perf_counter() - began

    try:
        yield read
        if bytes(window.view[-8:]) != b"\1" * 8:
            raise LayerflowError("what the library read is not what was offered")
    finally:
        pipe.send(None)
        process.join(PATIENCE_S)
        mine.close()


def _offer(pipe: Connection, plane: str, nbytes: int) -> None:
    window = Window(nbytes)
    window.view[:] = b"\1" * nbytes
    mine = named(plane)(window, "127.0.0.1")
    pipe.send(mine.describe())
    while not pipe.poll(SERVE_POLL_S):
        mine.serve()
    os._exit(0)  # the library's own threads and destructors
