"""New settings of a running server: in force as a whole, or not at all."""

from __future__ import annotations

from contextlib import closing

import pytest
from e2e.known import small_spec

from server.support import Embed, worker_on


@pytest.mark.parametrize("attached", [True, False])
def test_what_the_wire_cannot_carry_is_in_force_nowhere(embed: Embed, attached: bool) -> None:
    """Also with nobody there to be told: the next worker to come would be refused."""
    server = embed()
    own = server.server.settings
    limits = server.call(server.server.metrics_text)
    # Past the bounds of the settings' fields, which `model_copy` does not look at.
    transfer = own.transfer.model_copy(update={"max_inflight_bytes": 1 << 70, "prefetch_layers": 7})
    wanted = own.model_copy(update={"transfer": transfer})
    first = worker_on(server, spec=small_spec()) if attached else None
    with pytest.raises(OverflowError):
        server.call(server.server.apply, wanted)
    assert server.server.settings is own
    told = [line for line in limits.splitlines() if line.startswith(b"layerflow_limit")]
    assert told and set(told) <= set(server.call(server.server.metrics_text).splitlines())
    with closing(worker_on(server, spec=small_spec()).agent) as second:
        assert second.terms.prefetch_layers == own.transfer.prefetch_layers
    if first is not None:
        assert first.agent.terms.prefetch_layers == own.transfer.prefetch_layers
        first.agent.close()
