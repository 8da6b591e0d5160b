"""What an engine answers under a status of 200 is looked at."""

import pytest

from layerflow.errors import UpstreamError
from layerflow.proxy.answers import make_event
from layerflow.proxy.legs import StreamCheck, whole_answer


def event(text: str):
    return make_event(text.encode())


TOKEN = '{"choices":[{"index":0,"text":"a","finish_reason":null}]}'
LAST = '{"choices":[{"index":0,"text":"b","finish_reason":"stop"}]}'


def test_a_good_stream():
    check = StreamCheck("D")
    assert [check.take(event(one)) for one in (TOKEN, LAST)] == [True, True]
    assert not check.take(event('{"choices":[],"usage":{"prompt_tokens":1}}')) and check.usage
    assert not check.take(event("[DONE]")) and check.done
    check.ended(b"")


@pytest.mark.parametrize(
    "delta", ['{"role":"assistant","content":""}', '{"role":"assistant"}', '{"role":"assistant","tool_calls":[]}']
)
def test_a_role_alone_brings_the_client_nothing(delta):
    check = StreamCheck("D")
    assert not check.take(event(f'{{"choices":[{{"index":0,"delta":{delta}}}]}}'))
    assert check.take(event('{"choices":[{"index":0,"delta":{"reasoning_content":"hm"}}]}'))


@pytest.mark.parametrize(
    "choice",
    [
        '"delta":{}',
        '"delta":{"content":""}',
        '"delta":{"content":null}',
        '"delta":{"role":"assistant","content":""},"logprobs":{"content":[{"token":"x"}]}',
        '"delta":{"role":"assistant","content":""},"token_ids":[7]',
        '"text":""',
    ],
)
def test_a_token_without_text_is_a_token(choice):
    assert StreamCheck("D").take(event(f'{{"choices":[{{"index":0,{choice}}}]}}'))


@pytest.mark.parametrize(
    ("events", "told"),
    [
        (["[DONE]"], "without a finish_reason"),
        ([TOKEN, "[DONE]"], "without a finish_reason"),
        ([LAST, '{"choices":[{"index":1,"text":"a"}]}', "[DONE]"], "without a finish_reason"),
        (["nonsense"], "not the API's"),
        (['{"choices": 3}'], "not the API's"),
        (['{"error": {"message": "out of memory"}}'], "out of memory"),
    ],
)
def test_streams_that_are_none(events, told):
    check = StreamCheck("D")
    with pytest.raises(UpstreamError, match=told):
        for one in events:
            check.take(event(one))
    assert not check.done


def test_a_stream_that_ends_early():
    check = StreamCheck("D")
    check.take(event(TOKEN))
    with pytest.raises(UpstreamError, match=r"before the end in the middle of an event \(4 bytes\)"):
        check.ended(b"data")


@pytest.mark.parametrize(
    ("code", "status", "judged"), [(400, 400, True), (503, 503, False), ("x", 500, False), (200, 500, False)]
)
def test_an_error_in_a_stream_has_the_status_that_it_names(code, status, judged):
    with pytest.raises(UpstreamError) as caught:
        StreamCheck("D").take(event(f'{{"error": {{"message": "m", "code": {code!r}}}}}'.replace("'", '"')))
    assert (caught.value.status, caught.value.rejected, caught.value.counts) == (status, judged, not judged)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "an empty body"),
        (b"<html>", "malformed"),
        (b"[]", "got `array`"),
        (b"{}", "without a choice"),
        (b'{"choices": []}', "without a choice"),
        (b'{"choices": [{"text": "a"}]}', "no finish_reason"),
        (b'{"error": {"message": "no room"}}', "no room"),
    ],
)
def test_whole_answers_that_are_none(body, told):
    with pytest.raises(UpstreamError, match=told):
        whole_answer("D", body)
