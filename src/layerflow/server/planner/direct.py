"""A step of a worker that moves bytes past the arena: the core schedules it as any other, the objects are the worker's.

The worker has leased what it loads and allocated what it saves before it opens the step, and left out the rest.
"""

from __future__ import annotations

from layerflow.errors import ProtocolError
from layerflow.flow.events import Part, StepOpened
from layerflow.server.clients.sessions import ClientSession
from layerflow.server.planner.book import Opening, StepBook
from layerflow.server.planner.check import CheckedStep, Wanted
from layerflow.spec import ModelSpec
from layerflow.wire.messages import OpenStep, Plan, PlanPart
from layerflow.wire.packing import pack_u32, pack_u64


def plan_direct(session: ClientSession, message: OpenStep, checked: CheckedStep) -> Opening:
    """Number the blocks; nothing is pinned and nothing reserved, and offsets are 0.

    :raises ProtocolError: more blocks are wanted of an object than it holds.
    """
    spec = session.spec
    assert spec is not None
    loads, saves = checked.loads, [wanted for wanted, _ in checked.saves]
    book = StepBook(("step", session.number, message.step), direct=True)
    _remember_loads(book, loads)
    book.save_parts = list(range(len(saves)))
    book.save_keys = [wanted.keys for wanted in saves]
    event = StepOpened(
        session.number,
        message.step,
        message.deadline,
        message.save_deadline,
        tuple(_part(wanted) for wanted in loads),
        tuple(_part(wanted) for wanted in saves),
    )
    load_plan = [PlanPart(_zeros(wanted), pack_u32(_held(spec, wanted))) for wanted in loads]
    plan = Plan(message.step, load_plan, [PlanPart(_zeros(wanted), b"") for wanted in saves])
    return Opening([event], plan, book, [], full=0, missing=0)


def _part(wanted: Wanted) -> Part:
    return Part(wanted.request, wanted.group, int(wanted.counts.sum()))


def _zeros(wanted: Wanted) -> bytes:
    return pack_u64([0] * len(wanted.keys))


def _held(spec: ModelSpec, wanted: Wanted) -> list[int]:
    """Blocks per layer of each object.

    :raises ProtocolError: more are wanted of one than it holds.
    """
    rules = spec.groups[wanted.group].rules
    held = [len(rules.keep(spec.chunk_tokens))] * len(wanted.keys)
    if wanted.tail:
        held[-1] = len(rules.keep(wanted.tail))
    for position, (has, count) in enumerate(zip(held, wanted.counts.tolist(), strict=True)):
        if count > has:
            raise ProtocolError(
                f"request {wanted.request!r}, group {wanted.group}, object {position}: {count} blocks are loaded of "
                f"the {has} that it holds"
            )
    return held


def _remember_loads(book: StepBook, loads: list[Wanted]) -> None:
    at: dict[int, int] = {}
    for wanted in loads:
        objects = book.load_objects.setdefault(wanted.group, [])
        for key, count in zip(wanted.keys, wanted.counts.tolist(), strict=True):
            objects.append((at.setdefault(wanted.group, 0), key))
            at[wanted.group] += count
