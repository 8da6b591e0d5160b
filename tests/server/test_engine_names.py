"""What engines are called: a name that stays over restarts, though their identities are new at each."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from e2e.known import PATIENCE_S, eventually, small_spec

from layerflow.agent import Control
from layerflow.config.settings import Settings
from layerflow.keys import Chain
from layerflow.server import EmbeddedServer
from layerflow.server.account import Accounts, Allowance
from layerflow.server.clients import LOCAL, REMOTE, Sessions
from layerflow.wire.rights import parse_rights


@pytest.fixture
def sessions() -> Sessions:
    return Sessions(Accounts(lambda: Allowance(1 << 20, 1 << 30)))


def opener(sessions: Sessions) -> Callable[..., Any]:
    return lambda address, engine, **more: sessions.open((LOCAL, address), engine, "test", 1, 0.0, **more)


def test_all_clients_of_an_engine_have_its_name_and_a_second_engine_another(sessions: Sessions) -> None:
    join = opener(sessions)
    first, rank = join(b"a", "uuid-1", name="m/h/dp0"), join(b"b", "uuid-1", name="m/h/dp0")
    second, plain = join(b"c", "uuid-2", name="m/h/dp0"), join(b"d", "uuid-3")
    assert [each.name for each in (first, rank, second, plain)] == ["m/h/dp0", "m/h/dp0", "m/h/dp0#2", "uuid-3"]
    assert [each.engine for each in (first, rank, second)] == ["uuid-1", "uuid-1", "uuid-2"], "identities stay"
    sessions.close(first)
    assert join(b"e", "uuid-4", name="m/h/dp0").name == "m/h/dp0#3", "a rank of the first is still there"
    sessions.close(rank)
    assert join(b"f", "uuid-5", name="m/h/dp0").name == "m/h/dp0"


def test_a_client_that_acts_for_no_engine_is_called_by_its_key_too(sessions: Sessions) -> None:
    looking = parse_rights(["look"], "k" * 40)
    stranger = sessions.open((REMOTE, b"x"), "uuid-1", "test", 1, 0.0, rights=looking, name="m/h/dp0")
    assert stranger.name == "m/h/dp0@kkkkkkkk"
    assert opener(sessions)(b"a", "uuid-1", name="m/h/dp0").name == "m/h/dp0"


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(Settings(pool={"size": "4MiB", "warm": False}, server={"liveness_ms": 60_000})) as served:
        yield served


def test_an_engine_restarted_a_hundred_times_is_one_series(server: EmbeddedServer) -> None:
    observer = Control(server.endpoint, "observer", context=server.context)
    spec = small_spec()
    chain = Chain(bytes(16), list(range(64)), spec.chunk_tokens)
    more = {"context": server.context, "lookup_timeout_s": PATIENCE_S}
    for _ in range(100):
        engine = Control(server.endpoint, uuid.uuid4().hex, spec, name="llama/host/dp0", **more)
        assert engine.connect(PATIENCE_S)
        engine.lookup("r", chain)
        assert {each["name"] for each in observer.status()["sessions"]} == {"llama/host/dp0", "observer"}
        engine.close()
        assert eventually(lambda: len(observer.status()["sessions"]) == 1)
    shown = set(re.findall(r'engine="([^"]*)"', server.server.metrics.render().decode()))
    assert shown == {"llama/host/dp0"}
    assert observer.status()["figures"]["lookups_total"] == 100
    observer.close()
