"""Computes npu operators on the host: npu memory of the emulated CANN is host memory, so an operator is run on CPU
tensors that share it.

torch_npu itself still makes the tensors, views them, and owns streams and events. What neither torch nor
:mod:`kernels` can compute raises: nothing is skipped, and nothing is computed as something else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

STAND_INS: dict[str, Callable[..., Any]] = {}
"""What computes an operator of torch_npu or vLLM-Ascend, by its name; takes and returns CPU tensors."""

IN_PYTHON: dict[str, Callable[..., Any]] = {}
"""Operators that were registered as Python functions since this module was imported, by their name."""

# torch_npu makes, views and describes tensors itself. Operators that copy only where they must are not views.
_OWN = {
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_.source_Storage_storage_offset",
    "aten::is_pinned",
    "aten::_pin_memory",
    "aten::detach",
    "aten::alias",
}
_COPY_IF_NEEDED = {
    f"aten::{name}"
    for name in (
        *("to", "_to_copy", "cpu", "float", "type_as", "lift_fresh", "resolve_conj"),
        *("reshape", "reshape_as", "contiguous", "flatten", "ravel"),
    )
}


def stands_in(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as what computes the operator ``name``."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        STAND_INS[name] = function
        return function

    return register


def on_host(value: Any) -> Any:
    """A CPU tensor over the memory of an npu tensor; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.device.type != "npu":
        return value
    storage = value.untyped_storage()
    if not storage.nbytes():
        return torch.empty(value.size(), dtype=value.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    shared = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=value.dtype).set_(shared, value.storage_offset(), value.size(), value.stride())


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply to everything in tuples, lists and dicts. torch's own walk takes as long as the operators do."""
    if isinstance(value, tuple | list):
        return type(value)([_each(function, item) for item in value])
    if isinstance(value, dict):
        return {key: _each(function, item) for key, item in value.items()}
    return function(value)


def _on_npu(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    on_host(made).copy_(value)
    return made


def lent(function: Callable[..., Any], args: Any, kwargs: Any, device: torch.device) -> Any:
    """Call a function of CPU tensors with those over the memory of npu tensors; what it makes is on the npu.

    What it writes in place and returns is the tensor that was given.
    """
    given: list[tuple[Any, Any]] = []

    def lend(value: Any) -> Any:
        given.append((on_host(value), value))
        return given[-1][0]

    def returned(value: Any) -> Any:
        own = next((own for here, own in given if here is value), None)
        return _on_npu(value, device) if own is None else own

    return _each(returned, function(*_each(lend, args), **_each(lend, kwargs)))


def _is_npu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def _record_python() -> None:
    implement = torch.library.Library.impl

    def recorded(library: Any, op_name: Any, function: Any, dispatch_key: str = "", **more: Any) -> Any:
        name = op_name if isinstance(op_name, str) else op_name._schema.name
        if dispatch_key != "Meta":
            IN_PYTHON[name if "::" in name else f"{library.ns}::{name}"] = function
        return implement(library, op_name, function, dispatch_key, **more)

    torch.library.Library.impl = recorded  # type: ignore[method-assign]


_record_python()


class HostArithmetic(TorchDispatchMode):
    """While it is entered, operators that this thread applies to npu tensors are computed on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given: list[torch.Tensor] = []
        _each(lambda value: given.append(value) if _is_npu(value) else None, (args, kwargs))
        wanted = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if not given and (wanted is None or wanted.type != "npu"):
            return func(*args, **kwargs)
        name, plain = func.name(), func._schema.name
        if plain in STAND_INS:
            return lent(STAND_INS[plain], args, kwargs, given[0].device)
        if name in _OWN or (func.is_view and plain not in _COPY_IF_NEEDED):
            return func(*args, **kwargs)
        if plain in IN_PYTHON:
            with self:
                return IN_PYTHON[plain](*args, **kwargs)
        if not plain.startswith(("aten::", "prims::")):
            raise NotImplementedError(f"nothing computes this operator on the host: {func._schema}")
        return self._compute(func, args, kwargs, given, wanted)

    def _compute(self, func: Any, args: Any, kwargs: Any, given: list[Any], wanted: torch.device | None) -> Any:
        """An operator of torch's own, by torch's own kernel for CPUs."""
        here = torch.device("cpu")
        positional = _each(lambda value: here if isinstance(value, torch.device) else on_host(value), args)
        named = _each(on_host, kwargs) | ({"device": here} if wanted else {})
        named |= {key: None for key in ("generator", "pin_memory") if key in named}
        made = func(*positional, **named)
        written = [
            args[index] if index < len(args) else kwargs.get(argument.name)
            for index, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if written:
            return written[0] if isinstance(made, torch.Tensor) else type(made)(written) if made else made
        device = wanted or given[0].device
        if device.type != "npu":
            return made
        sources = {value.untyped_storage().data_ptr(): value for value in given if value.untyped_storage().nbytes()}

        def returned(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            source = sources.get(value.untyped_storage().data_ptr())
            if source is None or source.dtype != value.dtype:
                return _on_npu(value, device)
            return torch.as_strided(source, value.size(), value.stride(), value.storage_offset())

        return _each(returned, made)
