"""Hit lengths and bytes around block and chunk borders, for full and sliding groups, with and without tails."""

from __future__ import annotations

import itertools

import pytest
from e2e.known import KnownWorker, Run, small_spec

from layerflow.server import EmbeddedServer
from server.support import Embed, worker_on

BLOCK, CHUNK, LAYERS = 4, 16, 4
PATIENCE_S = 30.0
PATIENT = {"transfer__step_timeout_ms": 60_000, "transfer__save_timeout_ms": 60_000}
"""Deadlines that a busy machine keeps: what is moved is tested here, not how soon."""
LENGTHS = sorted(
    {border + off for border in (BLOCK, CHUNK, 2 * CHUNK, 3 * CHUNK) for off in (-1, 0, 1, 2, BLOCK)} | {1, 2, 37, 50}
)
WINDOWS = [0, 1, 5, CHUNK, CHUNK + 1, 2 * CHUNK + 3]


def make(server: EmbeddedServer, window: int) -> KnownWorker:
    # What a lookup finds is tested here, not how soon: on a busy machine it may take longer than an engine would wait.
    spec = small_spec(LAYERS, BLOCK, CHUNK, row=8, window=window)
    return worker_on(server, spec=spec, blocks=128, lookup_timeout_s=PATIENCE_S)


@pytest.mark.parametrize("window", WINDOWS)
def test_every_length_round_trips(embed: Embed, window: int) -> None:
    """Saved with its tail, a prompt of any length is found whole, less the one token that is always computed."""
    with make(embed(**PATIENT), window) as worker:
        for tokens in LENGTHS:
            chain = worker.prompt(tokens)
            assert worker.serve(chain).hit.tokens == 0, tokens
            assert worker.serve(chain).hit.tokens == tokens - 1, tokens


@pytest.mark.parametrize("window", WINDOWS)
def test_every_continuation_finds_the_tail(embed: Embed, window: int) -> None:
    """A prompt that goes on where a stored one ended loads all of it, tail included."""
    with make(embed(**PATIENT), window) as worker:
        for tokens, more in itertools.product(LENGTHS, (1, 3, CHUNK, CHUNK + 5)):
            first = worker.prompt(tokens)
            worker.serve(first)
            longer = worker.prompt(tokens + more, like=first, shared=tokens)
            assert worker.serve(longer).hit.tokens == tokens, (tokens, more)


@pytest.mark.parametrize("window", [0, 5, CHUNK + 1])
def test_a_prompt_that_leaves_the_stored_one_early(embed: Embed, window: int) -> None:
    """It hits to the last shared block, and a sliding group must have kept what lies before that."""
    with make(embed(**PATIENT), window) as worker:
        stored = worker.prompt(3 * CHUNK)
        worker.serve(stored)
        for shared in (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7):
            other = worker.prompt(3 * CHUNK + 2, like=stored, shared=shared)
            whole, hit = shared // CHUNK * CHUNK, shared // BLOCK * BLOCK
            if 0 < window < CHUNK and hit - whole < CHUNK - BLOCK:  # of a chunk the window's last blocks are kept
                hit = whole
            assert worker.serve(other).hit.tokens == hit, shared


def test_discarded_tails_are_not_stored(embed: Embed) -> None:
    with make(embed(**PATIENT, transfer__discard_partial_chunks=True), 5) as worker:
        for tokens in LENGTHS:
            chain = worker.prompt(tokens)
            worker.serve(chain)
            whole = tokens // CHUNK * CHUNK
            assert worker.serve(chain).hit.tokens == min(whole, tokens - 1), tokens


@pytest.mark.parametrize("window", [5, CHUNK + 1])
def test_chunks_whose_blocks_were_recycled_are_not_stored(embed: Embed, window: int) -> None:
    """Two forward passes; in the second, the sliding group no longer has the blocks that left its window."""
    with make(embed(**PATIENT), window) as worker:
        chain = worker.prompt(4 * CHUNK + 3)
        run = worker.admit(chain)
        _prefill(worker, run, 0, CHUNK + BLOCK)
        # Of the sliding group's table, what the window has passed is gone before its chunk is complete.
        recycled = run.tables[1].copy()
        passed = max(0, CHUNK + BLOCK - window + 1) // BLOCK
        recycled[:passed] = -1
        rest = Run(run.name, chain, run.hit, (run.tables[0], recycled))
        _prefill(worker, rest, CHUNK + BLOCK, len(chain))
        hit = worker.admit(chain).hit.tokens
        assert hit == len(chain) - 1, "the tail's window is all there"
        # A load, too, names no block below the window.
        again = worker.admit(chain)
        needed = worker.spec.groups[1].rules.first_token(hit)
        table = again.tables[1].copy()
        table[: needed // BLOCK] = -1
        run = Run(again.name, chain, again.hit, (again.tables[0], table))
        with worker.agent.open_step([run.request()]) as step:
            assert worker.forward(step, [run]) == 0
        assert not run.failed
        # Without the last chunks, only hits whose window was kept count.
        early = worker.prompt(2 * CHUNK + 1, like=chain, shared=2 * CHUNK)
        assert worker.serve(early).hit.tokens in (0, CHUNK, 2 * CHUNK)


def _prefill(worker: KnownWorker, run: Run, start: int, stop: int) -> None:
    request = run.request()
    part = type(request)(request.request, request.chain, run.tables, save=(start, stop), tail=stop == len(run.chain))
    with worker.agent.open_step([part]) as step:
        for layer in range(worker.spec.num_layers):
            step.wait_layer(layer)
            worker.compute(run, layer, start, stop)
            step.layer_done(layer)
    assert worker.agent.wait_idle(run.name, 10)
