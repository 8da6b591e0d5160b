"""What a worker learns from finished steps, and what it advises. No clock, no server."""

import pytest

from layerflow.agent.costs import DOUBT, LoadPolicy, layer_seconds, work_of
from layerflow.agent.values import MISS, Hit, StepRequest
from layerflow.flow.cost import ComputeModel, Mode, attention_pairs
from layerflow.keys import Chain, root_digest
from layerflow.observe.trace import Span, StepTrace, figures
from layerflow.spec import GroupSpec, ModelSpec, Plane

LAYERS = 4
ROW = 1024  # bytes of one token in one layer
GROUP = GroupSpec("full", 16, tuple(range(LAYERS)), (Plane("kv", "uint8", (ROW,)),))
SPEC = ModelSpec("model", "content", (GROUP,))
TOKEN_S = 1e-5  # compute of one token in one layer
HIT = Hit(1024)


def trace(layer_s=0.0, loads=(), waits=(), kv_after=0.2, prologue=5.0) -> StepTrace:
    """A step whose layers take `layer_s`, of which the first `kv_after` until its KV is written.

    :param loads: (bytes, seconds), one after the other.
    :param waits: seconds by layer.
    """
    spans, now = [], 0.0
    for layer, (nbytes, seconds) in enumerate(loads):
        spans.append(Span("load", layer, layer * seconds, (layer + 1) * seconds, nbytes))
    for layer in range(LAYERS if layer_s else 0):
        began, waited = now, waits[layer] if waits else 0.0
        if waited:
            spans.append(Span("wait", layer, began, began + waited))
        start = began + waited
        spans.append(Span("compute", layer, start - (prologue if layer == 0 else 0.0), start + kv_after * layer_s))
        now = start + layer_s
    return StepTrace(1, 0, "", spans)


def observe(advisor: LoadPolicy, seen: StepTrace, work: tuple[int, int] | None) -> None:
    advisor.observe(figures(seen, "load"), work, layer_seconds(seen))


def taught(gbps=1.0, token_s=TOKEN_S, spec=SPEC) -> LoadPolicy:
    advisor = LoadPolicy(spec)
    for tokens in (64, 256, 1024, 2048):
        nbytes = tokens * ROW
        observe(advisor, trace(tokens * token_s, [(nbytes, nbytes / gbps / 1e9)] * LAYERS), (tokens, 0))
    return advisor


def test_no_hit_is_computed_whatever_the_setting():
    for setting in ("auto", "layerwise", "bulk"):
        assert LoadPolicy(SPEC).advise(setting, MISS, 100) is Mode.RECOMPUTE


@pytest.mark.parametrize("setting", ["layerwise", "bulk"])
def test_a_setting_is_followed_however_slow_the_link(setting):
    assert taught(gbps=1e-6).advise(setting, HIT, 1088) is Mode(setting)


def test_who_knows_nothing_loads_layer_by_layer():
    advisor = LoadPolicy(SPEC)
    assert advisor.advise("auto", HIT, 1088) is Mode.LAYERWISE
    for _ in range(5):
        observe(advisor, trace(loads=[(1 << 20, 10.0)]), None)
    assert advisor.advise("auto", HIT, 1088) is Mode.LAYERWISE  # the link is known, compute is not


def test_the_quicker_way_is_advised():
    # 1,024 tokens: 10.2 ms of compute a layer, 1 MiB a layer.
    assert taught(gbps=1.0).advise("auto", HIT, 1088) is Mode.LAYERWISE
    assert taught(gbps=0.05).advise("auto", HIT, 1088) is Mode.RECOMPUTE
    assert taught(gbps=0.05, token_s=1e-4).advise("auto", HIT, 1088) is Mode.LAYERWISE


def test_a_link_that_slows_down_is_given_up_and_one_that_recovers_is_found_again():
    advisor = taught(gbps=1.0)
    for _ in range(20):
        observe(advisor, trace(loads=[(1 << 20, (1 << 20) / 0.05e9)] * LAYERS), None)
    verdicts = [advisor.advise("auto", HIT, 1088) for _ in range(400)]
    assert verdicts[0] is Mode.RECOMPUTE
    tried = verdicts.index(Mode.LAYERWISE)
    assert 10 < tried < 300
    for _ in range(20):
        observe(advisor, trace(loads=[(1 << 20, (1 << 20) / 1e9)] * LAYERS), None)
    assert advisor.advise("auto", HIT, 1088) is Mode.LAYERWISE


