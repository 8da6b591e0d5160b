"""The edges between what is still to come and the loads that wait for it, wherever it comes from."""

from __future__ import annotations

from collections.abc import Sequence

from layerflow.flow.commands import Arrived, Command, Vacate
from layerflow.flow.graph.cursor import Span, common, joined
from layerflow.flow.graph.edge import Edge, Upstream
from layerflow.flow.graph.step import Transfer, TransferJob
from layerflow.flow.progress.completion import fail_blocks
from layerflow.flow.state import State


def add_edge(state: State, upstream: Upstream, transfer: Transfer, spans: dict[int, list[Span]]) -> None:
    """Loads of a new step wait for these objects.

    :param spans: by object, its blocks of the transfer.
    """
    transfer.add_cursor(joined(span for mine in spans.values() for span in mine), upstream.number)
    edge = Edge(upstream, transfer, spans, sorted(spans))
    upstream.edges.append(edge)
    transfer.job.edges.append(edge)
    progress(state, edge)


def progress(state: State, edge: Edge) -> None:
    """Layers that have come may be granted."""
    transfer, upstream = edge.transfer, edge.upstream
    if not edge.waiting:
        return
    layers = upstream.reached(edge.waiting)
    if layers <= transfer.arrivals[upstream.number]:
        return
    transfer.arrivals[upstream.number] = layers
    if layers == upstream.span:
        edge.waiting = []
    cursor = transfer.arriving(upstream.number)
    if cursor is None:
        return
    cursor.permit(layers)
    if cursor.fresh:
        transfer.merge(cursor)
    state.enqueue(transfer.job)


def publish(upstream: Upstream, objects: Sequence[int], out: list[Command]) -> None:
    """These are whole in the arena: they stay pinned for whoever still loads them."""
    if not objects:
        return
    upstream.whole.update(objects)
    readers: list[tuple[int, int, tuple[int, ...]]] = []
    for edge in upstream.edges:
        mine = tuple(index for index in objects if index in edge.spans)
        if mine:
            step = edge.transfer.job.step
            readers.append((step.session.number, step.number, mine))
    out.append(Arrived(upstream.number, tuple(objects), tuple(readers)))


def fail_waiting(state: State, upstream: Upstream, objects: Sequence[int], reason: str, out: list[Command]) -> None:
    """These will not come: the blocks that need them fail, for whoever waits."""
    gone = set(objects)
    for edge in list(upstream.edges):
        lost = [index for index in edge.waiting if index in gone]
        if lost:
            edge.waiting = [index for index in edge.waiting if index not in gone]
            spans = joined(span for index in lost for span in edge.spans[index])
            fail_blocks(state, edge.transfer, spans, reason, out)
            progress(state, edge)


def vacate(upstream: Upstream, out: list[Command]) -> None:
    """Give the room of lost objects back that no step's loads hold."""
    if not upstream.occupied:
        return
    held = {index for edge in upstream.edges for index in edge.spans}
    free = sorted(upstream.occupied - held)
    if free:
        upstream.occupied.difference_update(free)
        out.append(Vacate(upstream.number, tuple(free)))


def move_edges(state: State, upstream: Upstream, objects: Sequence[int], into: Upstream) -> None:
    """Loads that wait for these `objects` wait for those of another upstream from now on: for number 0, 1, 2, ...

    Of none of them a layer has come.
    """
    gone = set(objects)
    for edge in list(upstream.edges):
        spans = {new: edge.spans.pop(old) for new, old in enumerate(objects) if old in edge.spans}
        if not spans:
            continue
        waiting = set(edge.waiting)
        edge.waiting = [index for index in edge.waiting if index not in gone]
        transfer, job = edge.transfer, edge.transfer.job
        moved = Edge(into, transfer, spans, [new for new, old in enumerate(objects) if old in waiting])
        into.edges.append(moved)
        job.edges.append(moved)
        cursor = transfer.arriving(upstream.number)
        blocks = joined(span for mine in spans.values() for span in mine)
        coming = common(cursor.spans, blocks) if cursor is not None else []
        transfer.arrivals.setdefault(into.number, 0)
        if cursor is not None and coming:
            transfer.add_cursor(coming, into.number)
            cursor.drop(coming)
            if cursor.exhausted:
                transfer.remove(cursor)
        if not edge.spans:
            upstream.edges.remove(edge)
            job.edges.remove(edge)
        progress(state, moved)


def release_edges(job: TransferJob) -> list[Upstream]:
    """The job's loads are done: they hold no room any more. What they held."""
    edges, job.edges = job.edges, []
    for edge in edges:
        edge.upstream.edges.remove(edge)
    return list(dict.fromkeys(edge.upstream for edge in edges))
