"""What the packages promise in ``__all__`` is there."""

import importlib
import pkgutil

import pytest

import layerflow
import layerflow_cli

PACKAGES = sorted(
    module.name
    for root in (layerflow, layerflow_cli)
    for module in pkgutil.walk_packages(root.__path__, f"{root.__name__}.", onerror=lambda _: None)
    if module.ispkg and not {"vllm", "sglang"} & set(module.name.split("."))  # engines that are not installed here
)


@pytest.mark.parametrize("name", ["layerflow", *PACKAGES])
def test_each_promised_name_exists(name: str) -> None:
    package = importlib.import_module(name)
    promised = getattr(package, "__all__", [])
    assert [word for word in promised if not hasattr(package, word)] == []
    assert len(promised) == len(set(promised))
