"""For tests of a backend by its author::

    class TestShelf(BackendContract):
        @pytest.fixture
        def bench(self):
            with SharedMemory.create(ARENA) as arena:
                shelf = Shelf({"board": "oak", "timeout_ms": 5000})
                shelf.attach(arena, lambda keys: None)
                yield Bench(Client(shelf, arena.address), None, arena, capacity=64 << 20)
                shelf.close()

A pool that several nodes share has a second client of it in ``Bench``. Needs pytest: the extra ``test``.
"""

import pytest

pytest.register_assert_rewrite("layerflow_testing.contract", "layerflow_testing.objects", "layerflow_testing.shapes")

from layerflow_testing.contract import BackendContract  # noqa: E402 - rewritten first
from layerflow_testing.objects import (  # noqa: E402
    ARENA,
    BLOCK,
    BROKEN,
    EXISTS,
    EXPIRED,
    FAILED,
    FULL,
    MISSING,
    OK,
    PATIENCE_S,
    TOO_LARGE,
    Bench,
    Client,
    Thing,
    any_of,
    assert_whole,
    lay_out,
    load,
    outcomes,
    put,
    save,
    seen,
    soon,
)

__all__ = [
    "ARENA",
    "BLOCK",
    "BROKEN",
    "EXISTS",
    "EXPIRED",
    "FAILED",
    "FULL",
    "MISSING",
    "OK",
    "PATIENCE_S",
    "TOO_LARGE",
    "BackendContract",
    "Bench",
    "Client",
    "Thing",
    "any_of",
    "assert_whole",
    "lay_out",
    "load",
    "outcomes",
    "put",
    "save",
    "seen",
    "soon",
]
