"""Sees whether the weights that a worker has loaded are written to again.

Trainers replace weights in place: through the model's ``load_weights``, or by writing to its parameters, where nothing
of vLLM's or PyTorch's tells. The first is seen at the call. For the second a sample of the weights' bytes is compared,
whenever a step moves something and reading costs the engine nothing: on a CPU always, on a device once it stood still.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import structlog
import torch
from torch import nn

PLACES, RUN = 1024, 32
"""How many places of all weights are compared, and how many elements at each.

A step of reinforcement learning changes some 1 % of the elements of bfloat16 weights, everywhere in the model: of the
32 Ki elements that are compared none is changed with probability ``0.99 ** 32768``, and with one change in a thousand
``6e-15``. Neighbours lie in one cache line, so that a comparison takes a fraction of a millisecond.
"""

LEAST_PLACES = 2
"""Of each parameter, its beginning and its end among them, however many there are."""

STILL_S = 0.01
"""How long a device's worker has had no step, nor a comparison, when its weights are compared. New weights of a real
model take longer: an answer from before they came is never used once they are there."""

LOADED = "load_weights was called"
WRITTEN = "other bytes were found in the parameters"
EXCHANGED = "parameters were exchanged for others"
UNREADABLE = "the parameters' memory was released, and what it holds since could not be compared"

log = structlog.get_logger("layerflow.vllm")


class _Sample(NamedTuple):
    """Some bytes of a parameter.

    :param owner: where its module keeps it, under `name`.
    :param address: of its data, when the sample was made.
    :param view: uint8, shape ``(places, bytes at each)``, sharing its memory.
    """

    owner: dict[str, nn.Parameter | None]
    name: str
    parameter: nn.Parameter
    address: int
    view: torch.Tensor

    @property
    def is_in_place(self) -> bool:
        """Does the module still compute with the memory that the view looks at?"""
        return self.owner.get(self.name) is self.parameter and self.parameter.data_ptr() == self.address


class LoadedWeights:
    """The weights of the models of one worker. Used on vLLM's thread.

    :param modules: all modules of its models.
    :param balanced: vLLM moves experts between ranks while it serves; these are not compared.

    :ivar are_away: their memory is not mapped: between :meth:`let_go` and :meth:`take_up` nothing of it is read.
    """

    def __init__(self, modules: Sequence[nn.Module], *, balanced: bool = False) -> None:
        self._modules = [module for module in modules if not (balanced and hasattr(module, "get_expert_weights"))]
        self._given_back: list[Callable[[], None]] = []
        self._groups: list[list[_Sample]] = []
        self._bytes: list[torch.Tensor] = []
        self._device: torch.device | None = None  #: of those weights that are not on the CPU
        self._change = ""
        self.are_away = False
        self._rested_at = time.monotonic()
        self._unread = False
        for module in modules:
            if callable(getattr(module, "load_weights", None)):
                self._given_back.append(self._watch(module))
        self.accept()

    def accept(self) -> None:
        """From here on a change is one from the weights as they are at this moment; they must not be away."""
        self._change, self._unread = "", False
        try:
            self._groups = _grouped(self._modules)
            self._bytes = [_read(group) for group in self._groups]
            devices = (group[0].parameter.device for group in self._groups)
            self._device = next((device for device in devices if device.type != "cpu"), None)
        except RuntimeError as error:  # of the device, or of a tensor without plain memory
            self._compare_no_more(error)

    def change(self) -> str:
        """How they were seen to change since :meth:`accept`; "" = not at all.

        A device that computes is not waited for: there the comparison is made up for once it stands still. Nor is it
        asked more often than every :data:`STILL_S`. While the weights are away the answer is the one from before.
        """
        try:
            if not self._change and self._may_read():
                self._unread = False
                self._rested_at = time.monotonic()
                self._change = self._difference()
        except RuntimeError as error:
            self._compare_no_more(error)
        return self._change

    def rest(self) -> None:
        """A step is over: from here on the worker stands still until it asks for a :meth:`change`."""
        self._rested_at = time.monotonic()

    def let_go(self) -> None:
        """Their memory is about to be unmapped. Called again it does nothing."""
        self.are_away = True

    def take_up(self) -> None:
        """It is mapped again, at the same addresses, and may hold anything: it is compared at once. The device has to
        stand still. Called again it does nothing.
        """
        if not self.are_away:
            return
        self.are_away = False
        try:
            self._change = self._change or (self._difference() if self._groups else UNREADABLE)
        except RuntimeError as error:
            self._compare_no_more(error)
            self._change = UNREADABLE

    def close(self) -> None:
        """Give the models' methods back, and let go of the models."""
        for give_back in self._given_back:
            give_back()
        self._given_back, self._modules, self._groups, self._bytes = [], [], [], []

    def _compare_no_more(self, error: RuntimeError) -> None:
        self._groups, self._bytes, self._device = [], [], None
        log.warning("weights_not_compared", error=str(error)[:500])

    def _may_read(self) -> bool:
        if self.are_away:
            return False
        if self._device is None:
            return True
        self._unread |= time.monotonic() - self._rested_at >= STILL_S
        return self._unread and bool(torch.accelerator.current_stream(self._device).query())

    def _difference(self) -> str:
        for group, before in zip(self._groups, self._bytes, strict=True):
            if not all(sample.is_in_place for sample in group):
                return EXCHANGED
            if not torch.equal(_read(group), before):
                return WRITTEN
        return ""

    def _watch(self, module: nn.Module) -> Callable[[], None]:
        own = vars(module).get("load_weights")
        load: Callable[..., Any] = module.load_weights  # type: ignore[assignment]

        @functools.wraps(load)
        def seen(*args: Any, **kwargs: Any) -> Any:
            self._change = LOADED
            try:
                return load(*args, **kwargs)
            finally:
                self._change = LOADED  # a step between its beginning and its end knows of a part only

        def give_back() -> None:
            if vars(module).get("load_weights") is seen:  # else another has wrapped it since, and calls this one
                del module.load_weights
                if own is not None:
                    module.load_weights = own

        module.load_weights = seen  # type: ignore[assignment]
        return give_back


