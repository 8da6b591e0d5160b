"""A life is a table: what may follow what, and what cannot be."""

import enum

import pytest

from layerflow.errors import InvalidTransition
from layerflow.lives import Life


class Door(enum.Enum):
    SHUT = 0
    OPEN = 1
    BRICKED_UP = 2


LIFE = Life(
    "a door",
    {
        Door.SHUT: ("nobody passes", (Door.OPEN, Door.BRICKED_UP)),
        Door.OPEN: ("all pass", (Door.SHUT,)),
        Door.BRICKED_UP: ("nobody ever will", ()),
    },
)


def test_a_legal_transition_passes_and_an_illegal_one_names_the_record():
    LIFE.check(Door.SHUT, Door.OPEN, "7")
    with pytest.raises(InvalidTransition, match="a door 7 is bricked_up and cannot become OPEN"):
        LIFE.check(Door.BRICKED_UP, Door.OPEN, "7")


def test_a_state_leads_to_what_follows_it_and_to_itself():
    assert LIFE.leads(Door.OPEN, Door.BRICKED_UP)
    assert LIFE.leads(Door.OPEN, Door.OPEN)
    assert not LIFE.leads(Door.BRICKED_UP, Door.SHUT)


def test_a_table_is_whole_and_every_state_reached():
    with pytest.raises(ValueError, match="a door"):
        Life("a door", {Door.SHUT: ("", (Door.OPEN,)), Door.OPEN: ("", ())})
    with pytest.raises(ValueError, match="a door"):
        Life("a door", {Door.SHUT: ("", (Door.OPEN,)), Door.OPEN: ("", ()), Door.BRICKED_UP: ("", ())})


def test_it_is_drawn_with_what_may_follow():
    assert LIFE.drawn().splitlines()[2:] == [
        "| **shut** | nobody passes | open, bricked up |",
        "| **open** | all pass | shut |",
        "| **bricked up** | nobody ever will | nothing: it is over |",
    ]
