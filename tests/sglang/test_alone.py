"""One server by itself: pages of 64 tokens, no overlap schedule, and no ``layerflow run`` at its start."""

from __future__ import annotations

from engines import EXPECTED, Shape
from models import PROMPT
from servers import Servers, pages, prompt

ALONE = Shape("alone", page=64, overlap=False)


def test_no_server_at_the_start(servers: Servers) -> None:
    servers.stop_serving()
    servers.end(ALONE)
    (engine,) = servers.start(ALONE)
    answer = engine.generate(PROMPT)
    assert (answer.tokens, answer.host) == (EXPECTED["llama"], 0)
    servers.serve()
    servers.attached(engine)
    servers.loads_again(engine, engine)


def test_it_loads_what_it_has_stored(servers: Servers) -> None:
    servers.stop_serving()
    servers.serve()
    (engine,) = servers.start(ALONE)
    assert servers.store(engine, PROMPT).tokens == EXPECTED["llama"]
    asked = prompt(1000)
    wanted = servers.store(engine, asked).tokens
    engine.flush()
    for question, tokens in ((asked, wanted), (PROMPT, EXPECTED["llama"])):
        loaded = engine.generate(question)
        assert (loaded.tokens, loaded.host) == (tokens, pages(engine, len(question)))
