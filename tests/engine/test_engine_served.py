"""The glue against the real agent and a real server in this process."""

from collections.abc import Iterator

import pytest
from fake_agent import hit_of

from layerflow.config.settings import PoolSettings, Settings
from layerflow.server.embedded import EmbeddedServer
from layerflow_engine import Engine
from layerflow_engine.config import TINY_COMPRESSED, TINY_GQA, TINY_HYBRID, TINY_MLA
from layerflow_engine.glue import LayerflowConnection, attach
from layerflow_engine.texts import passage

TINY = pytest.mark.parametrize(
    "config", [TINY_GQA, TINY_MLA, TINY_HYBRID, TINY_COMPRESSED], ids=lambda config: config.name
)


PATIENT = {"wait_s": 20.0, "lookup_timeout_s": 20.0}  # of an agent


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    settings = Settings(pool=PoolSettings(size=32 << 20, warm=False), transfer={"step_timeout_ms": 60_000})
    with EmbeddedServer(settings) as running:
        yield running


def served(server: EmbeddedServer, config, engine_id: str, mode="layerwise") -> tuple[Engine, LayerflowConnection]:
    engine = Engine(config)
    return engine, attach(
        engine, server.endpoint, engine_id, mode=mode, chunk_tokens=64, context=server.context, **PATIENT
    )


@TINY
@pytest.mark.parametrize("mode", ["layerwise", "bulk"])
def test_what_one_engine_saved_another_loads(server, config, mode):
    prompts = [passage(229, 300 if mode == "bulk" else 0), passage(130, 6000 if mode == "bulk" else 8000)]
    writer, first = served(server, config, f"writer-{config.name}-{mode}", mode)
    cold = writer.generate(prompts, 8)
    writer.drain()
    first.close()

    reader, second = served(server, config, f"reader-{config.name}-{mode}", mode)
    for planes in reader.cache.tensors.values():
        for plane in planes.values():
            plane[1:] = float("nan") if plane.is_floating_point() else 99
    longer = [prompts[0], prompts[1] + " And then?"]
    hits = reader.generate(longer, 8)
    reader.drain()
    second.close()
    assert [result.cached_tokens for result in cold] == [0, 0]
    assert [result.cached_tokens for result in hits] == [hit_of(config, 229, 229), hit_of(config, 130, 140)]
    assert [result.tokens for result in hits] == [r.tokens for r in Engine(config).generate(longer, 8)]


def test_an_engine_whose_server_is_away_computes_everything(tmp_path):
    prompt = passage(200)
    engine = Engine(TINY_HYBRID)
    connection = attach(engine, f"ipc://{tmp_path}/nobody.sock", "early", wait_s=0)
    result = engine.generate([prompt, prompt], 6)[1]
    engine.drain()
    connection.close()
    assert result.cached_tokens == 0
    assert result.tokens == Engine(TINY_HYBRID).generate([prompt], 6)[0].tokens


@TINY
@pytest.mark.parametrize("decoded", [False, True])
def test_the_answer_is_part_of_the_next_hit_only_if_the_operator_wants_it(config, decoded):
    settings = Settings(
        pool=PoolSettings(size=16 << 20), transfer={"save_decode_cache": decoded, "step_timeout_ms": 60_000}
    )
    prompt, answer = passage(100), 100
    with EmbeddedServer(settings) as server:
        writer, first = served(server, config, "writer")
        said = bytes(writer.generate([prompt], answer)[0].tokens)
        writer.drain()
        first.close()
        follow_up = prompt.encode() + said + b" Really?"
        reader, second = served(server, config, "reader")
        result = reader.generate([follow_up], 6)[0]
        reader.drain()
        second.close()
    # 199 positions are computed: three chunks of 64 tokens fill up, or one and the prompt's tail of 36.
    assert result.cached_tokens == (192 if decoded else hit_of(config, 100, 208))
    assert result.tokens == Engine(config).generate([follow_up], 6)[0].tokens


def test_after_a_reset_nothing_of_the_old_weights_is_loaded(server):
    prompt = passage(229, 700)
    engine, connection = served(server, TINY_GQA, "trained")
    engine.submit(prompt, 4)
    with pytest.raises(RuntimeError, match="unfinished"):
        engine.reset()
    engine.run()
    engine.drain()
    engine.reset()
    weights = next(iter(engine.model.weights.values()))
    weights.copy_(weights.roll(1, 0))
    alone = Engine(TINY_GQA)
    theirs = next(iter(alone.model.weights.values()))
    theirs.copy_(theirs.roll(1, 0))
    expected = alone.generate([prompt], 8)[0].tokens
    for hit in (0, 228):
        [result] = engine.generate([prompt], 8)
        engine.drain()
        assert (result.cached_tokens, result.tokens) == (hit, expected)
    connection.close()
