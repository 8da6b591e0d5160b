"""Weights that are replaced in place, as trainers do it, are seen; what an engine does with its own is not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from layerflow.connectors.common import loaded
from layerflow.connectors.common.loaded import EXCHANGED, LOADED, STILL_S, UNREADABLE, WRITTEN, LoadedWeights


class Model(nn.Module):
    """Layers of several types, an embedding that is tied, and a way to load them as vLLM's models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 64, dtype=torch.bfloat16)
        self.head = nn.Linear(64, 500, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(4))
        self.packed = nn.Parameter(torch.randint(0, 1 << 30, (64, 32), dtype=torch.int32), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(48, 64).t(), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.none = nn.Parameter(torch.empty(0))
        self.register_buffer("table", torch.zeros(16))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        own = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            own[name].data.copy_(weight)
            loaded.add(name)
        return loaded


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def watch(model: nn.Module, *, balanced: bool = False) -> LoadedWeights:
    return LoadedWeights(list(model.modules()), balanced=balanced)


def train(model: Model) -> None:
    """One element in a hundred is another, by its last bit."""
    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:
            bits = parameter.data.view(torch.int16)
            bits ^= (torch.rand(bits.shape) < 0.01).to(torch.int16)


def exchange(model: Model) -> None:
    model.layers[1].weight = nn.Parameter(model.layers[1].weight.detach().clone())


def repoint(model: Model) -> None:
    model.layers[1].weight.data = model.layers[1].weight.data.clone()


def test_untouched_weights_are_the_same(model: Model) -> None:
    weights = watch(model)
    model.layers[0](torch.zeros(1, 64, dtype=torch.bfloat16))
    model.table += 1  # type: ignore[operator]
    assert not weights.change()


@pytest.mark.parametrize(
    ("replace", "seen"),
    [
        (train, WRITTEN),
        (lambda model: model.packed.data.add_(1), WRITTEN),
        (lambda model: model.turned.data.add_(1), WRITTEN),
        (lambda model: model.scale.data.add_(1), WRITTEN),
        (lambda model: model.head.weight.data.copy_(model.head.weight.data.roll(7, 0)), WRITTEN),
        (exchange, EXCHANGED),
        (repoint, EXCHANGED),
        (lambda model: model.load_weights([]), LOADED),
    ],
    ids=["trained", "packed", "transposed", "a scale", "tied", "exchanged", "repointed", "loaded"],
)
def test_each_way_to_replace_them_is_seen_until_it_is_accepted(
    model: Model, replace: Callable[[Model], None], seen: str
) -> None:
    weights = watch(model)
    replace(model)
    assert weights.change() == seen
    assert weights.change() == seen
    weights.accept()
    assert not weights.change()
    train(model)
    assert weights.change() == WRITTEN


def test_loading_is_seen_whatever_it_writes_and_still_loads(model: Model) -> None:
    weights = watch(model)
    assert model.load_weights([("scale", torch.tensor(0.5))]) == {"scale"}
    assert weights.change() == LOADED


def test_loading_one_layer_of_the_model_is_seen(model: Model) -> None:
    outer = nn.Module()
    outer.inner = model
    weights = watch(outer)
    model.load_weights([])
    assert weights.change() == LOADED


def test_a_load_that_fails_has_changed_something(model: Model) -> None:
    weights = watch(model)
    with pytest.raises(KeyError):
        model.load_weights([("scale", torch.tensor(2.0)), ("nowhere", torch.tensor(2.0))])
    assert weights.change() == LOADED


def test_buffers_in_which_offloaded_layers_take_turns_are_no_weights(model: Model) -> None:
    model.layers[2].weight.data = model.layers[1].weight.data
    weights = watch(model)
    model.layers[1].weight.data.fill_(1)
    assert not weights.change()


def test_experts_that_vllm_moves_between_ranks_are_not_compared(model: Model) -> None:
    model.layers[0].get_expert_weights = lambda: []  # type: ignore[assignment]
    moved, kept = watch(model, balanced=True), watch(model)
    model.layers[0].weight.data.fill_(1)
    assert not moved.change()
    assert kept.change() == WRITTEN


def test_what_has_no_plain_memory_is_watched_at_its_loading(
    model: Model, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(parameter: nn.Parameter) -> None:
        raise RuntimeError("no storage")

    monkeypatch.setattr(nn.Parameter, "untyped_storage", refuse, raising=False)
    weights = watch(model)
    train(model)
    assert not weights.change()
    model.load_weights([])
    assert weights.change() == LOADED


class Reads:
    """Counts each look at the weights, and fails it where that would end the process, or where the device does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.unmapped = self.broken = False
        read = loaded._read

        def counted(group: object) -> torch.Tensor:
            assert not self.unmapped, "unmapped memory is read"
            if self.broken:
                raise RuntimeError("the device has failed")
            self.count += 1
            return read(group)  # type: ignore[arg-type]

        monkeypatch.setattr(loaded, "_read", counted)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


@pytest.mark.parametrize(
    ("meanwhile", "seen"),
    [(lambda model: None, ""), (train, WRITTEN), (lambda model: model.load_weights([]), LOADED)],
    ids=["came back", "others", "loaded"],
)
def test_weights_that_are_away_are_not_read_and_compared_when_they_are_back(
    model: Model, reads: Reads, meanwhile: Callable[[Model], None], seen: str
) -> None:
    weights = watch(model)
    for _ in range(2):
        weights.let_go()
    reads.unmapped = True
    assert weights.are_away and not weights.change()
    reads.unmapped = False
    meanwhile(model)
    for _ in range(2):
        weights.take_up()
    assert (weights.are_away, weights.change()) == (False, seen)


def test_a_change_from_before_they_went_stays(model: Model) -> None:
    weights = watch(model)
    model.load_weights([])
    weights.let_go()
    assert weights.change() == LOADED
    weights.take_up()
    assert weights.change() == LOADED


@pytest.mark.parametrize("early", [True, False])
def test_weights_that_were_away_and_cannot_be_compared_count_as_others(model: Model, reads: Reads, early: bool) -> None:
    weights = watch(model)
    reads.broken = early
    assert not weights.change()
    weights.let_go()
    reads.broken = True
    weights.take_up()
    assert weights.change() == UNREADABLE
    weights.accept()
    assert not weights.change()


def test_on_a_device_many_questions_in_a_row_are_one_look(
    model: Model, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's scheduler asks for each waiting request in each round; new weights take longer to come."""
    now = [100.0]
    monkeypatch.setattr(loaded.time, "monotonic", lambda: now[0])
    weights = watch(model)
    monkeypatch.setattr(weights, "_device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: SimpleNamespace(query=lambda: True))
    at_once, reads.count = reads.count, 0
    for batch in range(3):
        now[0] += STILL_S
        assert not any(weights.change() for _ in range(100))
        assert reads.count == (batch + 1) * at_once
    train(model)
    now[0] += STILL_S
    assert weights.change() == WRITTEN


def test_closing_gives_the_method_back(model: Model) -> None:
    weights = watch(model)
    weights.close()
    assert "load_weights" not in vars(model)
    model.load_weights([])
    assert not weights.change()


def test_closing_leaves_what_another_has_put_over_it(model: Model) -> None:
    weights = watch(model)
    model.load_weights = functools.partial(model.load_weights)  # type: ignore[method-assign]
    weights.close()
    assert model.load_weights([]) == set()
