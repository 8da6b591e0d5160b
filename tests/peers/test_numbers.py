"""Two servers that have run for long: each number that they and their engines count by crosses a field's size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from e2e.known import PATIENCE_S, eventually, small_spec, step_of

from layerflow.keys import Chain
from layerflow.system import numbers
from layerflow_cli.bench import harness
from layerflow_cli.bench.harness import ServerProcess
from peers.conftest import Pair
from peers.test_following import Ends

SPEC = small_spec(2)
BEGUN = "from layerflow.system import numbers; numbers.first = {}; from layerflow_cli.main import main; main()"


@pytest.fixture(params=[1 << 16, 1 << 32, 1 << 63], ids=["2**16", "2**32", "2**63"])
def begun(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Servers and engines begin to count just before."""
    first = request.param - 2

    def popen(_: ServerProcess, command: Sequence[str], environment: Mapping[str, str]) -> Any:
        python, _, _, *arguments = command  # -m layerflow_cli
        counting = [python, "-c", BEGUN.format(first), *arguments]
        return harness.subprocess.Popen(counting, stdout=harness.subprocess.PIPE, text=True, env=environment)

    monkeypatch.setattr(numbers, "first", first)
    monkeypatch.setattr(ServerProcess, "_popen", popen)
    return first


@pytest.mark.parametrize("many", [4, pytest.param(1000, marks=pytest.mark.campaign)])
def test_follows_between_two_servers(pair: Callable[..., Pair], begun: int, many: int) -> None:
    two = pair()
    with two.workers(SPEC) as (p, d):
        ends = Ends(two, p, d)
        assert next(numbers.ascending()) == begun
        for number in range(many):
            follow(ends, f"h{number}", p.prompt(20 + number % 50))
        assert eventually(two.settled), (two.lends, two.reads)
        ends.close()


def follow(ends: Ends, name: str, chain: Chain) -> None:
    """D loads while P stores."""
    assert ends.p_control.open_handoff(name, chain, len(chain)).state == "open"
    drun, dstep = ends.loading(name, ends.d.agent.chain(chain.tokens))
    prun = ends.p.serve(chain, look=False)
    ends.p_control.end_handoff(name, tokens=len(chain))
    assert [ends.loaded(drun, dstep, layer) for layer in range(2)] == [0, 0] and not drun.failed
    step_of(dstep).close()
    for worker, run in ((ends.p, prun), (ends.d, drun)):
        assert worker.agent.wait_idle(run.name, PATIENCE_S)
    ends.d.retire(drun)  # the other has retired its own
    ends.p_control.release_handoff(name)
    ends.d_lookups.drop_lease(f"D-{name}")
