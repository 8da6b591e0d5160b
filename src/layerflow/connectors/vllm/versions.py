"""Which vLLM this is, whether the connector knows it, and whether its interface is the one that is implemented here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import structlog

from layerflow.errors import Unsupported

OLDEST, NEWEST = (0, 27), (0, 33)
"""The versions that the tests run are 0.27.1, 0.32.0 and 0.33.0; what lies between has the same interface."""

ALLOW_UNKNOWN = "allow_unknown_vllm"
"""The key of ``kv_connector_extra_config`` that lets a newer vLLM in."""

log = structlog.get_logger("layerflow.vllm")


def check_version(version: str, *, allow_unknown: bool = False) -> None:
    """Refuse a vLLM that the connector was not tested with.

    :param allow_unknown: let a newer one in, with a warning in the log.
    :raises Unsupported: it is older, or newer and not allowed.
    """
    found = release(version)
    if found > NEWEST and allow_unknown:
        log.warning("vllm_unknown", version=version, known=_RANGE, effect="the connector was not tested with it")
    elif not OLDEST <= found <= NEWEST:
        newer = f", or set {ALLOW_UNKNOWN} = true in kv_connector_extra_config to try it" if found > NEWEST else ""
        raise Unsupported(
            f"vLLM {version}: this layerflow connector knows vLLM {_RANGE}; install one of these, or a layerflow "
            f"that knows yours{newer}"
        )


def release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version.

    :raises Unsupported: it has none.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise Unsupported(f"vLLM calls itself {version!r}; the connector needs a release from {_RANGE}")
    return int(found[1]), int(found[2])


def check_interface(connector: type[Any], version: str) -> None:
    """Refuse a vLLM whose base class wants or calls something else than the connector implements.

    vLLM calls a hook as its base class declares it. A method that only vLLM's base class has is one that it implements
    itself.

    :param connector: the connector's class.
    :raises Unsupported: a method of the base class has no implementation, or has arguments that the connector's does
        not take; it is named.
    """
    if missing := sorted(getattr(connector, "__abstractmethods__", ())):
        raise Unsupported(f"vLLM {version}: its connectors must have {', '.join(missing)}, which this one does not")
    for name in [name for name in vars(connector) if not name.startswith("_")]:
        bases = [vars(base)[name] for base in connector.__mro__[1:] if name in vars(base)]
        own, declared = _function(vars(connector)[name]), _function(bases[0] if bases else None)
        if callable(own) and callable(declared) and (refused := _refused(own, declared)):
            raise Unsupported(f"vLLM {version}: it calls {name}() with {refused}, which this connector does not take")


def check_call(called: Callable[..., Any], version: str, *given: Any, **named: Any) -> None:
    """Refuse a vLLM that cannot be called so.

    :raises Unsupported: it takes other arguments; it is named.
    """
    try:
        inspect.signature(called).bind(*given, **named)
    except TypeError as error:
        name = getattr(called, "__qualname__", repr(called))
        raise Unsupported(f"vLLM {version}: {name}() cannot be called as this connector does: {error}") from error


def missing_symbol(error: ImportError, version: str) -> Unsupported:
    """What to say where vLLM has not what the connector imports."""
    return Unsupported(f"vLLM {version}: the connector needs what it does not have: {error.msg}")


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


_RANGE = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
