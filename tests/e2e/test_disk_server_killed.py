"""kill -9 of a server with a disk tier, under load: what is on disk afterwards is whole, and nothing torn is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from e2e import disk_reader
from e2e.host_faults import ARENA, MOST, assert_rest, open_files
from e2e.known import KnownWorker, eventually
from e2e.rounds import record, rounds
from e2e.traffic import BLOCK, LAYERS, ROW, known_spec, load, prompt
from layerflow_cli.bench.harness import ServerProcess

MOST_BYTES = 512 << 20
"""What is on disk grows with every round; past this an operator empties the folder while the server is down."""


@rounds(4, 50)
def test_a_killed_server(serve: Callable[..., ServerProcess], tmp_path: Path, rounds: int) -> None:
    folder, copy = tmp_path / "tier", tmp_path / "copy"
    server = serve(pool__size=ARENA, pool__disk__path=folder)
    torn_files = verified = emptied = hits = 0
    died_s: list[float] = []
    reader = KnownWorker(server.endpoint, known_spec(), engine="reader", lookup_timeout_s=5.0)
    try:
        with load(server.endpoint) as it:
            assert eventually(it.up, 30, 0.02), it.tier()
            first = open_files(server)
            for number in range(MOST * rounds):
                if number >= rounds and torn_files:
                    break
                it.flows()
                tier = it.tier()
                it.random_moment()
                if number % 2:  # in the middle of a write, surely
                    assert eventually(lambda: torn_in(folder), 30, 0.0005), "nothing is written"
                server.kill()
                died_s.append(wait_dead(tier["host"]["pid"]))
                torn = torn_in(folder)
                torn_files += len(torn)
                if sum(path.stat().st_size for path in whole_in(folder)) > MOST_BYTES:
                    emptied += 1
                    for path in whole_in(folder):
                        path.unlink()
                else:
                    assert len(whole_in(folder)) >= tier["indexed_objects"], "what was written is gone"
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(folder / "objects-1", copy / "objects-1", copy_function=os.link)
                whole = len(whole_in(folder))
                server.restart()
                for engine in (it.busy, it.steady):
                    assert engine.worker.agent.wait_attached(30)
                assert eventually(it.up, 30, 0.02), it.tier()
                assert it.tier()["details"]["objects"] == whole
                assert not torn & torn_in(folder), "a torn file is still there"
                read = read_all(copy)
                assert read == {"objects": whole, "bad": []}
                assert not torn_in(copy)
                verified += whole
                assert reader.agent.wait_attached(30)
                for seed in list(it.busy.stored)[-8:]:
                    hits += reader.serve(reader.agent.chain(prompt(seed))).hit.tokens > 0
            it.flows()
        assert_rest(server, first)
    finally:
        reader.agent.close()
        shutil.rmtree(tmp_path)
    busy, steady = it.busy.counts, it.steady.counts
    record(
        "disk_server_killed",
        kills=len(died_s),
        objects_read=verified,
        torn_files=torn_files,
        emptied=emptied,
        worst_host_outlives_s=round(max(died_s), 3),
        busy=vars(busy),
        steady=vars(steady),
        read_back=hits,
    )
    assert torn_files, "no kill hit a write: the campaign has shown nothing"
    assert hits, "nothing was read back"


def wait_dead(pid: int) -> float:
    """How long a host outlives its server, in seconds."""
    began = time.monotonic()

    def dead() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"  # nobody's child now
        except FileNotFoundError:
            return True

    assert eventually(dead, every_s=0.001), "the host outlives its server"
    return time.monotonic() - began


def torn_in(folder: Path) -> set[tuple[str, int]]:
    """Files that are not whole: their names, and when they were last written."""
    found: set[tuple[str, int]] = set()
    for path in folder.glob("objects-1/new/*"):
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_mtime_ns))
    return found


def whole_in(folder: Path) -> list[Path]:
    """Published files."""
    return list(folder.glob("objects-1/[0-9a-f][0-9a-f]/*"))


def read_all(folder: Path) -> dict[str, Any]:
    """What a process of its own reads there."""
    command = [sys.executable, disk_reader.__file__, str(folder), str(LAYERS), str(2 * ROW * BLOCK)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