def _grouped(modules: Iterable[nn.Module]) -> list[list[_Sample]]:
    """Samples of all parameters, those that can be read in one call together."""
    found = list(_parameters(modules))
    places = max(LEAST_PLACES, PLACES // max(1, len(found)))
    groups: dict[tuple[torch.device, int], list[_Sample]] = {}
    for owner, name, parameter in found:
        view = _view(parameter, places)
        sample = _Sample(owner, name, parameter, parameter.data_ptr(), view)
        groups.setdefault((view.device, view.shape[1]), []).append(sample)
    return list(groups.values())


def _parameters(modules: Iterable[nn.Module]) -> Iterator[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]]:
    """Each once, also where layers are tied.

    Those that share memory are left out: what offloads weights lets several take turns in one buffer, whose bytes
    change with every layer.
    """
    found = {
        id(parameter): (module._parameters, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.numel() and parameter.device.type != "meta"
    }
    sharing = Counter(parameter.data_ptr() for *_, parameter in found.values())
    yield from (each for each in found.values() if sharing[each[2].data_ptr()] == 1)


def _view(parameter: nn.Parameter, places: int) -> torch.Tensor:
    """Return so many places of the parameter's memory, whatever its type and the order of its axes."""
    size = parameter.element_size()
    span = 1 + sum((length - 1) * stride for length, stride in zip(parameter.shape, parameter.stride(), strict=True))
    run = min(RUN, span)
    count = min(places, span // run)
    step = (span - run) // (count - 1) if count > 1 else 1
    flat = torch.empty(0, dtype=torch.uint8, device=parameter.device)
    offset = parameter.storage_offset() * size
    return flat.set_(parameter.untyped_storage(), offset, (count, run * size), (step * size, 1))


def _read(group: Sequence[_Sample]) -> torch.Tensor:
    return torch.cat([sample.view for sample in group]).cpu()
