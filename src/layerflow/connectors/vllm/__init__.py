"""layerflow for vLLM: name this module in ``--kv-transfer-config``.

.. code-block:: json

    {"kv_connector": "LayerflowConnector", "kv_connector_module_path": "layerflow.connectors.vllm",
     "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"endpoint": "ipc:///run/user/1000/layerflow-1000/control"}}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerflow.connectors.common.interface import check_interface, missing_symbol

if TYPE_CHECKING:
    from layerflow.connectors.vllm.connector import LayerflowConnector

__all__ = ["LayerflowConnector"]


def __getattr__(name: str) -> object:
    """The connector needs vLLM; its settings and arithmetic do not.

    :raises Unsupported: this vLLM's interface is another one than the connector implements.
    """
    if name != "LayerflowConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm  # noqa: PLC0415

    try:
        from layerflow.connectors.vllm.connector import LayerflowConnector  # noqa: PLC0415
    except ImportError as error:
        if not (error.name or "").startswith("vllm"):
            raise
        raise missing_symbol(error, f"vLLM {vllm.__version__}") from error
    check_interface(LayerflowConnector, f"vLLM {vllm.__version__}")
    return LayerflowConnector
