"""Servers of different tensor-parallel sizes share what each has stored."""

from __future__ import annotations

from engines import EXPECTED, Shape
from models import PROMPT
from servers import A, Servers, pages, prompt

TWO = Shape("tp2", tp=2)


def test_one_rank_and_two_load_from_each_other(servers: Servers) -> None:
    servers.stop_serving()
    servers.serve()
    one, two = servers.start(A, TWO)
    assert servers.store(two, PROMPT).tokens == EXPECTED["llama"]
    for writer, reader in ((two, one), (one, two), (two, two)):
        asked = prompt(1000)
        wanted = servers.store(writer, asked).tokens
        reader.flush()
        loaded = reader.generate(asked)
        assert (loaded.tokens, loaded.host) == (wanted, pages(reader, len(asked))), (writer.shape, reader.shape)
