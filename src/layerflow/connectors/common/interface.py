"""Whether an installed engine's interface is the one that a connector implements and calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from layerflow.errors import Unsupported


def check_interface(connector: type[Any], engine: str) -> None:
    """Refuse an engine whose base class wants or calls something else than the connector implements.

    An engine calls a hook as its base class declares it. A method that only that class has is one that it implements
    itself.

    :param connector: the connector's class.
    :param engine: its name and version, for errors.
    :raises Unsupported: a method of the base class has no implementation, or has arguments that the connector's does
        not take; it is named.
    """
    if missing := sorted(getattr(connector, "__abstractmethods__", ())):
        raise Unsupported(f"{engine}: its connectors must have {', '.join(missing)}, which this one does not")
    for name in [name for name in vars(connector) if not name.startswith("_")]:
        bases = [vars(base)[name] for base in connector.__mro__[1:] if name in vars(base)]
        own, declared = _function(vars(connector)[name]), _function(bases[0] if bases else None)
        if callable(own) and callable(declared) and (refused := _refused(own, declared)):
            raise Unsupported(f"{engine}: it calls {name}() with {refused}, which this connector does not take")


def check_call(called: Callable[..., Any], engine: str, *given: Any, **named: Any) -> None:
    """Refuse an engine that cannot be called so.

    :param engine: its name and version, for errors.
    :raises Unsupported: it takes other arguments; it is named.
    """
    try:
        inspect.signature(called).bind(*given, **named)
    except TypeError as error:
        name = getattr(called, "__qualname__", repr(called))
        raise Unsupported(f"{engine}: {name}() cannot be called as this connector does: {error}") from error


def missing_symbol(error: ImportError, engine: str) -> Unsupported:
    """What to say where an engine has not what the connector imports."""
    return Unsupported(f"{engine}: the connector needs what it does not have: {error.msg}")


def _refused(own: Callable[..., Any], declared: Callable[..., Any]) -> str:
    """Which arguments of the declared method its implementation does not take, or wants beyond them; "" = none."""
    has, wants = inspect.signature(own).parameters, inspect.signature(declared).parameters
    kinds = inspect.Parameter
    extra = any(each.kind is kinds.VAR_KEYWORD for each in has.values())
    by_position = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    positional = [each.name for each in has.values() if each.kind in by_position]
    for number, each in enumerate(wants.values()):
        if each.kind is kinds.VAR_POSITIONAL and not any(own.kind is each.kind for own in has.values()):
            return f"any number of arguments (*{each.name})"
        if each.kind is kinds.VAR_KEYWORD and not extra:
            return f"any named arguments (**{each.name})"
        if each.kind in by_position and (len(positional) <= number or positional[number] != each.name):
            return f"{each.name!r} as argument {number}"
        if each.kind is kinds.KEYWORD_ONLY and each.name not in has and not extra:
            return f"{each.name!r}"
    for each in has.values():
        wanted = each.default is kinds.empty and each.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        if wanted and each.name not in wants:
            return f"no {each.name!r}"
    return ""


def _function(attribute: Any) -> Any:
    """What is called: behind a property, a class method or a static method."""
    return getattr(attribute, "__func__", None) or getattr(attribute, "fget", None) or attribute
