"""``/v1/metaserver``, where decoders ask for their prefill: once each, with a true status."""

import anyio
import pytest

from layerflow.proxy.metaserver import DecodeRequest, Metaserver
from layerflow.proxy.request import ClientRequest
from layerflow_testing.stub_engine import Behaviour, StubEngine

from .scene import CHAT, COMPLETIONS, at, ended, proxied

ASKING = {"order": "decode-first"}
BY_HAND = Behaviour(asks_metaserver=False, first_s=30)


async def post(scene, child: str, **more):
    return await scene.client.post("/v1/metaserver", json={"request_id": child, **more})


def test_children_are_found_by_every_name_that_decoders_use():
    metaserver, decoding = Metaserver(), DecodeRequest(lambda *_: None)
    several = ClientRequest(COMPLETIONS, {"prompt": ["a", "b"]}, [], "id")
    with metaserver.expecting(several, "id", decoding):
        assert metaserver.find("cmpl-id-1") == (decoding, 1)
        assert metaserver.find("cmpl-id-1-0123abcd") == (decoding, 1)
        assert metaserver.find("3_cmpl-id-0") == metaserver.find("3_cmpl-id-0-0123abcd") == (decoding, 0)
        assert metaserver.knows(several, "id") and not metaserver.knows(several, "other")
        for unknown in ("id", "cmpl-id", "cmpl-id-2", "chatcmpl-id", ""):
            assert metaserver.find(unknown) is None
    assert metaserver.find("cmpl-id-1") is None
    with metaserver.expecting(ClientRequest(CHAT, {}, [], "id"), "id", decoding):
        assert metaserver.find("chatcmpl-id") == metaserver.find("chatcmpl-id-01234567") == (decoding, 0)


@pytest.mark.parametrize(
    ("body", "status"),
    [(b'{"request_id": "cmpl-x-0"}', 404), (b"{}", 400), (b"[1]", 400), (b"{", 400), (b'{"request_id": 3}', 400)],
)
async def test_what_belongs_to_no_request_is_refused(body, status):
    with StubEngine() as prefiller, StubEngine() as decoder:
        async with proxied(prefiller, decoder, **ASKING) as scene:
            answer = await scene.client.post("/v1/metaserver", content=body)
            assert answer.status_code == status and answer.json()["error"]["code"] == status
        assert not prefiller.seen


async def test_asking_again_prefills_once():
    with StubEngine(Behaviour(first_s=0.1)) as prefiller, StubEngine(BY_HAND) as decoder:
        async with proxied(prefiller, decoder, **ASKING) as scene, anyio.create_task_group() as tasks:
            tasks.start_soon(scene.complete)
            child = f"cmpl-{(await at(decoder)).headers['x-request-id']}-0"
            statuses = []

            async def ask():
                statuses.append((await post(scene, child, tag=1)).status_code)

            async with anyio.create_task_group() as asking:
                for _ in range(3):
                    asking.start_soon(ask)
            await ask()
            assert statuses == [200] * 4
            assert [seen.params for seen in prefiller.seen] == [{"request_id": child, "tag": 1}]
            assert (await post(scene, f"{child}-0123abcd")).status_code == 200
            assert len(prefiller.seen) == 2, "another child is another prefill"
            assert len({seen.headers["x-request-id"] for seen in prefiller.seen}) == 2
            tasks.cancel_scope.cancel()


async def test_a_prefill_that_fails_is_told_and_the_decoder_is_asked_without_one():
    """vLLM-Ascend's decoder takes a 502 as success, and waits for ever: so its request is ended."""
    with StubEngine(Behaviour(status=500)) as prefiller, StubEngine() as decoder:
        decoder.answer_for = lambda seen: BY_HAND if seen.params else Behaviour()
        async with proxied(prefiller, decoder, **ASKING) as scene, anyio.create_task_group() as tasks:
            answers = []

            async def ask():
                answers.append(await scene.complete())

            tasks.start_soon(ask)
            child = f"cmpl-{(await at(decoder)).headers['x-request-id']}-0"
            told = await post(scene, child)
            assert told.status_code == 502 and "stub says 500" in told.json()["error"]["message"]
            assert (await ended(decoder.seen[0])).aborted
        assert answers[0].status_code == 200
        assert decoder.seen[1].params is None and decoder.seen[1].finished
        assert len({seen.headers["x-request-id"] for seen in decoder.seen}) == 2


async def test_a_prefill_that_does_not_end_in_time_is_told():
    with StubEngine(Behaviour(hangs=True)) as prefiller, StubEngine(BY_HAND) as decoder:
        given = {**ASKING, "prefill_timeout_s": 0.3, "on_prefill_failure": "recompute", "max_recompute_tokens": 0}
        async with proxied(prefiller, decoder, **given) as scene, anyio.create_task_group() as tasks:
            answers = []

            async def ask():
                answers.append(await scene.complete())

            tasks.start_soon(ask)
            child = f"cmpl-{(await at(decoder)).headers['x-request-id']}-0"
            assert (await post(scene, child)).status_code in (502, 504)
            assert (await ended(prefiller.seen[0])).aborted
        assert answers[0].status_code == 503


async def test_a_request_that_has_ended_asks_in_vain():
    with StubEngine() as prefiller, StubEngine(Behaviour(asks_metaserver=False)) as decoder:
        async with proxied(prefiller, decoder, **ASKING) as scene:
            answer = await scene.complete()
            assert (await post(scene, f"cmpl-{answer.headers['x-request-id']}-0")).status_code == 404
        assert not prefiller.seen


async def test_the_metaservers_address_may_be_given():
    with StubEngine() as prefiller, StubEngine(Behaviour(asks_metaserver=False)) as decoder:
        url = "http://proxy.example:80/v1/metaserver"
        async with proxied(prefiller, decoder, **ASKING, metaserver_url=url, host="0.0.0.0") as scene:
            await scene.client.post(scene.url.replace("0.0.0.0", "127.0.0.1") + COMPLETIONS, json={"prompt": "a"})
        assert decoder.seen[0].params["metaserver"] == url


async def test_a_wildcard_address_is_told_as_the_decoder_sees_it():
    with StubEngine() as prefiller, StubEngine() as decoder:
        async with proxied(prefiller, decoder, **ASKING, host="0.0.0.0") as scene:
            local = scene.url.replace("0.0.0.0", "127.0.0.1")
            assert (await scene.client.post(local + COMPLETIONS, json={"prompt": "a"})).status_code == 200
        assert decoder.seen[0].params["metaserver"] == f"{local}/v1/metaserver" and decoder.seen[0].asked == [200]
