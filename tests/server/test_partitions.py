"""Workers of one tensor and pipeline size hit, and load byte for byte, what workers of others have stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from e2e.known import PATIENCE_S, eventually
from e2e.partitions import BLOCK, BLOCKS, CHUNK, TOKENS, Rank, leave, load_all, save_all
from e2e.partitions import everyone as workers

from layerflow.agent import Agent
from layerflow.agent.values import Hit, StepRequest
from layerflow.pool.covering import MOST_PARTITIONS
from layerflow.server.tier.partitions import note_key
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard
from server.support import Embed, observe


def everyone(server: Any, tp: int, stages: tuple[int, ...], **more: Any) -> list[Rank]:
    return workers(server.endpoint, tp, stages, context=server.context, **more)


@pytest.mark.parametrize(
    ("writing", "reading"),
    [
        ((2, (6,)), (1, (6,))),
        ((1, (6,)), (2, (6,))),
        ((3, (6,)), (2, (6,))),
        ((2, (6,)), (6, (6,))),
        ((1, (2, 4)), (1, (6,))),
        ((2, (6,)), (3, (1, 3, 2))),
        ((8, (3, 3)), (1, (4, 2))),
    ],
)
def test_other_sizes_hit_every_byte(
    embed: Embed, writing: tuple[int, tuple[int, ...]], reading: tuple[int, tuple[int, ...]]
) -> None:
    server = embed()
    readers = everyone(server, *reading)  # they have looked before anything is stored
    chain = readers[0].agent.chain(np.arange(TOKENS))
    assert readers[0].agent.lookup("early", chain).tokens == 0
    writers = everyone(server, *writing)
    for writer in writers:
        writer.run("w", writer.agent.chain(np.arange(TOKENS)), Hit(0), save=True)
    leave(writers)
    hit = readers[0].agent.lookup("r", chain)
    assert hit.tokens == TOKENS - 1
    for reader in readers:
        reader.run("r", chain, hit, save=False)
        reader.check(hit.tokens)
    leave(readers)


def test_what_is_incomplete_is_no_hit(embed: Embed) -> None:
    server = embed()
    [reader] = everyone(server, 1, (6,))
    chain = reader.agent.chain(np.arange(TOKENS))
    writers = everyone(server, 2, (6,))
    writers[0].run("w", chain, Hit(0), save=True)
    assert reader.agent.lookup("half", chain).tokens == 0
    writers[1].run("w", chain, Hit(0), save=True)
    assert reader.agent.lookup("whole", chain).tokens == TOKENS - 1
    leave([reader, *writers])


@pytest.mark.parametrize(
    ("writing", "reading"), [((2, (6,)), (1, (6,))), ((1, (6,)), (3, (6,))), ((8, (6,)), (2, (6,)))]
)
def test_a_prompt_that_parts_in_the_middle_of_a_chunk_hits_the_blocks_of_other_sizes(
    embed: Embed, writing: tuple[int, tuple[int, ...]], reading: tuple[int, tuple[int, ...]]
) -> None:
    server = embed()
    writers, shared = everyone(server, *writing), 2 * CHUNK + 2 * BLOCK
    for writer in writers:
        writer.run("w", writer.agent.chain(np.arange(TOKENS)), Hit(0), save=True)
    readers = everyone(server, *reading)
    prompt = np.concatenate([np.arange(shared), np.arange(1000, 1000 + TOKENS - shared)])
    hit = readers[0].agent.lookup("r", readers[0].agent.chain(prompt))
    assert hit.tokens == shared
    for reader in readers:
        reader.run("r", reader.agent.chain(prompt), hit, save=False)
        reader.check(shared)
    leave([*writers, *readers])


def test_a_group_that_no_other_size_reads_is_told_with_its_reason(embed: Embed) -> None:
    server = embed()
    control = observe(server)
    [cut] = everyone(server, 1, (6,))
    group = GroupSpec("state", BLOCK, (0,), (Plane("s", "uint8", (64,)),))
    spec = ModelSpec("bound", "c", (group,), chunk_tokens=CHUNK)
    planes = {0: {"s": torch.zeros(BLOCKS, 1, 64, dtype=torch.uint8)}}
    bound = Agent(server.endpoint, spec, planes, "bound", context=server.context)
    sessions = control.status()["sessions"]
    told = {each["model"]: each["bound_to_size"] for each in sessions if each["memory"]}
    assert told == {"m": [], "bound": ["group 0 (state): recurrent state is divided inside its tensors"]}
    bound.close()
    control.close()
    leave([cut])


def test_a_rank_of_one_model_is_no_layer_of_another(embed: Embed) -> None:
    """Of a model whose layers are bound to their stage, the first stage's object covers nothing of the second one's."""
    server = embed()
    others = []
    for stages in ((6,), (1, 5)):
        for stage in range(len(stages)):
            shard = Shard(0, 1, stage, len(stages), (1,), (stages,))
            others.append(_latent(server, "cut", shard, stages[stage]))
    first, second = (_latent(server, "bound", Shard(pp_rank=stage, pp_size=2), 3) for stage in range(2))
    chain, table = first.chain(np.arange(TOKENS)), np.arange(-(-TOKENS // BLOCK), dtype=np.int64)

    def store(worker: Agent) -> None:
        with worker.open_step([StepRequest("w", chain, (table,), (0, 0), Hit(0), (0, TOKENS), tail=True)]) as step:
            for layer in range(3):
                step.layer_done(layer)
        assert worker.wait_idle("w", 20)

    store(first)
    assert second.lookup("r", chain).tokens == 0
    store(second)
    assert second.lookup("r", chain).tokens == TOKENS - 1
    for worker in (*others, first, second):
        worker.close()


def _latent(server: Any, content: str, shard: Shard, layers: int) -> Agent:
    """A worker of a model whose planes have no heads."""
    group = GroupSpec("full", BLOCK, tuple(range(layers)), (Plane("latent", "uint8", (64,)),))
    planes = {layer: {"latent": torch.zeros(BLOCKS, BLOCK, 64, dtype=torch.uint8)} for layer in range(layers)}
    spec = ModelSpec("m", content, (group,), shard, chunk_tokens=CHUNK)
    return Agent(server.endpoint, spec, planes, content, context=server.context, lookup_timeout_s=PATIENCE_S)


SIZES = [((2, (6,)), (1, (6,))), ((3, (6,)), (2, (6,))), ((1, (2, 4)), (1, (6,))), ((2, (6,)), (3, (1, 3, 2)))]
PATIENT = {"pool__size": "4MiB", "pool__lookup_timeout_ms": 10_000}


def on_disk(embed: Embed, folder: Path) -> Any:
    server = embed(pool__disk={"path": str(folder)}, **PATIENT)
    assert eventually(lambda: server.server.tier.up)
    return server


def written(server: Any) -> bool:
    return not server.call(server.server.tier.statistics).writing_jobs


def notes(server: Any, spec: ModelSpec) -> int:
    """Partitions that are noted in the tier."""
    keys = [note_key(spec.fingerprint, number) for number in range(16)]
    return sum(server.call(lambda: server.server.tier.holds(keys)))


@pytest.mark.parametrize(("writing", "reading"), SIZES)
def test_what_other_sizes_stored_before_a_restart_is_hit(
    embed: Embed, tmp_path: Path, writing: tuple[int, tuple[int, ...]], reading: tuple[int, tuple[int, ...]]
) -> None:
    first = on_disk(embed, tmp_path)
    writers = everyone(first, *writing)
    save_all(writers)
    assert eventually(lambda: written(first) and notes(first, writers[0].spec) == 1)
    leave(writers)
    first.close()
    second = on_disk(embed, tmp_path)
    readers = everyone(second, *reading)
    assert eventually(lambda: second.call(lambda: second.server.pool.covering(readers[0].spec)))
    for attempt in ("from the disk", "from the arena"):
        assert load_all(readers, attempt) == TOKENS - 1
        for reader in readers:
            for planes in reader.memory.values():
                for plane in planes.values():
                    plane.zero_()
    fetched = second.call(second.server.tier.statistics).fetched_objects
    assert fetched, "it came from the disk"
    prompt = np.concatenate([np.arange(2 * CHUNK + 2 * BLOCK), np.arange(1000, 1030)])
    hit = readers[0].agent.lookup("parts in a chunk", readers[0].agent.chain(prompt))
    assert hit.tokens == 2 * CHUNK + 2 * BLOCK
    leave(readers)


def test_a_piece_that_is_missing_is_no_hit(embed: Embed, tmp_path: Path) -> None:
    server = on_disk(embed, tmp_path)
    writers, [reader] = everyone(server, 2, (6,)), everyone(server, 1, (6,))
    save_all(writers[:1])
    assert eventually(lambda: written(server))
    server.call(server.server.pool.clear)
    assert load_all([reader], "half") == 0
    save_all(writers[1:], "v")
    assert eventually(lambda: written(server))
    server.call(server.server.pool.clear)
    assert load_all([reader], "whole") == TOKENS - 1
    leave([reader, *writers])


def test_each_partition_is_noted_once_and_no_more_than_four_are_looked_for(embed: Embed, tmp_path: Path) -> None:
    server = on_disk(embed, tmp_path)
    for number, sizes in enumerate(((1, (6,)), (2, (6,)), (1, (6,)), (3, (6,)), (6, (6,)), (1, (3, 3)))):
        ranks = everyone(server, *sizes)
        expected = (1, 2, 2, 3, 4, 5)[number]
        assert eventually(lambda ranks=ranks, expected=expected: notes(server, ranks[0].spec) == expected)  # type: ignore[misc]
        leave(ranks)
    spec = ranks[0].spec
    server.close()
    again = on_disk(embed, tmp_path)
    ranks = everyone(again, 1, (6,))
    registry, pool = again.server.tier.partitions, again.server.pool
    assert eventually(lambda: len(registry._models[spec.fingerprint].recorded) == 5)
    assert notes(again, spec) == 5
    # Of one head and layer of the model there is an object in each partition.
    looked_for = {pool._partitions[spec.fingerprint].attached[0], *pool._partitions[spec.fingerprint].remote}
    assert len(looked_for) == 5
    key = ranks[0].agent.chain(np.arange(CHUNK)).digests[0] + bytes(8)
    assert 0 < len(pool.overlapping_keys(key)) <= (MOST_PARTITIONS - 1) * 6
    leave(ranks)


def test_a_note_that_cannot_be_read_is_left_alone(embed: Embed, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("msgspec.msgpack.encode", lambda value: b"\xc1 is never valid")
    server = on_disk(embed, tmp_path)
    ranks = everyone(server, 2, (6,))
    assert eventually(lambda: notes(server, ranks[0].spec) == 1)
    monkeypatch.undo()
    leave(ranks)
    server.close()
    again = on_disk(embed, tmp_path)
    ranks = everyone(again, 1, (6,))
    assert eventually(lambda: notes(again, ranks[0].spec) == 2), "its own goes to the next number"
    assert again.call(lambda: again.server.pool.covering(ranks[0].spec)) is None
    leave(ranks)
