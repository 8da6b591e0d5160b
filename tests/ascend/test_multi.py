"""In vLLM-Ascend's own MultiConnector: it ends where two connectors answer, and hides blocks that another may load."""

from __future__ import annotations

import pytest
from ascend import BLOCK
from comparison import prompt, settled
from conftest import Rigs, of_each
from foreign import PREFILL, assert_handed_over
from scenario import Terms


@pytest.mark.parametrize("model", of_each("llama", "gemma3"))
def test_beside_a_connector_that_hands_prompts_over(model: str, rigs: Rigs) -> None:
    """As MooncakeConnector on a prefill engine."""
    rig = rigs[model]
    first = prompt(900, 300)
    fork = first[: 2 * BLOCK] + prompt(901, 40)
    for asked, found in ((first, 0), (first, len(first) - 1), (fork, 2 * BLOCK)):
        right = rig.right(asked, max_tokens=1)
        rig.among.wipe()
        answer = rig.among.one(asked, max_tokens=1, terms=Terms(transfer=PREFILL))
        assert answer.cached == found
        assert_handed_over(answer)
        assert not right.wrong([answer])
        rig.among.assert_no_block_lost()
        settled(rig.server.endpoint)
