"""Who gets the next request: the circuit breaker, load, and who has the prompt's beginning."""

import json

import anyio
import pytest

from layerflow.config.proxy import InstanceAddress, ProxySettings, instance_addresses
from layerflow.errors import ProxyError, UpstreamError
from layerflow.proxy.instances import (
    BLOCK_BYTES,
    MAX_HOLDERS,
    Breaker,
    BreakerState,
    InstanceRole,
    Registry,
    digests,
    prompt_bytes,
    prompt_head,
)
from layerflow.proxy.request import CHAT, COMPLETIONS, Body, only_prompt, read_request


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def fail(breaker: Breaker, **kind: bool) -> None:
    with pytest.raises(UpstreamError), breaker.watch():
        raise UpstreamError("x", **kind)


def succeed(breaker: Breaker) -> None:
    with breaker.watch():
        pass


def test_failures_in_a_row_open_the_breaker_and_one_request_tries_later():
    clock = Clock()
    breaker = Breaker(2, 10, clock)
    fail(breaker)
    succeed(breaker)
    fail(breaker)
    assert breaker.allows
    fail(breaker)
    assert breaker.state is BreakerState.OPEN and not breaker.allows
    clock.now += 10
    assert breaker.state is BreakerState.HALF_OPEN and breaker.allows
    with pytest.raises(UpstreamError), breaker.watch():
        assert not breaker.allows, "one request at a time"
        raise UpstreamError("still broken")
    assert breaker.state is BreakerState.OPEN
    clock.now += 10
    succeed(breaker)
    assert breaker.state is BreakerState.CLOSED


def test_what_a_client_did_wrong_does_not_count():
    breaker = Breaker(1, 10, Clock())
    for _ in range(5):
        fail(breaker, rejected=True, counts=False)
        fail(breaker, counts=False)
    assert breaker.state is BreakerState.CLOSED


async def test_a_cancelled_try_leaves_the_next_one_free():
    clock = Clock()
    breaker = Breaker(1, 10, clock)
    fail(breaker)
    clock.now += 10
    with anyio.CancelScope() as scope, breaker.watch():
        scope.cancel()
        await anyio.sleep_forever()
    assert breaker.state is BreakerState.HALF_OPEN and breaker.allows


def test_the_begun_answer_of_a_trial_opens_the_engine_to_all():
    """It may stream for minutes, or be read slowly."""
    clock = Clock()
    breaker = Breaker(2, 10, clock)
    fail(breaker)
    fail(breaker)
    clock.now += 10
    with pytest.raises(UpstreamError), breaker.watch() as answered:
        assert not breaker.allows
        answered()
        assert breaker.state is BreakerState.CLOSED and breaker.allows and breaker.answers
        raise UpstreamError("it breaks off")
    assert breaker.state is BreakerState.OPEN, "one failure more, and it is left alone again"


def test_an_engine_that_begins_every_answer_and_ends_none_is_left_alone():
    breaker = Breaker(2, 10, Clock())
    for _ in range(2):
        with pytest.raises(UpstreamError), breaker.watch() as answered:
            answered()
            raise UpstreamError("it breaks off")
    assert breaker.state is BreakerState.OPEN


def test_while_a_trial_goes_on_without_a_word_others_follow_one_by_one():
    """An answer that is no stream says nothing until its end."""
    clock = Clock()
    breaker = Breaker(1, 10, clock)
    fail(breaker)
    clock.now += 10
    with breaker.watch():
        clock.now += 9
        assert not breaker.allows
        clock.now += 1
        assert breaker.allows
        with breaker.watch():
            assert not breaker.allows
    assert breaker.state is BreakerState.CLOSED


def registry(*hosts: str, **settings) -> Registry:
    made = Registry(ProxySettings(**settings), Clock())
    for host in hosts:
        made.add(InstanceRole.PREFILL, InstanceAddress(f"http://{host}:1"))
    return made


def picked(of: Registry, text: str = "", tokens: int = 100, **more) -> str:
    return of.pick(InstanceRole.PREFILL, digests(text.encode()), tokens, **more).url[7:-2]


def test_the_least_loaded_is_picked_and_equals_take_turns():
    engines = registry("a", "b", "c")
    assert [picked(engines) for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]
    with engines.of(InstanceRole.PREFILL)[0].busy(50), engines.of(InstanceRole.PREFILL)[2].busy(10):
        assert [picked(engines), picked(engines)] == ["b", "b"]


def test_who_has_the_beginning_is_picked_until_the_others_are_quicker():
    engines = registry("a", "b")
    b = engines.of(InstanceRole.PREFILL)[1]
    prompt = "x" * 10 * BLOCK_BYTES
    engines.prefixes.record(digests(prompt.encode()), b)
    assert [picked(engines, prompt) for _ in range(3)] == ["b"] * 3
    assert picked(engines, prompt[: 5 * BLOCK_BYTES] + "other" * 1000) == "b", "half of it is better than none"
    with b.busy(99):
        assert picked(engines, prompt) == "b"
    with b.busy(101):
        assert picked(engines, prompt) == "a"


