"""What ``layerflow status`` shows of peers. JSON-ready; sizes in bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

from layerflow.server.peers.reading.attachment import Attachment
from layerflow.server.peers.reading.source import PeerSource


def source_status(source: PeerSource) -> dict[str, Any]:
    """What is read, and from whom."""
    return {
        "leases": len(source.offers),
        "offers": source.offers.objects,
        "fetching_jobs": len(source.fetches),
        "fetches_without_room": source.fetches.refused,
        **source.counts(),
        "failures": dict(source.failures),
        "importer": dataclasses.asdict(source.host.state),
        "importer_figures": dict(source.host.statistics),
        "peers": [_peer(source, peer) for peer in source.peers.values()],
    }


def _peer(source: PeerSource, peer: Attachment) -> dict[str, Any]:
    cost = source.costs.of(peer.target.name)
    return {
        "peer": peer.target.name,
        "address": peer.target.address,
        "link": peer.target.link,
        "state": peer.state.value,
        "reason": peer.reason or peer.unreadable,
        "attempts": peer.attempts,
        "differs": dict(source.comparison.differences.get(peer.target.name, {})),
        "leases": sum(1 for _ in source.offers.leases(peer)),
        "gbps": round(cost.bandwidth / 1e9, 3) if cost is not None else None,
        "latency_ms": round(cost.latency * 1e3, 3) if cost is not None else None,
    }