def test_a_trial_that_finds_the_link_slow_ends_the_doubt():
    advisor = taught(gbps=0.05)
    while advisor.advise("auto", HIT, 1088) is Mode.RECOMPUTE:
        pass
    observe(advisor, trace(loads=[(1 << 20, (1 << 20) / 0.05e9)] * LAYERS), None)
    assert advisor.advise("auto", HIT, 1088) is Mode.RECOMPUTE
    assert DOUBT < 0.05


def test_a_layer_lasts_until_the_next_one_waits_not_counted():
    # The KV of a layer is written early, the first span holds foreign time, two layers wait for their bytes.
    step = trace(0.01, waits=(0.5, 0.0, 0.3, 0.2))
    assert layer_seconds(step) == pytest.approx(0.01)
    assert layer_seconds(trace()) is None
    one = StepTrace(1, 0, "", [Span("compute", 0, 0.0, 1.0)])
    assert layer_seconds(one) is None


def test_waits_before_the_first_layer_are_not_taken_off():
    bulk = trace(0.01)
    bulk.spans += [Span("wait", layer, -1.0, -0.5) for layer in range(LAYERS)]
    assert layer_seconds(bulk) == pytest.approx(0.01)


def asked(start: int, stop: int) -> StepRequest:
    chain = Chain(root_digest(SPEC.fingerprint), [1] * 16, SPEC.chunk_tokens)
    return StepRequest("r", chain, (), save=(start, stop))


def test_work_of_a_step_has_the_attention_of_all_its_requests():
    requests = [asked(0, 100), asked(1000, 1050), asked(7, 7)]
    tokens, context = work_of(requests)
    assert tokens == 150
    pairs = attention_pairs(100, 0) + attention_pairs(50, 1000)
    assert attention_pairs(tokens, context) == pytest.approx(pairs, rel=0.01)
    assert work_of([asked(5, 5)]) is None


def test_a_thousand_short_steps_do_not_wash_out_what_is_known_of_long_ones():
    model = ComputeModel()
    for tokens in (64, 512, 4096):
        for context in (0, tokens):
            model.observe(tokens, context, 1e-4 + tokens * 1e-6 + attention_pairs(tokens, context) * 1e-9)
    for number in range(300):
        noise = 1.0 + 0.2 * (number % 5 - 2) / 2
        model.observe(64, 256, (1e-4 + 64e-6 + attention_pairs(64, 256) * 1e-9) * noise)
    expected = 1e-4 + 4096e-6 + attention_pairs(4096, 4096) * 1e-9
    assert model.estimate.layer_seconds(4096, 4096) == pytest.approx(expected, rel=0.1)


def test_batches_that_overlap_are_one_transfer():
    # Four batches of 1 MiB, all sent at once, the last one there after 4.2 ms: 1 GB/s, not 250 MB/s.
    loads = [Span("load", layer, 0.0, (layer + 1) * 1.05e-3, 1 << 20) for layer in range(LAYERS)]
    advisor = LoadPolicy(SPEC)
    for tokens in (64, 256, 1024):
        observe(advisor, StepTrace(1, 0, "", loads + trace(tokens * TOKEN_S).spans), (tokens, 0))
    assert advisor.advise("auto", HIT, 1088) is Mode.LAYERWISE


def test_a_state_is_loaded_once_however_long_the_hit():
    state = GroupSpec("state", 16, (LAYERS,), (Plane("ssm", "uint8", (1 << 20,)),))
    advisor = taught(spec=ModelSpec("hybrid", "content", (GROUP, state)))
    assert advisor.advise("auto", HIT, 1088) is Mode.LAYERWISE
    attention = GroupSpec("full", 16, (LAYERS,), (Plane("kv", "uint8", (1 << 16,)),))  # as many bytes a block
    advisor = taught(spec=ModelSpec("wide", "content", (GROUP, attention)))
    assert advisor.advise("auto", HIT, 1088) is Mode.RECOMPUTE
