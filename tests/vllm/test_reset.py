"""New weights in a real vLLM, put in place under the old name: nothing of the old ones is ever found again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from comparison import MAX_TOKENS, prompt, settled
from engines import Engine, EngineFailed, connector

from layerflow.agent.observer import fetch_status
from layerflow_cli.bench.harness import ServerProcess

CHUNK, TOKENS = 64, 300
# 4 KiB a token over 4 MB/s: the saves of a prompt take 0.3 s.
SLOW = {"pool__link_gbps": 0.004, "transfer__max_transfer_bytes": "64KiB"}
# Here 2.5 s. Layer by layer they begin within the step, and on a busy machine most of 0.3 s passes before its answer is
# here: what is left may end between a look at the server and what follows.
SLOWER = SLOW | {"pool__link_gbps": 0.0005}

Serve = Callable[..., ServerProcess]
Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
    """A prompt, and what vLLM alone makes of it with the old weights and with the new ones."""
    asked, alone = prompt(1, TOKENS), Engine("llama", tmp_path_factory.mktemp("told") / "vllm.log")
    old = alone.one(asked, max_tokens=MAX_TOKENS).tokens
    alone.replace_weights()
    new = alone.one(asked, max_tokens=MAX_TOKENS).tokens
    alone.close()
    assert old != new
    return asked, old, new


def attached(vllm: Start, server: ServerProcess, *, enable_prefix_caching: bool = False, **extra: object) -> Engine:
    transfer = connector(server.endpoint, chunk_tokens=CHUNK, **extra)
    return vllm("llama", kv_transfer_config=transfer, enable_prefix_caching=enable_prefix_caching)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["layerwise", pytest.param("bulk", marks=pytest.mark.campaign)])
def test_new_weights_with_a_disk_and_another_engine(
    mode: str, serve: Serve, vllm: Start, told: tuple[list[int], ...], tmp_path: Path
) -> None:
    asked, old, new = told
    server = serve(pool__disk__path=tmp_path / "tier", pool__disk__capacity="1GiB")
    first, second = (attached(vllm, server, mode=mode) for _ in range(2))
    assert first.one(asked, max_tokens=MAX_TOKENS).tokens == old
    settled(server.endpoint)
    assert first.one(asked).cached == TOKENS - 1
    first.reset(pool=True)
    first.replace_weights()
    answer = first.one(asked, max_tokens=MAX_TOKENS)
    assert (answer.cached, answer.tokens) == (0, new)
    settled(server.endpoint)
    answer = first.one(asked, max_tokens=MAX_TOKENS)
    assert (answer.cached, answer.tokens) == (TOKENS - 1, new), "what the new weights make is found"
    answer = second.one(asked, max_tokens=MAX_TOKENS)
    assert (answer.cached, answer.tokens) == (TOKENS - 1, old), "who still has the old weights finds theirs"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("loaded", "own_cache"), [(False, True), (True, False)], ids=["written", "loaded"])
def test_new_weights_of_which_the_connector_is_not_told(
    loaded: bool, own_cache: bool, serve: Serve, vllm: Start, told: tuple[list[int], ...]
) -> None:
    """As ``collective_rpc`` and ``reset_prefix_cache()`` replace them, which leaves connectors out by default."""
    asked, old, new = told
    server = serve()
    first = attached(vllm, server, enable_prefix_caching=own_cache)
    second = attached(vllm, server)
    assert first.one(asked, max_tokens=MAX_TOKENS).tokens == old
    first.reset()
    settled(server.endpoint)
    assert first.one(asked).cached == TOKENS - 1
    first.replace_weights(loaded=loaded)
    first.reset()
    assert first.one(asked, max_tokens=MAX_TOKENS).tokens == new
    assert first.output().count("weights_changed") == 1
    settled(server.endpoint)
    assert second.one(asked, max_tokens=MAX_TOKENS).tokens == old, "it finds nothing of the new weights"
    first.reset()
    assert first.one(asked, max_tokens=MAX_TOKENS).tokens == new
    first.reset()
    settled(server.endpoint)
    answer = first.one(asked, max_tokens=MAX_TOKENS)
    assert (answer.cached, answer.tokens) == (TOKENS - 1, new), "what the new weights make is found"
    assert first.output().count("weights_changed") == 1
    first.assert_no_block_lost()


@pytest.mark.timeout(300)
def test_a_reset_while_saves_are_under_way(serve: Serve, vllm: Start, told: tuple[list[int], ...]) -> None:
    asked, old, new = told
    server = serve(**SLOWER)
    engine = attached(vllm, server)
    assert engine.one(asked, max_tokens=1).tokens == old[:1]
    status = fetch_status(server.endpoint)
    assert status["flow"]["steps"] or status["pool"]["half_written"], "the saves have ended too soon to prove anything"
    commits = status["pool"]["commits"]
    # vLLM's own cache cannot be cleared: blocks are held for the saves. It says so, and layerflow resets all the same.
    with pytest.raises(EngineFailed, match="still in use"):
        engine.reset_now()
    engine.replace_weights()
    status = settled(server.endpoint)
    assert status["pool"]["commits"] == commits, "what was not stored yet is never published"
    answer = engine.one(asked, max_tokens=MAX_TOKENS)
    assert (answer.cached, answer.tokens) == (0, new)
    engine.assert_no_block_lost()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mode", "steps"),
    [
        ("layerwise", 3),
        ("bulk", 1),
        pytest.param("layerwise", 1, marks=pytest.mark.campaign),
        pytest.param("bulk", 3, marks=pytest.mark.campaign),
    ],
)
def test_a_reset_without_a_pause_over_a_load(
    mode: str, steps: int, serve: Serve, vllm: Start, told: tuple[list[int], ...]
) -> None:
    """A request has its hit, or is getting it. Its load is not waited for, and what has come of it is not used."""
    asked, _, new = told
    server = serve(**SLOW)
    engine = attached(vllm, server, mode=mode)
    engine.one(asked, max_tokens=1)
    settled(server.endpoint)
    answer = engine.one_with_reset(asked, MAX_TOKENS, steps)
    if mode == "bulk":
        assert answer.tokens == new, "it waited for old KV, and was computed instead"
    settled(server.endpoint)
    again = engine.one(asked, max_tokens=MAX_TOKENS)
    assert again.tokens == new, "nothing that was computed over old KV is found"
    engine.assert_no_block_lost()


@pytest.mark.timeout(300)
def test_pausing_as_reinforcement_learning_does(serve: Serve, vllm: Start, told: tuple[list[int], ...]) -> None:
    asked, old, new = told
    server = serve()
    engine = attached(vllm, server)
    engine.one(asked)
    settled(server.endpoint)
    engine.assert_no_block_lost()
    answer = engine.one_over_a_pause(asked, MAX_TOKENS, 2)
    assert answer.tokens[:2] == old[:2], "the first tokens are the old weights'"
    settled(server.endpoint)
    answer = engine.one(asked, max_tokens=MAX_TOKENS)
    assert answer.tokens == new
    assert answer.cached == TOKENS - 1, "the request that went on was computed anew, and saved"


@pytest.mark.timeout(300)
def test_engines_that_name_their_weights_share_them(
    serve: Serve, vllm: Start, told: tuple[list[int], ...], tmp_path: Path
) -> None:
    asked, old, new = told
    name = tmp_path / "weights"
    name.write_text("step-1")
    server = serve()
    first, second = (attached(vllm, server, model_content=f"@{name}") for _ in range(2))
    first.one(asked)
    settled(server.endpoint)
    assert second.one(asked, max_tokens=MAX_TOKENS).tokens == old
    for engine in (first, second):
        engine.reset(pool=True)
        engine.replace_weights()
    name.write_text("step-2")
    answer = first.one(asked, max_tokens=MAX_TOKENS)
    assert (answer.cached, answer.tokens) == (0, new)
    settled(server.endpoint)
    answer = second.one(asked, max_tokens=MAX_TOKENS)
    assert (answer.cached, answer.tokens) == (TOKENS - 1, new)
