"""The invariants of loads that take what another step stores."""

from __future__ import annotations

from layerflow.errors import InvalidTransition
from layerflow.flow.graph.follow import FollowTransfer
from layerflow.flow.state import State


def validate_follows(state: State) -> None:
    """Raise for the first invariant of follows that does not hold.

    :raises InvalidTransition: naming it.
    """
    known = set(state.follows.values())
    for number, follow in state.follows.items():
        _require(follow.number == number, follow, "is not where the core keeps it")
        _follow(follow)
    for session in state.sessions.values():
        for step in session.steps.values():
            for transfer in step.saves.transfers.values() if step.saves is not None else ():
                for follow in transfer.follows:
                    _require(follow in known and follow.save is transfer, follow, "follows another save")
            for edge in step.loads.edges if step.loads is not None else ():
                mine = edge in edge.upstream.edges and state.upstream(edge.upstream.number) is edge.upstream
                over = edge.upstream.closed and not edge.upstream.occupied
                if not (mine or over):
                    raise InvalidTransition(f"step {step.number} waits for {edge.upstream.number}, which is forgotten")


def _require(holds: bool, follow: FollowTransfer, what: str) -> None:
    if not holds:
        raise InvalidTransition(f"follow {follow.number}: {what}")


def _follow(follow: FollowTransfer) -> None:
    lost, whole, moved = follow.lost, follow.whole, follow.moved
    _require(not (lost & whole or lost & moved or whole & moved), follow, "has an object in two states")
    _require(follow.closed == (not follow.unfinished()), follow, "is closed exactly when all is over")
    _require(not follow.closed or bool(follow.occupied), follow, "is over and was not forgotten")
    _require(follow.occupied <= lost, follow, "keeps room that it has not lost")
    _require(not whole or follow.committed, follow, "published what its save has not")
    _require(not (moved and follow.parts), follow, "gave what a step saves to another")
    save = follow.save
    _require(follow.closed == (save is None) or not follow.parts, follow, "follows a save exactly until it is over")
    if save is not None:
        _require(follow in save.follows, follow, "is unknown to the save that it follows")
        dead = {index for index in follow.unfinished() if follow.parts[index] in save.job.dropped}
        _require(not dead, follow, f"waits for {dead}, which is cancelled")
    stored = follow.reached(())
    _require(follow.closed or follow.told <= stored, follow, f"told its reader of {follow.told} layers of {stored}")
    _require(follow.closed or not follow.lent or follow.told == stored, follow, f"kept {stored} layers from its reader")
    held = {index for edge in follow.edges for index in edge.spans}
    _require(follow.lent or follow.occupied <= held, follow, "keeps room that nothing touches")
    for edge in follow.edges:
        job = edge.transfer.job
        _require(edge in job.edges and not job.done, follow, f"is held by loads of step {job.step.number} that ended")
        _require(not lost & set(edge.waiting), follow, "is waited for where it is lost")
        _require(not edge.waiting or not moved & set(edge.waiting), follow, "is waited for where it has moved")
