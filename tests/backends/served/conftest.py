"""The same tests for every kind of pool: real servers, real agents, every byte compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from backends.served.house import Served
from backends.served.kinds import KINDS, Kind


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def make_kind(request: pytest.FixtureRequest) -> Iterator[Callable[..., Kind]]:
    """Makes what is behind the servers; see :class:`Kind` for the options."""
    kinds: list[Kind] = []

    def make(**options: object) -> Kind:
        kinds.append(request.param(**options))
        kinds[-1].open()
        return kinds[-1]

    make.of = request.param  # type: ignore[attr-defined]
    yield make
    for kind in kinds:
        kind.close()


@pytest.fixture
def kind(make_kind: Callable[..., Kind]) -> Kind:
    """With the usual options."""
    return make_kind()


@pytest.fixture
def start() -> Iterator[Callable[..., Served]]:
    """Start servers; all are stopped at the end, before what is behind them. ``pool__size=...`` is ``pool.size``."""
    servers: list[Served] = []

    def run(kind: Kind, *, wait: bool = True, **settings: object) -> Served:
        named = {key.replace("__", "."): value for key, value in settings.items()}
        servers.append(Served(kind, named, wait=wait))
        return servers[-1]

    yield run
    for server in servers:
        server.close()
