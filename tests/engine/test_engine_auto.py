"""``mode = auto`` in the glue: the agent's advice is followed."""

import pytest
from fake_agent import FakeAgent, FakePool

from layerflow.agent import Mode
from layerflow_engine import Engine
from layerflow_engine.config import TINY_GQA, model_spec
from layerflow_engine.glue import LayerflowConnection
from layerflow_engine.texts import passage

PROMPT = passage(229)


class Advising(FakeAgent):
    """Gives one piece of advice, and notes who asked and whose lease was dropped."""

    advice = Mode.LAYERWISE

    def advise(self, hit, prompt_tokens):
        self.asked = (hit.tokens, prompt_tokens)
        return self.advice if hit.tokens else Mode.RECOMPUTE

    def drop_lease(self, request):
        self.dropped = [*getattr(self, "dropped", []), request]


@pytest.mark.parametrize("advice", list(Mode))
def test_advice_is_followed(advice):
    engine = Engine(TINY_GQA)
    agent = Advising(model_spec(TINY_GQA, engine.model.weights, 64), engine.cache.tensors, FakePool())
    engine.connect(LayerflowConnection(agent))
    cold = engine.generate([PROMPT], 4)[0]
    engine.drain(5)
    assert not hasattr(agent, "dropped")  # a miss has no lease
    agent.advice = advice
    agent.calls.clear()
    warm = engine.generate([PROMPT], 4)[0]
    engine.drain(5)
    assert agent.asked == (228, 229)
    assert warm.tokens == cold.tokens
    recomputed = advice is Mode.RECOMPUTE
    assert warm.cached_tokens == (0 if recomputed else 228)
    assert getattr(agent, "dropped", []) == (["request-1"] if recomputed else [])
    waits_before_the_first_layer = agent.calls.index(("done", 0))
    assert waits_before_the_first_layer == (TINY_GQA.num_layers if advice is Mode.BULK else 1)
