"""What decoders ask of ``/v1/metaserver`` is lost on its way, or the answer: the client has its answer all the same."""

from contextlib import asynccontextmanager

import pytest

from layerflow_testing.lossy_relay import HANGS, UNHEARD, Loss, LossyRelay
from layerflow_testing.stub_engine import NO_ANSWER, Behaviour, StubEngine

from .scene import at, ended, events_of, numbered, proxied, said, settled

TOKENS = 3


@asynccontextmanager
async def losing(loss, prefiller, decoder, **settings):
    """A proxy whose decoders reach its metaserver through a relay."""
    with LossyRelay("", loss, lambda: prefiller.seen) as relay:
        url = f"http://127.0.0.1:{relay.port}/v1/metaserver"
        given = {"order": "decode-first", "metaserver_url": url, **settings}
        async with proxied(prefiller, decoder, **given) as scene:
            relay.target = scene.url.removeprefix("http://")
            yield scene


async def assert_nothing_left(scene):
    health = await settled(scene)
    assert [one["active"] for one in health["prefill"] + health["decode"]] == [0, 0]
    assert {one["state"] for one in health["prefill"] + health["decode"]} == {"up"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("loss", Loss)
async def test_a_decoder_that_computes_by_itself_is_the_answer(loss, stream):
    """layerflow's decoders do, at once or at their deadline."""
    asks_for_s = 2.0 if loss in HANGS else 60.0  # in which the prefiller has been asked, if the post was heard
    with StubEngine() as prefiller, StubEngine(Behaviour(asks_for_s=asks_for_s)) as decoder:
        async with losing(loss, prefiller, decoder) as scene:
            answer = await scene.complete(stream=stream, max_tokens=TOKENS)
            assert answer.status_code == 200
            text = said(answer.text) if stream else answer.json()["choices"][0]["text"]
            assert text == numbered(TOKENS)
            assert not stream or events_of(answer.text)[-1] == "[DONE]"
            assert [seen.asked for seen in decoder.seen] == [[NO_ANSWER]]
            assert len(prefiller.seen) == (0 if loss in UNHEARD else 1)
            for seen in prefiller.seen:
                await ended(seen)
            await assert_nothing_left(scene)


@pytest.mark.parametrize("loss", [loss for loss in Loss if loss not in UNHEARD])
async def test_a_prefill_nobody_waits_for_ends_with_the_request(loss):
    """The decoder has given up, or was never told; its answer ends the prefill too."""
    with StubEngine(Behaviour(hangs=True)) as prefiller, StubEngine(Behaviour(asks_for_s=2.0)) as decoder:
        async with losing(loss, prefiller, decoder) as scene:
            assert (await scene.complete(max_tokens=TOKENS)).status_code == 200
            assert (await ended(await at(prefiller))).aborted
            assert decoder.seen[0].finished
            await assert_nothing_left(scene)


@pytest.mark.parametrize("loss", HANGS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_decoder_that_waits_for_ever_is_a_true_error(loss, stream):
    """vLLM-Ascend's does."""
    with StubEngine() as prefiller, StubEngine() as decoder:
        deadlines = {"first_token_timeout_s": 1.5, "request_timeout_s": 2.5, "attempts": 1}
        async with losing(loss, prefiller, decoder, breaker_failures=9, **deadlines) as scene:
            answer = await scene.complete(stream=stream)
            assert answer.status_code == 504, answer.text
            assert answer.json()["error"]["code"] == 504
            assert (await ended(await at(decoder))).aborted
            await assert_nothing_left(scene)
