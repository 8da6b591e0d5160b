"""What an engine may get wrong: a clear error, nothing changed, and the agent goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from e2e.known import KnownWorker, eventually, small_spec

from layerflow.agent import Agent, Hit, StepRequest
from layerflow.agent.step.step import NoStep
from layerflow.errors import ConfigError, LayerflowError, SessionError, SpecError
from layerflow.server import EmbeddedServer

Embed = Callable[..., EmbeddedServer]


@pytest.fixture
def worker(embed: Embed) -> KnownWorker:
    server = embed()
    return KnownWorker(server.endpoint, context=server.context, blocks=64)


TABLES = {
    "past the end": lambda good: np.where(np.arange(len(good)) == 3, 64, good),
    "far past the end": lambda good: np.where(np.arange(len(good)) == 3, 2**40, good),
    "too short": lambda good: good[:-1],
    "empty": lambda good: good[:0],
    "floats": lambda good: good.astype(float),
    "a matrix": lambda good: good.reshape(1, -1),
}


@pytest.mark.parametrize("what", TABLES)
@pytest.mark.parametrize("loading", [True, False])
def test_a_wrong_block_table(worker: KnownWorker, what: str, loading: bool) -> None:
    chain = worker.prompt(60)
    if loading:
        worker.serve(chain)
    run = worker.admit(chain)
    before = {key: [array.copy() for array in arrays] for key, arrays in worker._arrays.items()}
    good = run.request()
    bad = replace(good, request="bad", blocks=(TABLES[what](run.tables[0]),))
    with pytest.raises(SpecError, match="request 'bad'"):
        worker.agent.open_step([good, bad])
    assert not worker.agent.busy(run.name)
    assert worker.agent.statistics().open_steps == 0
    for key, arrays in worker._arrays.items():
        assert all((array == old).all() for array, old in zip(arrays, before[key], strict=True))
    worker.retire(run)
    assert worker.serve(chain).hit.tokens == (59 if loading else 0)
    worker.agent.close()


def test_negative_blocks(worker: KnownWorker) -> None:
    """A load into no block is an error; a save from none leaves the chunk out."""
    chain = worker.prompt(60)
    run = worker.admit(chain)
    holed = run.tables[0].copy()
    holed[1] = -1
    with worker.agent.open_step([replace(run.request(), blocks=(holed,))]) as step:
        worker.forward(step, [run])
    assert worker.agent.wait_idle(run.name, 10)
    assert worker.agent.lookup("look", chain).tokens == 0, "the first chunk was stored without a block of it"
    worker.serve(chain)
    loading = worker.admit(chain)
    with pytest.raises(SpecError, match="allocate first"):
        worker.agent.open_step([replace(loading.request(), blocks=(holed,))])
    worker.agent.close()


@pytest.mark.parametrize(
    "change",
    [
        {"blocks": ()},
        {"blocks": ([[1, 2], [3]],)},
        {"load": (0, 61)},
        {"load": (0, 10_000)},
        {"load": (-4, 16)},
        {"load": (0, 64), "hit": Hit(64)},
        {"load": (0, 0), "save": (-16, 60)},
    ],
)
def test_a_wrong_request(worker: KnownWorker, change: dict[str, object]) -> None:
    chain = worker.prompt(60)
    worker.serve(chain)
    run = worker.admit(chain)
    with pytest.raises(SpecError, match=run.name):
        worker.agent.open_step([replace(run.request(), **change)])  # type: ignore[arg-type]
    worker.retire(run)
    assert worker.serve(chain).hit.tokens == 59
    worker.agent.close()


def test_nothing_to_move_is_no_step(worker: KnownWorker) -> None:
    chain = worker.prompt(60)
    assert isinstance(worker.agent.open_step([]), NoStep)
    assert isinstance(worker.agent.open_step([StepRequest("idle", chain, ())]), NoStep)
    worker.agent.close()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(64, 4, 31, dtype=torch.uint8),
        torch.zeros(64, 5, 32, dtype=torch.uint8),
        torch.zeros(64, 4, 32, dtype=torch.int8),
        torch.zeros(63, 4, 32, dtype=torch.uint8),
        torch.zeros(64 * 4 * 32, dtype=torch.uint8),
        torch.zeros(64, 4, 1, dtype=torch.uint8).expand(64, 4, 32),
        torch.zeros(0, 4, 32, dtype=torch.uint8),
    ],
    ids=["row", "block size", "dtype", "blocks", "flat", "overlapping", "empty"],
)
def test_wrong_tensors(embed: Embed, tensor: torch.Tensor) -> None:
    server, spec = embed(), small_spec(2)
    good = {layer: {name: torch.zeros(64, 4, 32, dtype=torch.uint8) for name in "kv"} for layer in range(2)}
    bad = {0: good[0], 1: {"k": good[1]["k"], "v": tensor}}
    with pytest.raises(LayerflowError, match="layer 1, plane 'v'"):
        Agent(server.endpoint, spec, bad, context=server.context)
    with pytest.raises(SpecError, match="layer"):
        Agent(server.endpoint, spec, {0: good[0]}, context=server.context)
    with pytest.raises(SpecError, match="layer 1"):
        Agent(server.endpoint, spec, {0: good[0], 1: {"k": good[1]["k"]}}, context=server.context)
    assert len(list(server.call(lambda: list(server.server.sessions)))) == 0  # type: ignore[call-overload]


def test_one_request_that_lost_its_objects_hurts_nobody_else(worker: KnownWorker) -> None:
    """The pool is emptied between lookup and step for one request; the other was looked up after."""
    gone, kept = worker.prompt(60), worker.prompt(60)
    worker.serve(gone)
    lost = worker.admit(gone, planned=False)
    from layerflow.agent import Control

    control = Control(worker.agent._control._client.endpoint, "purger", context=worker.agent._control._client.context)
    assert control.purge() > 0
    control.close()
    worker.serve(kept)
    fine = worker.admit(kept)
    with worker.agent.open_step([lost.request(), fine.request()]) as step:
        assert worker.forward(step, [lost, fine]) == 0
    assert lost.failed == {0: set(range(15))}
    assert not fine.failed
    assert worker.agent.wait_idle(lost.name, 10)
    assert eventually(lambda: worker.agent.lookup("gone", gone).tokens == 0), "what was computed on a failed load"
    worker.agent.close()


def test_a_hit_of_another_prompt_is_refused(worker) -> None:
    agent, chunk = worker.agent, worker.agent.spec.chunk_tokens
    tokens = list(range(chunk + 10))
    other = agent.chain([*tokens[:chunk], *[9] * 30])
    hit = Hit(chunk + 9, 1, 10, agent.chain(tokens).partial(1, 10))
    table = np.arange(len(other) // 8 + 8)
    with pytest.raises(SpecError, match="not one of this chain"):
        agent.open_step([StepRequest("x", other, (table,), load=(0, chunk + 9), hit=hit)])
    with pytest.raises(SpecError, match="not one of this chain"):
        short = agent.chain(tokens)
        agent.open_step([StepRequest("x", short, (table,), load=(0, chunk + 5), hit=Hit(2 * chunk))])
    assert agent.attached


@pytest.mark.parametrize("name", ["\ud800", 5, b"bytes", None])
def test_a_request_id_that_is_no_text_is_refused_and_the_session_lives(worker, name) -> None:
    agent = worker.agent
    chain = agent.chain(list(range(agent.spec.chunk_tokens)))
    with pytest.raises(SpecError, match="request id"):
        agent.open_step([StepRequest(name, chain, (np.arange(64),), save=(0, len(chain)))])
    assert agent.statistics().open_steps == 0
    assert agent.attached


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), -1.0])
def test_a_timeout_that_is_none_is_refused(worker, timeout) -> None:
    with pytest.raises(SpecError, match="timeout_s"):
        worker.agent.open_step([], timeout_s=timeout)


def test_a_worker_of_another_machine_is_refused(worker) -> None:
    with pytest.raises(ConfigError, match="ipc://"):
        Agent("tcp://127.0.0.1:9", worker.agent.spec, {})


def test_a_forked_copy_refuses_and_the_parent_goes_on(worker) -> None:
    agent = worker.agent
    chain = agent.chain(list(range(10)))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            agent.lookup("x", chain)
        except SessionError:
            agent.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert agent.attached
    assert agent.lookup("y", chain).tokens == 0
