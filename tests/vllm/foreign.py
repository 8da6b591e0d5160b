"""A connector as NIXL's is towards a MultiConnector: it has a handshake, and refuses every other."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)


class Payload(KVConnectorHandshakeMetadata):
    """Has none of the fields of another's."""


class HandshakeConnector(KVConnectorBase_V1):
    """Moves nothing."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)

    def get_handshake_metadata(self) -> Payload:
        return Payload()

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        for payload in metadata.values():
            if not isinstance(payload, Payload):
                raise ValueError(f"expects a Payload, not {type(payload).__name__}")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
