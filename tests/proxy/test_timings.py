"""Short prompts go the way that was measured to be quicker."""

from layerflow.proxy.context import RequestRoute, ShortPrompts, TokenEstimate


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
