"""layerflow for SGLang: a prefix pool that is loaded layer by layer.

.. code-block:: shell

    python -m sglang.launch_server --page-size 64 --enable-unified-cache-external-linker \\
      --unified-cache-external-linker-backend dynamic --unified-cache-external-linker-config \\
      '{"linker": "LayerflowLinker", "linker_module_path": "layerflow.connectors.sglang",
        "linker_extra_config": {"endpoint": "ipc:///run/user/1000/layerflow-1000/control"}}'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerflow.connectors.common.interface import check_interface, missing_symbol

if TYPE_CHECKING:
    from layerflow.connectors.sglang.linker import LayerflowLinker

__all__ = ["LayerflowLinker"]


def __getattr__(name: str) -> object:
    """The linker needs SGLang; its options, layout and transfers do not.

    :raises Unsupported: this SGLang's interface is another one than the linker implements.
    """
    if name != "LayerflowLinker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import sglang  # noqa: PLC0415

    engine = f"SGLang {sglang.__version__}"
    try:
        from layerflow.connectors.sglang.linker import LayerflowLinker  # noqa: PLC0415
    except ImportError as error:
        if not (error.name or "").startswith("sglang"):
            raise
        raise missing_symbol(error, engine) from error
    check_interface(LayerflowLinker, engine)
    return LayerflowLinker
