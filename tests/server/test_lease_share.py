"""How the share of the arena that peers' leases may pin is divided among keys."""

from __future__ import annotations

from layerflow.server.share import LeaseShare


def taken(share: LeaseShare, principal: str, *leases: int, nbytes: int = 10) -> None:
    """Leases of one principal, by number."""
    for lease in leases:
        share.pin(principal, nbytes)
        share.lend(principal, lease, nbytes)


def test_who_is_alone_may_lease_all_of_it() -> None:
    share = LeaseShare(lambda: 100)
    assert share.left("a", 0.0) == 100
    taken(share, "a", *range(9))
    assert share.left("a", 0.0) == 10
    assert share.want("a", [20], 9.0) == 0, "its own part is the whole"
    assert share.left("b", 0.0) == 10, "there is room"


def test_who_is_past_its_part_waits_while_another_wants_some_and_no_longer() -> None:
    share = LeaseShare(lambda: 100)
    taken(share, "a", *range(7))
    taken(share, "b", 7, 8)
    assert share.left("a", 0.0) == 10
    assert share.want("b", [10, 10, 30, 10], 5.0) == 30, "50 are its part, of which it has 20"
    assert share.left("a", 0.0) == -20 and share.left("b", 0.0) == 10
    assert share.left("a", 5.0) == 10
    assert share.want("b", [10], 9.0) == 10 and share.left("a", 6.0) == -20
    share.content("b")
    assert share.left("a", 6.0) == 10
    assert share.want("b", [10], 9.0) == 10 and share.want("b", [40], 9.0) == 0
    assert share.left("a", 6.0) == 10, "no more is within its part"


def test_whoever_has_most_ends_leases_the_unread_ones_first_and_keeps_its_part() -> None:
    share = LeaseShare(lambda: 100)
    taken(share, "a", 1, 2, 3, 4, 5, 6)
    taken(share, "b", 7, 8, 9, 10)
    share.renew("a", 1)
    assert share.want("c", [10] * 9, 5.0) == 30, "of three parts"
    ended = []
    while (lease := share.next_to_end("c", 30)) is not None:
        principal = "a" if lease < 7 else "b"
        share.withdraw(principal, lease)
        ended.append(lease)
    assert ended == [2, 3, 4]
    assert (share.leaving, share.room_left) == (30, 0), "until nothing of them is read"
    for _ in ended:
        share.free("a", 10, withdrawn=True)
    assert (share.leaving, share.room_left) == (0, 30)
    taken(share, "c", 11, 12, 13)
    assert share.want("c", [10], 5.0) == 0
    share.renew("a", 5)
    share.renew("a", 6)
    taken(share, "a", nbytes=0)
    assert share.want("d", [10] * 9, 5.0) == 20
    first = share.next_to_end("d", 20)
    assert first == 7, "b has most now"


def test_what_is_read_ends_last_and_what_pins_nothing_makes_no_room() -> None:
    share = LeaseShare(lambda: 40)
    share.lend("a", 1, 0)
    taken(share, "a", 2, 3, 4, 5)
    share.renew("a", 2)
    share.renew("a", 1)
    ended = []
    while (lease := share.next_to_end("b", 20)) is not None:
        share.withdraw("a", lease)
        ended.append(lease)
    assert ended == [3, 4]
    for lease in (5, 2):
        share.withdraw("a", lease)
    for _ in range(4):
        share.free("a", 10, withdrawn=True)
    assert share.nbytes == share.leaving == 0 and share.left("a", 0.0) == 40


def test_a_lookup_that_came_to_nothing_leaves_nothing() -> None:
    share = LeaseShare(lambda: 40)
    share.pin("a", 10)
    assert share.next_to_end("b", 35) is None, "it is not lent yet"
    share.free("a", 10, withdrawn=False)
    share.free("b", 0, withdrawn=False)
    assert share.left("b", 0.0) == 40