def test_an_engine_that_was_down_has_lost_what_it_had():
    engines = registry("a", "b")
    a, b = engines.of(InstanceRole.PREFILL)
    prompt = "x" * 2 * BLOCK_BYTES
    engines.prefixes.record(digests(prompt.encode()), b)
    b.went_down()
    assert picked(engines, prompt) == "a"
    b.down = False
    assert engines.prefixes.matched(digests(prompt.encode()), [a, b]) == {}


def test_the_table_is_bounded_and_forgets_what_was_not_used():
    engines = registry("a", affinity_prefixes=3)
    (a,) = engines.of(InstanceRole.PREFILL)
    first, other = (digests(letter.encode() * 2 * BLOCK_BYTES) for letter in "xy")
    engines.prefixes.record(first, a)
    engines.prefixes.record(other, a)
    assert len(engines.prefixes) == 3
    assert engines.prefixes.matched(other, [a]) == {a: 2} and engines.prefixes.matched(first, [a]) == {}
    engines.prefixes.clear()
    assert engines.prefixes.matched(other, [a]) == {}


def test_a_beginning_has_few_holders():
    engines = registry(*"abcdefgh")
    beginnings = digests(b"x" * BLOCK_BYTES)
    for instance in engines.all:
        engines.prefixes.record(beginnings, instance)
    assert len(engines.prefixes.matched(beginnings, engines.all)) == MAX_HOLDERS


def test_wanted_tried_and_down():
    engines = registry("a", "b")
    a, b = engines.of(InstanceRole.PREFILL)
    assert picked(engines, wanted="b:1") == "b" and picked(engines, wanted="b:1") == "b"
    assert picked(engines, tried=[b], wanted="b:1") == "a"
    a.went_down()
    with pytest.raises(ProxyError, match="prefill-1 down, prefill-2 up, 1 of them failed this request") as caught:
        picked(engines, tried=[b])
    assert caught.value.status == 503


def beginning(**body) -> bytes:
    raw = json.dumps(body).encode()
    request = read_request(CHAT if "messages" in body else COMPLETIONS, [], raw, "id", 8)
    prompt = request.prompts[0] if request.prompts else only_prompt(request.body.raw("prompt"))
    return prompt_bytes(request.body, prompt, prompt_head(request.body))


def test_the_same_beginning_gives_the_same_digests():
    long, short = "y" * 5000, "y" * 3000
    for body in ({"model": "m", "prompt": long}, {"model": "m", "messages": [{"role": "user", "content": long}]}):
        cut = {
            **body,
            **({"prompt": short} if "prompt" in body else {"messages": [{"role": "user", "content": short}]}),
        }
        whole, part = digests(beginning(**body)), digests(beginning(**cut))
        assert len(whole) == 4 and whole[: len(part)] == part and len(part) == 2
        assert digests(beginning(**body, cache_salt="s"))[0] != whole[0]
    assert beginning(prompt=[1, 2]) == beginning(prompt=[[1, 2]]) == beginning(prompt=[[1, 2], [3]])
    assert beginning(prompt="a") == beginning(prompt=["a"]) == beginning(prompt=["a", "b"])
    assert digests(beginning(prompt="\ud800" * 2000)) and beginning(prompt={"no": "prompt"})


def test_tokens_are_the_same_however_their_list_is_written():
    ids = list(range(1, 2000))
    spread, dense = (
        Body({"model": b'"m"', "prompt": json.dumps(ids, separators=separators, indent=indent).encode()})
        for separators, indent in ((None, 2), ((",", ":"), None))
    )
    assert prompt_bytes(spread, spread.raw("prompt"), b"") == prompt_bytes(dense, dense.raw("prompt"), b"")


@pytest.mark.parametrize("unit", ["a", "\u00e9", "\U0001f600", '"', "\\"])
def test_prompts_that_are_longer_than_what_is_looked_at_begin_as_shorter_ones_do(unit):
    short, long = unit * 300_000, unit * 700_000
    ids = [len(unit)] * 200_000
    for one, other in ((short, long), (ids, ids * 3)):
        fewer, more = digests(beginning(prompt=one)), digests(beginning(prompt=other))
        common = min(len(fewer), len(more), 100)
        assert common == 100 and fewer[:common] == more[:common]


def test_addresses():
    assert instance_addresses("a:1, http://b:2=tcp://b:9+tcp://c:9\nhttps://c:3/") == [
        InstanceAddress("http://a:1"),
        InstanceAddress("http://b:2", ("tcp://b:9", "tcp://c:9")),
        InstanceAddress("https://c:3"),
    ]
    assert [one.url for one in instance_addresses("b\u00fccher.de:1 http://[::1]:2 my_host.:3 A:4")] == [
        "http://xn--bcher-kva.de:1",
        "http://[::1]:2",
        "http://my_host.:3",
        "http://a:4",
    ]
    for bad in (
        "a",
        "http://a",
        "http://a:1/v1",
        "ftp://a:1",
        "http://a:99999",
        "http://u:p@a:1",
        "http://:p@a:1",
        "a:1=b:2",
        "http://b\u00fccher..de:80",
        "http://a..b:80",
        "http://x\u0001y:80",
        "http://x%00:80",
        f"http://{'x' * 64}:80",
        "http://[fe80::1%25 x]:80",
        "a:1 a:1",
    ):
        with pytest.raises(ValueError, match=r"should be|twice"):
            instance_addresses(bad)
