"""A prefill and a decode server, asked together as a router asks them, and ``sglang-router`` itself."""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from engines import START_S, Answer, Engine, EngineFailed, Shape, close
from servers import Servers

MOONCAKE = (("MC_FORCE_TCP", "1"), ("SGLANG_HOST_IP", "127.0.0.1"), ("SGLANG_LOCAL_IP_NIC", "lo"))
"""SGLang's own backend ``mooncake`` over TCP: what its environment says."""


@dataclass(slots=True)
class Pair:
    """A prefill and a decode server."""

    prefill: Engine
    decode: Engine
    bootstrap: int

    def handed(self) -> dict[str, Any]:
        """What a router adds to a request for both: where prefill is, and a room of its own."""
        return {
            "bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap, "bootstrap_room": secrets.randbits(62),
        }  # fmt: skip

    def begin(self, prompt: list[int], *, late_s: float = 0.0, **body: Any) -> tuple[Future[Answer], Future[Answer]]:
        """Ask both for one prompt, as a router does: what prefill and decode will say."""
        handed = self.handed()
        first = self.prefill.begin_generate(prompt, **handed, **body)
        if late_s:
            first.result()
            time.sleep(late_s)
        return first, self.decode.begin_generate(prompt, **handed, **body)

    def generate(self, prompt: list[int], **more: Any) -> Answer:
        """Decode's answer."""
        first, second = self.begin(prompt, **more)
        first.result()
        return second.result()

    def close(self) -> None:
        """End both."""
        close([self.prefill, self.decode])


def start_pair(
    servers: Servers,
    model: str,
    *,
    backend: str = "layerflow",
    tp: tuple[int, int] = (1, 1),
    prefill: tuple[str, ...] = (),
    decode: tuple[str, ...] = (),
    environment: tuple[tuple[str, str], ...] = (),
    timed: bool = False,
    linked: bool = False,
) -> Pair:
    """Start both, side by side.

    :param backend: SGLang's transfer backend. :param tp: tensor ranks of prefill and decode.
    :param prefill: further arguments of the prefill server. :param decode: likewise.
    :param environment: of both, besides what the backend wants.
    :param timed: the prefill server writes down when its layers have computed.
    :param linked: the prefill server has layerflow's linker, too.
    """
    held, port = _held_port()
    page = {"page": 1, "overlap": False} if model == "qwen35" else {}
    flags = ("--disaggregation-transfer-backend", backend, "--disaggregation-bootstrap-port", str(port))
    roles = {
        "prefill": (*flags, *prefill),
        "decode": (*flags, "--disaggregation-decode-retraction-backup", "cpu_tensor", *decode),
    }
    engines = []
    for (role, extra), ranks in zip(roles.items(), tp, strict=True):
        shape = Shape(
            f"{model}-{role}-{backend}",
            model,
            tp=ranks,
            linker=linked and role == "prefill",
            flags=("--disaggregation-mode", role, *extra),
            environment=(*environment, *(MOONCAKE if backend == "mooncake" else ())),
            timed=timed and role == "prefill",
            **page,
        )
        engines.append(Engine(shape, servers.endpoint, servers.log(shape.name)).begin())
    began = time.monotonic()
    try:
        for engine in engines:
            engine.wait_started(began + START_S)
    except BaseException:
        close(engines)
        raise
    finally:
        held.close()
    return Pair(*engines, port)


def has_router() -> bool:
    """Is ``sglang-router`` installed? It is not needed for anything else."""
    return importlib.util.find_spec("sglang_router") is not None


@contextlib.contextmanager
def router_before(pair: Pair, servers: Servers) -> Iterator[Engine]:
    """``sglang-router``, unchanged, before a pair, while the block runs. It is asked as a server is."""
    log = servers.log("router")
    held, port = _held_port()
    metrics, metrics_port = _held_port()
    command = [
        sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", "127.0.0.1",
        "--port", str(port), "--prometheus-port", str(metrics_port), "--policy", "random",
        "--prefill", f"http://127.0.0.1:{pair.prefill.port}", str(pair.bootstrap),
        "--decode", f"http://127.0.0.1:{pair.decode.port}",
    ]  # fmt: skip
    metrics.close()
    held.close()
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    router = Engine(Shape("router"), "", log, port)
    try:
        deadline = time.monotonic() + START_S
        # It answers 503 until it has registered both servers.
        while process.poll() is None:
            with contextlib.suppress(EngineFailed):
                if router.generate([5, 6, 7], n=1).status != 503:
                    break
            assert time.monotonic() < deadline, router.output()
            time.sleep(0.1)
        yield router
    finally:
        process.kill()
        process.wait()


def _held_port() -> tuple[socket.socket, int]:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held, held.getsockname()[1]
