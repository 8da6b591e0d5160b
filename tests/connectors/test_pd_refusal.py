"""A request whose prefill is lost ends with an error of the server, however vLLM keeps what a grammar has failed by."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from layerflow.connectors.vllm.pd import side


@dataclass(frozen=True)
class RequestError:
    """vLLM 0.33's."""

    code: str
    message: str
    retryable: bool = False


class Scheduler032:
    """What vLLM 0.32's scheduler does with such a request."""

    def __init__(self) -> None:
        self.grammar_compile_error_reqs: Any = set()

    def _try_promote_blocked_waiting_request(self, request: Any) -> bool:
        if isinstance(request.structured_output_request.grammar, Exception):
            self.grammar_compile_error_reqs.add(request.request_id)
        return False


class Scheduler033:
    """And 0.33's."""

    def __init__(self) -> None:
        self.grammar_compile_error_reqs: Any = {}

    def _try_promote_blocked_waiting_request(self, request: Any) -> bool:
        grammar = request.structured_output_request.grammar
        if isinstance(grammar, Exception):
            self.grammar_compile_error_reqs[request.request_id] = RequestError(
                code="validation_error", message=f"Invalid structured outputs: {grammar}"
            )
        return False


class Grammar:
    """vLLM's StructuredOutputRequest."""

    def __init__(self, params: Any) -> None:
        self._grammar: Any = None

    @property
    def grammar(self) -> Any:
        return self._grammar


def modules(monkeypatch: pytest.MonkeyPatch, scheduler: type[Any]) -> None:
    """vLLM's, as far as they are used."""
    found = {
        "vllm": {},
        "vllm.outputs": {"RequestError": RequestError},
        "vllm.sampling_params": {"StructuredOutputsParams": lambda **_: None},
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.sched": {},
        "vllm.v1.core.sched.scheduler": {"Scheduler": scheduler},
        "vllm.v1.request": {"RequestStatus": SimpleNamespace(WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR="waits")},
        "vllm.v1.structured_output": {},
        "vllm.v1.structured_output.request": {"StructuredOutputRequest": Grammar},
    }
    for name, attributes in found.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)


def request(name: str, error: Exception | None = None) -> Any:
    grammar = Grammar(None)
    grammar._grammar = error
    return SimpleNamespace(request_id=name, structured_output_request=grammar, status="new")


@pytest.mark.parametrize("base", [Scheduler032, Scheduler033])
def test_the_fault_is_the_servers(monkeypatch: pytest.MonkeyPatch, base: type[Any]) -> None:
    scheduler = type("Scheduler", (base,), dict(vars(base)))
    modules(monkeypatch, scheduler)
    assert side.can_end_with_error()
    made, asked, wrong = scheduler(), request("lost"), request("wrong", ValueError("no such grammar"))
    for _ in range(2):  # twice: it is installed once
        side.end_with_error(asked, "the prefill engine is gone")
    assert asked.status == "waits"
    for each in (asked, wrong):
        assert not made._try_promote_blocked_waiting_request(each)
    ended = made.grammar_compile_error_reqs
    assert set(ended) == {"lost", "wrong"}
    if isinstance(ended, dict):
        assert ended["lost"].code != "validation_error"
        assert ended["lost"].message == "Internal server error", "what the proxy knows"
        assert ended["wrong"].code == "validation_error"
