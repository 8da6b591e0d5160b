"""Two servers, a relay on the link between them, a prefill and a decode engine: everything that may be hit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from e2e.children import Child
from e2e.known import eventually
from pd_apart import MAX_TOKENS, Decoder, Prefiller, Told, alone, serve_engine
from pd_balance import Balance, Patience
from peers.relay import Relay

from layerflow_cli.bench.harness import ServerProcess
from layerflow_engine.texts import passage
from layerflow_testing.ports import held_ports

PROMPT_TOKENS = 420
PATIENCE_S = 3.0
"""How long the decoder waits for a hand-off to open."""
ANSWER_S = 60.0
"""Every answer is there by then: the deadlines are far below, the machine may be slow."""
RATE = 4e6
"""Of the link, bytes per second: a prompt takes some 100 ms over it."""

SETTINGS: dict[str, object] = {
    "pool.size": "16MiB",
    "pool.warm": "false",
    "pool.lease_ms": 1000,
    "pd.handoff_lease_s": 1.0,
    "peers.lease_ms": 2000,
    "peers.lookup_timeout_ms": 500,
}


class Side:
    """An engine's process, and what it was asked and has not answered."""

    def __init__(self, name: str, endpoint: str, shape: str, connect: Callable[..., Any]) -> None:
        self.name = name
        self._start = lambda: Child(serve_engine, connect, endpoint, name, shape)
        self.child = self._start()
        self.asked: dict[str, tuple[str, int]] = {}
        self.told: dict[str, Told] = {}

    @property
    def pid(self) -> int:
        assert self.child.process.pid is not None
        return self.child.process.pid

    def ready(self) -> None:
        assert self.child.hear(ANSWER_S) == "ready"

    def ask(self, request: str, prompt: str, tokens: int) -> None:
        self.asked[request] = prompt, tokens
        with contextlib.suppress(BrokenPipeError):  # it was killed; whoever did that asks again
            self.child.pipe.send(("ask", request, prompt, tokens))

    def abort(self, request: str) -> None:
        self.child.pipe.send(("abort", request))

    def hear(self) -> None:
        """Take the answers that are there."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            while self.child.pipe.poll():
                kind, request, told = self.child.pipe.recv()
                assert kind == "answer", (kind, request)
                self.told[request] = told
                self.asked.pop(request, None)

    def finish(self) -> None:
        """Wait until all is answered.

        :raises AssertionError: something is not.
        """
        patience = Patience(ANSWER_S)
        while self.asked:
            self.hear()
            assert self.child.process.is_alive(), f"{self.name} died by itself"
            assert not patience.over(), f"{self.name} has not answered {list(self.asked)}"
            self.child.pipe.poll(0.02)

    def restart(self) -> dict[str, tuple[str, int]]:
        """Another process of the same name; what the dead one has not answered."""
        self.hear()
        lost, self.asked = self.asked, {}
        self.child.process.join()
        self.child.pipe.close()
        self.child = self._start()
        self.ready()
        return lost

    def end(self) -> int:
        """Let it end; the blocks that it never freed."""
        self.child.pipe.send(("end",))
        kind, lost = self.child.hear(ANSWER_S)
        assert kind == "lost"
        self.child.process.join(ANSWER_S)
        self.child.close()
        return int(lost)


class World:
    """See the module. The prefiller's server is the owner, the decoder's the reader."""

    def __init__(self, shape: str, seed: int) -> None:
        self.dice = random.Random(seed)
        [port] = held_ports(1)
        self.relay = Relay(f"127.0.0.1:{port}", RATE)
        link = {"peers.link_address": f"127.0.0.1:{port}", "peers.link_advertise": f"127.0.0.1:{self.relay.port}"}
        self.owner = ServerProcess(SETTINGS | link | {"peers.serve": "true", "peers.lease_share": 1})
        self.reader = ServerProcess(SETTINGS | {"peers.learn": "true"})
        self.servers = {"owner": self.owner, "reader": self.reader}
        self.p = Side("P", self.owner.endpoint, shape, Prefiller())
        self.d = Side("D", self.reader.endpoint, shape, Decoder(PATIENCE_S, (self.owner.endpoint,)))
        self.sides = {"P": self.p, "D": self.d}
        self._alone = alone(shape)
        self._wanted: dict[str, Told] = {}
        self._numbers = 0
        self._balance = Balance(self.owner, self.reader)
        self.counts: Counter[str] = Counter()
        self._never = threading.Event()
        for side in self.sides.values():
            side.ready()

    # -- requests ---------------------------------------------------------------------------------

    def ask(self) -> str:
        """Both legs of a new request, at once."""
        self._numbers += 1
        name = f"r{self._numbers}"
        prompt = passage(PROMPT_TOKENS, self.dice.randrange(1 << 20))
        prompt = f"{name} {prompt}"[:PROMPT_TOKENS]
        self._wanted[name] = self._alone(prompt)
        for side, tokens in ((self.d, MAX_TOKENS), (self.p, 1)):
            side.ask(name, prompt, tokens)
        return name

    def finish(self, gone: frozenset[str] = frozenset()) -> None:
        """Hear all answers, and compare every token and the KV with a single engine's.

        :param gone: requests that were given up.
        """
        for side in (self.d, self.p):
            side.finish()
        for side, tokens in ((self.d, MAX_TOKENS), (self.p, 1)):
            for name, told in side.told.items():
                wanted = self._wanted[name]
                if name in gone:
                    continue
                self.counts["compared"] += 1
                assert told.tokens == wanted.tokens[:tokens], (side.name, name, told, wanted)
                assert told.kv == wanted.kv, f"{side.name} computed {name} with wrong KV"
        for told in self.d.told.values():
            self.counts["handed_over" if told.cached == PROMPT_TOKENS - 1 else "not_handed_over"] += 1
            self.counts["failed_loads"] += told.restarts
        for side in self.sides.values():
            side.told.clear()
        self._wanted.clear()

    def recover(self) -> None:
        """Ask until a prompt is handed over again."""
        patience = Patience(ANSWER_S)
        while True:
            before = self.counts["handed_over"]
            self.ask()
            self.finish()
            if self.counts["handed_over"] > before:
                return
            assert not patience.over(), f"nothing is handed over any more: {self._balance.state()}"

    # -- faults -----------------------------------------------------------------------------------

    def moment(self, within_s: float) -> None:
        """Wait until some time."""
        self._never.wait(self.dice.uniform(0.0, within_s))

    def pid(self, victim: str) -> int:
        if victim in self.sides:
            return self.sides[victim].pid
        if victim in self.servers:
            return self.servers[victim].process.pid
        return self._balance.host_pid(victim)

    def kill(self, victim: str) -> None:
        """SIGKILL, and start it again. Who was decoding is asked again, under the same names."""
        os.kill(self.pid(victim), signal.SIGKILL)
        if victim in self.servers:
            self.servers[victim].kill()
            self.servers[victim].restart()
        elif victim in self.sides:
            lost = self.sides[victim].restart()
            if victim == "D":
                for name, (prompt, tokens) in lost.items():
                    self.d.ask(name, prompt, tokens)

    def stop(self, victim: str, seconds: float) -> None:
        """SIGSTOP, and later SIGCONT, unless it was killed meanwhile for that."""
        pid = self.pid(victim)
        os.kill(pid, signal.SIGSTOP)
        self._never.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def arm(self) -> None:
        """Some bytes later the link is cut, in the middle of a layer."""
        self.relay.cuts, self.relay.cut_after = 0, self.relay.passed + self.dice.randrange(1 << 19)

    def cut(self) -> None:
        """Wait for that; not for long: fewer bytes than those may pass."""
        self.counts["cut_in_mid_layer"] += eventually(lambda: self.relay.cuts, PATIENCE_S)
        self.relay.cut_after = 0

    def leave(self, names: list[str]) -> frozenset[str]:
        """Clients hang up: both legs, or the decoder's, are given up."""
        gone = frozenset(self.dice.sample(names, len(names) // 2))
        for name in gone:
            for side in self.dice.choice(((self.d,), (self.d, self.p))):
                side.abort(name)
        return gone

    # -- balance ----------------------------------------------------------------------------------

    def balanced(self) -> None:
        """:raises AssertionError: something is kept for nobody, at either side."""
        self._balance.settle({name: side.pid for name, side in self.sides.items()})

    def close(self) -> None:
        """End all of it."""
        for side in self.sides.values():
            side.child.close()
        for server in self.servers.values():
            server.close()
        self.relay.close()


@contextlib.contextmanager
def world(shape: str, seed: int) -> Iterator[World]:
    """One that is taken down at the end, whatever happens."""
    it = World(shape, seed)
    try:
        yield it
    finally:
        it.close()
