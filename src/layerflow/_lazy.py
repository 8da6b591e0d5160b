"""Names of a package that are imported when first asked for: what is heavy costs only those who use it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence


def attribute(package: str, homes: Mapping[str, Sequence[str]], name: str) -> object:
    """What `name` is, for the package's ``__getattr__``.

    :param homes: by module, the names that are taken from it.
    :raises AttributeError: no module has it.
    """
    for home, names in homes.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
