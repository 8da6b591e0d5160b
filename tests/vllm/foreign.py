"""Connectors as NIXL's is towards a MultiConnector: with a handshake that refuses every other, and with hand-offs."""

from __future__ import annotations

from typing import Any

from scenario import Answer
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
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


PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a router asks of a prefill engine."""
HANDED_OVER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "foreign",
    "remote_host": "localhost",
    "remote_port": 5600,
}


class PrefillConnector(HandshakeConnector, SupportsHMA):
    """Says of each prompt that was prefilled for another engine where it lies."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        asked = request.kv_transfer_params or {}
        return False, dict(HANDED_OVER) if asked.get("do_remote_decode") else None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])


def assert_handed_over(answer: Answer) -> None:
    """Its response says what the connector above said, and nothing of another connector's."""
    assert answer.transfer is not None
    assert answer.transfer.items() >= HANDED_OVER.items()
    assert "layerflow" not in answer.transfer
