"""The page of states is drawn from the tables that the code keeps to."""

import pytest
from pages import page, sections

from layerflow.agent.client import INQUIRY_LIFE
from layerflow.flow.graph import JOB_LIFE, OBJECT_LIFE, PART_LIFE
from layerflow.server.handoffs.handoff import HANDOFF_LIFE
from layerflow.server.peers.lending import PEER_LEASE_LIFE
from layerflow.wire.client_connection import CONNECTION_LIFE

LIVES = {
    "One direction of a step": JOB_LIFE,
    "A part of a step": PART_LIFE,
    "An object on its way": OBJECT_LIFE,
    "A hand-off": HANDOFF_LIFE,
    "A lease of a peer": PEER_LEASE_LIFE,
    "A lookup": INQUIRY_LIFE,
    "A connection": CONNECTION_LIFE,
}


@pytest.mark.parametrize("title", LIVES)
def test_the_page_shows_the_table_as_it_is(title):
    drawn = LIVES[title].drawn()
    assert drawn in sections(page("states.md"))[title], f"docs/states.md, {title}: paste this\n{drawn}"


def test_the_page_has_no_table_that_nobody_keeps_to():
    tables = {title for title, text in sections(page("states.md")).items() if "|---" in text}
    assert tables == LIVES.keys()
