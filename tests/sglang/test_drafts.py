"""Speculative decoding: a draft model's rows are stored, loaded and handed over with the model's.

Tokens are the same whatever a draft model guesses. That its rows are right shows in how many guesses are: over a prompt
without them not one of these was.
"""

from __future__ import annotations

import pytest
from engines import EXPECTED, MODELS, Answer, Engine, Shape
from models import EAGLE, PROMPT
from pairs import start_pair
from servers import A, Servers, pages, prompt
from test_layerwise import LINK, TOKEN_BYTES

N = 24
SEED = 7000
"""Of this test's prompts: how many guesses over each are right depends on nothing else."""
LAYERS = [*range(4), *range(4, 8)]
"""The model's, and behind them the draft model's, which is as large."""


def drafting(algorithm: str = "EAGLE", model: str = EAGLE) -> tuple[str, ...]:
    """Arguments: one token is drafted at a time."""
    return (
        "--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(MODELS / model),
        "--speculative-num-steps", "1", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2",
    )  # fmt: skip


DRAFTS = Shape("drafts", flags=drafting())
WATCHED = Shape("drafts-watched", watched=True, flags=(*drafting(), "--chunked-prefill-size", "256"))


def whole(asked: list[int]) -> int:
    """Bytes of its pages. SGLang keys a page by the token behind it, too."""
    return (len(asked) - 1) // 16 * 16 * TOKEN_BYTES * 2


def stored(servers: Servers, engine: Engine, asked: list[int]) -> Answer:
    """Let an engine compute a prompt that nobody has, and wait until it is stored."""
    answer = engine.generate(asked, n=N)
    assert (answer.status, answer.host) == (200, 0), answer
    servers.settled()
    return answer


def test_guesses_over_a_loaded_prompt_are_those_over_a_computed_one(servers: Servers) -> None:
    servers.stop_serving()
    servers.serve(**LINK)
    one, other = servers.start(DRAFTS, WATCHED)
    for asked in (PROMPT, prompt(500, SEED)):
        computed = stored(servers, one, asked)
        other.watch.write_text("")
        loaded = other.generate(asked, n=N)
        assert loaded.tokens == computed.tokens
        assert loaded.host >= 0.99 * pages(other, len(asked))
        assert loaded.guesses == computed.guesses
        assert loaded.guesses[0] > 2, loaded
        assert [wait.layer for wait in other.noted("wait")] == LAYERS, "each layer is waited for once, in this order"
        print(f"\n{loaded.host} of {len(asked)} tokens loaded; {loaded.guesses} guesses right")
    assert one.generate(PROMPT).tokens == EXPECTED["llama"]
    # The other way round, and in chunks.
    asked = prompt(528, SEED + 1)
    other.watch.write_text("")
    before = servers.until(bool)["pool"]["objects"]
    computed = other.generate(asked, n=N)
    # A page is an object of the model's layers and one of the draft model's. The last one is decoded.
    servers.until(lambda status: status["pool"]["objects"] >= before + 2 * (len(asked) + N - 8) // 16)
    servers.settled()
    saves, hooks = other.noted("save"), other.noted("hook")
    # No hook of the draft model's tells of a layer: its rows leave at the batch's end.
    assert [hook.layer for hook in hooks[:8]] == [0, 1, 2, 3, None, None, None, None]
    by_layer = [sum(save.figure for save in saves if save.layer == layer) for layer in LAYERS]
    assert len(set(by_layer)) == 1, "the draft model's layers have as many pages"
    assert whole(asked) <= sum(by_layer) <= whole(asked + [0] * N), "each byte is moved once"
    loaded = one.generate(asked, n=N)
    assert (loaded.tokens, loaded.host) == (computed.tokens, pages(one, len(asked)))
    assert loaded.guesses == computed.guesses
    # What was decoded is loaded as well.
    longer = asked + list(computed.tokens[: N - 8])
    one.flush()
    loaded = one.generate(longer, n=8)
    assert (loaded.tokens, loaded.host) == (computed.tokens[N - 8 :], pages(one, len(longer)))


def test_an_engine_without_a_draft_model_and_one_with_share_nothing(servers: Servers) -> None:
    """One's pages lack rows that the other needs."""
    servers.stop_serving()
    servers.serve()
    with_one, without = servers.start(DRAFTS, A)
    for writer, reader in ((with_one, without), (without, with_one)):
        asked = prompt(400)
        computed = stored(servers, writer, asked)
        assert stored(servers, reader, asked).tokens == computed.tokens
        for engine in (writer, reader):
            engine.flush()
            assert engine.generate(asked).host == pages(engine, len(asked)), "its own"


@pytest.mark.campaign
@pytest.mark.parametrize(("algorithm", "model"), [("STANDALONE", "llama"), ("EAGLE", EAGLE)])
def test_other_draft_models_and_other_tensor_sizes(servers: Servers, algorithm: str, model: str) -> None:
    servers.stop_serving()
    servers.serve()
    flags = drafting(algorithm, model)
    one, two = servers.start(Shape(f"{algorithm}-1", flags=flags), Shape(f"{algorithm}-2", tp=2, flags=flags))
    for number, (writer, reader) in enumerate([(one, two), (two, one)]):
        asked = prompt(500, SEED + 2 + number)
        computed = stored(servers, writer, asked)
        loaded = reader.generate(asked, n=N)
        assert (loaded.tokens, loaded.host) == (computed.tokens, pages(reader, len(asked)))
        assert loaded.guesses == computed.guesses
        assert loaded.guesses[0] > 2, loaded


@pytest.mark.campaign
def test_other_draft_models_share_nothing(servers: Servers) -> None:
    servers.stop_serving()
    servers.serve()
    own, other = servers.start(
        *(Shape(f"of-{name}", flags=drafting("STANDALONE", name)) for name in ("llama", "llama-other"))
    )
    asked = prompt(400)
    computed = stored(servers, own, asked)
    assert stored(servers, other, asked).tokens == computed.tokens
    (without,) = servers.start(A)
    assert stored(servers, without, asked).tokens == computed.tokens


@pytest.mark.campaign
@pytest.mark.parametrize("tp", [(1, 1), (2, 1)], ids=["1-to-1", "2-to-1"])
def test_a_draft_models_rows_are_handed_over(servers: Servers, tp: tuple[int, int]) -> None:
    """Guesses are those of one server, in chunks, of what either has cached, and where a prompt fills its last page."""
    servers.serve()
    (alone,) = servers.start(DRAFTS)
    pair = start_pair(
        servers,
        "llama",
        tp=tp,
        prefill=(*drafting(), "--chunked-prefill-size", "256"),
        decode=(*drafting(), "--disaggregation-decode-enable-radix-cache"),
    )
    try:
        assert pair.generate(PROMPT).tokens == EXPECTED["llama"]
        for asked in (prompt(700), prompt(640), prompt(7)):
            alone.flush()
            wanted = alone.generate(asked, n=N)
            for case in ("cold", "both have it", "prefill has it"):
                answer = pair.generate(asked, n=N)
                assert answer.served, answer
                assert (answer.tokens, answer.guesses) == (wanted.tokens, wanted.guesses), (case, len(asked))
                if case == "both have it":
                    pair.decode.flush()
    finally:
        pair.close()
