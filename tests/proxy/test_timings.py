"""Short prompts go the way that was measured to be quicker."""

import json

import pytest

from layerflow.config.proxy import ProxySettings
from layerflow.proxy.answers import ClientResponse
from layerflow.proxy.context import RequestRoute, ShortPrompts, TokenEstimate, make_context
from layerflow.proxy.exchange import MEDIA_TOKENS, Exchange, _sizes_of_messages
from layerflow.proxy.metaserver import Metaserver
from layerflow.proxy.request import CHAT, read_request
from layerflow_testing.stub_engine import StubEngine

from .scene import ROOM, proxied


def ways(short: ShortPrompts, tokens: int, count: int) -> list[RequestRoute]:
    return [short.choose(tokens) for _ in range(count)]


def test_long_prompts_are_always_prefilled_apart():
    short = ShortPrompts(100)
    assert set(ways(short, 101, 100)) == {RequestRoute.APART} and ways(ShortPrompts(0), 1, 1) == [RequestRoute.APART]


def test_short_ones_go_alone_until_both_ways_are_known_and_then_the_quicker_way():
    short = ShortPrompts(100)
    assert set(ways(short, 60, 31)) == {RequestRoute.ALONE}
    assert ways(short, 60, 1) == [RequestRoute.APART], "one in 32 goes the other way, to be measured"
    short.learn(60, RequestRoute.ALONE, 0.2)
    short.learn(60, RequestRoute.APART, 0.1)
    assert set(ways(short, 60, 31)) == {RequestRoute.APART} and ways(short, 60, 1) == [RequestRoute.ALONE]
    assert set(ways(short, 8, 31)) == {RequestRoute.ALONE}, "another length has figures of its own"
    for _ in range(50):
        short.learn(60, RequestRoute.APART, 0.4)
    assert set(ways(short, 60, 31)) == {RequestRoute.ALONE}


def test_tokens_of_a_text_are_learnt():
    estimate = TokenEstimate()
    assert estimate.tokens(400) == 100 and estimate.tokens(0) == 1
    for _ in range(100):
        estimate.learn(200, 100)
    assert estimate.tokens(400) == 200
    estimate.learn(100, 0)
    assert estimate.tokens(400) == 200


def test_no_answer_of_one_engine_makes_nonsense_of_the_estimate():
    """What an engine counted for something else than text, or says at all."""
    for tokens in (1, 10**9):
        estimate = TokenEstimate()
        for _ in range(100):
            estimate.learn(4_000_000, tokens)
        assert 1 << 12 <= estimate.tokens(1 << 16) <= 1 << 16


def chat(*parts) -> Exchange:
    """A chat at a proxy that has learnt nothing yet."""
    raw = json.dumps({"messages": [{"role": "user", "content": list(parts)}]}).encode()
    settings = ProxySettings(prefill="p:1", decode="d:1")
    request = read_request(CHAT, [], raw, "id", 8)
    return Exchange(make_context(settings, Metaserver()), request, ClientResponse(lambda _: None, "id", 1, ROOM))


TEXT = {"type": "text", "text": "what is that? " * 100}
BASE64 = "QUJD" * 250_000


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64}"}},
        {"type": "image_url", "image_url": f"data:image/png;base64,{BASE64}"},
        {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}},
        {"type": "image_embeds", "image_embeds": BASE64},
    ],
    ids=lambda part: part["type"],
)
def test_a_picture_counts_for_what_engines_make_of_one_and_not_for_its_bytes(part):
    alone = chat(TEXT)
    assert 300 < alone.tokens < 500
    for parts, count in (((part, TEXT), 1), ((part, TEXT, part), 2)):
        assert 0 <= chat(*parts).tokens - alone.tokens - count * MEDIA_TOKENS < 100


def test_a_text_about_pictures_is_text():
    said = '{"image_url": {"url": "x"}} "input_audio": ' * 100
    assert chat({"type": "text", "text": said}).tokens < 2500


def test_what_is_looked_at_for_pictures_is_bounded():
    raw = b'{"messages": "' + b'\\"' * (1 << 21) + b'", "x": {"image_url": {'
    assert _sizes_of_messages(raw * 2).text_bytes == 2 * len(raw)


@pytest.mark.usefixtures("prefills_are_waited_for")
async def test_nothing_is_learnt_of_a_prompt_with_a_picture(monkeypatch):
    learnt = []
    monkeypatch.setattr(TokenEstimate, "learn", lambda _, *told: learnt.append(told))
    with StubEngine() as prefiller, StubEngine() as decoder:
        async with proxied(prefiller, decoder, order="prefill-first") as scene:
            picture = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
            for content in ([TEXT, picture], [TEXT]):
                body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
                assert (await scene.client.post(CHAT, json=body)).status_code == 200
    assert len(learnt) == 1
