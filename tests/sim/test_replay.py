"""Recordings replayed: what a closed form says under another configuration, and what is not to be believed."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
from sim.recordings import BLOCK_BYTES, CHUNK, LAYERS, KnownMachine

from layerflow.config.settings import Settings
from layerflow.errors import ConfigError
from layerflow.flow.commands import LoadFailed
from layerflow.flow.cost import LinkCost
from layerflow.flow.events import FetchOpened, Item
from layerflow.recording.format import COMMANDS, EVENTS, Dropped, LookedUp, Purged, StepSeen
from layerflow.recording.reader import Recording
from layerflow.sim import recorded
from layerflow.sim.curve import hit_curve
from layerflow.sim.recorded import REPLAY_MEMORY, prompts_of, read_run
from layerflow.sim.replay import FEW, Replay
from layerflow.sim.rerun import OtherLink, ReplayFigures
from layerflow.tuning.recorded import RecordedJudge

PROMPT = range(1, 9)


def again(machine: KnownMachine, times: int = 6) -> list[tuple[float, float]]:
    """A prompt, and then the same one with a chunk more each time."""
    return [machine.serve([*PROMPT, *range(100, 100 + turn)]) for turn in range(times)]


def believed(replay: Replay) -> bool:
    """Is its own configuration predicted, few as these prompts are?"""
    few = [why for why in replay.trust.reasons if "too few to compare" in why]
    return len(few) == len(replay.trust.reasons) == 2 and all(row.alike for row in replay.trust.rows)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("bandwidth", [1e9, 20e6], ids=["compute-bound", "link-bound"])
def test_its_own_configuration_is_predicted(tmp_path, bandwidth, ranks):
    machine = KnownMachine(bandwidth=bandwidth, ranks=ranks)
    told = again(machine)
    replay = Replay.read(machine.write(tmp_path / "x.lfr"))
    assert believed(replay), replay.trust
    own = replay.under(replay.settings, validate=True)
    assert own == replay.own, "equal arguments, equal figures"
    assert [sample.value for sample in own.prefill_s] == pytest.approx([took for _, took in told], rel=0.01, abs=1e-4)
    assert [sample.value for sample in own.exposed_s] == pytest.approx(
        [each for each, _ in told[1:]], rel=0.01, abs=1e-4
    )
    assert [sample.at for sample in own.exposed_s] == [sample.at for sample in replay.recorded.exposed_s]
    assert own.hits == replay.recorded.hits == 6 * 8 * CHUNK - CHUNK * 8 + CHUNK * (0 + 1 + 2 + 3 + 4)
    assert len(replay.run.engines) == 1 and replay.run.engines[0].ranks == set(range(ranks))


def test_what_was_purged_is_not_hit(tmp_path):
    machine = KnownMachine(bandwidth=20e6)
    told = []
    for _ in range(3):
        told += again(machine, 3)
        machine.purge()
    replay = Replay.read(machine.write(tmp_path / "x.lfr"))
    assert believed(replay), replay.trust
    assert replay.own.hits == replay.recorded.hits > 0
    assert [sample.value for sample in replay.own.prefill_s] == pytest.approx([took for _, took in told], rel=0.01)
    slow = replay.under(replay.settings, link=OtherLink(8e6), validate=True)
    assert slow.hits == replay.recorded.hits, "it purges when its prompts are done, however long they took"


def test_a_purge_in_the_middle_of_a_step_stays_there(tmp_path):
    machine = KnownMachine(bandwidth=1e9)
    again(machine, 2)
    opened = next(record.at for record in reversed(machine.records) if isinstance(record, StepSeen))
    machine.records.append(Purged(opened + 1e-3, 1))
    machine.serve(PROMPT)
    replay = Replay.read(machine.write(tmp_path / "x.lfr"))
    figures = replay.under(replay.settings, validate=True)
    assert [sample.value for sample in figures.hit_tokens] == [0.0, 8 * CHUNK, 0.0]
    assert not figures.failed_loads, "what a step reads of a pool that is emptied it reads to its end"


def test_the_curve_of_a_recording_knows_its_purges(tmp_path):
    machine = KnownMachine()
    again(machine, 3)
    machine.purge()
    again(machine, 3)
    prompts = prompts_of(read_run(machine.write(tmp_path / "x.lfr")))
    [point] = hit_curve(prompts.trace, prompts.spec, [prompts.arena_bytes])
    assert point.hit_tokens == prompts.hit_tokens


def test_another_link_takes_what_the_closed_form_says(tmp_path):
    machine = KnownMachine(bandwidth=1e9)
    again(machine)
    replay = Replay.read(machine.write(tmp_path / "x.lfr"))
    slow = KnownMachine(bandwidth=20e6)
    expected = [exposed for exposed, _ in again(slow)[1:]]
    now = replay.under(replay.settings, link=OtherLink(20e6))
    assert [sample.value for sample in now.exposed_s] == pytest.approx(expected, rel=0.02)


def emulating(latency_us: int = 3000) -> KnownMachine:
    """A machine whose link is emulated: 20 MB/s, in batches of one size."""
    link = {"link_gbps": 0.02, "link_latency_us": latency_us}
    settings = Settings(transfer={"mode": "layerwise", "max_transfer_bytes": "64KiB"}, pool={"size": "64MiB", **link})
    return KnownMachine(bandwidth=20e6, latency_s=latency_us * 1e-6, settings=settings)


def exposed_of(figures: ReplayFigures) -> list[float]:
    return [sample.value for sample in figures.exposed_s]


def test_an_emulated_link_is_taken_as_its_settings_say(tmp_path):
    machine = emulating()
    told = [exposed for exposed, _ in again(machine)[1:]]
    replay = Replay.read(machine.write(tmp_path / "x.lfr"))
    assert replay.fitted.load.cost == LinkCost(20e6, 3e-3)
    assert exposed_of(replay.under(replay.settings, validate=True)) == pytest.approx(told, rel=0.01)
    assert exposed_of(replay.under(replay.settings, residuals=False)) == pytest.approx(told, rel=0.01)


@pytest.mark.parametrize("shares", [(0.0, 4.0, 0.0, 0.0), (2.0, 0.0, 2.0, 0.0)], ids=["one", "every-other"])
def test_layers_that_compute_unlike_others_are_no_noise(tmp_path, shares):
    machine = KnownMachine(bandwidth=100e6, shares=shares)
    told = again(machine)
    replay = Replay.read(machine.write(tmp_path / "x.lfr"))
    fitted = replay.under(replay.settings, residuals=False)
    assert exposed_of(fitted) == pytest.approx([exposed for exposed, _ in told[1:]], rel=0.01)
    assert [sample.value for sample in fitted.prefill_s] == pytest.approx([took for _, took in told], rel=0.01)
    unhit = KnownMachine(bandwidth=100e6, shares=shares)
    expected = []
    for turn in range(6):
        unhit.stored.clear()
        expected.append(unhit.serve([*PROMPT, *range(100, 100 + turn)])[1])
    small = replay.under(replay.configured(None, {"pool.size": "64KiB"}))
    assert [sample.value for sample in small.prefill_s] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("latency_us", [0, 300, 30_000])
def test_another_latency_of_an_emulated_link_takes_what_the_closed_form_says(tmp_path, latency_us):
    machine, other = emulating(), emulating(latency_us)
    again(machine)
    expected = [exposed for exposed, _ in again(other)[1:]]
    replay = Replay.read(machine.write(tmp_path / "x.lfr"))
    now = replay.under(replay.configured(None, {"pool.link_latency_us": str(latency_us)}), validate=True)
    assert exposed_of(now) == pytest.approx(expected, rel=0.02)
    assert replay.unjudged(replay.configured(None, {"pool.link_gbps": "0"})).keys() == {"pool.link_gbps"}


def test_a_links_own_latency_stays_where_only_its_rate_is_another(tmp_path):
    def of(bandwidth: float, latency_s: float) -> tuple[KnownMachine, list[float]]:
        machine = KnownMachine(bandwidth=bandwidth, latency_s=latency_s)
        return machine, [exposed for exposed, _ in again(machine)[1:]]

    machine, told = of(20e6, 4e-3)
    replay = Replay.read(machine.write(tmp_path / "x.lfr"))
    assert replay.fitted.load.cost.latency == pytest.approx(4e-3, rel=0.02)
    assert exposed_of(replay.own) == pytest.approx(told, rel=0.01)
    for link, bandwidth, latency_s in (
        (OtherLink(10e6), 10e6, 4e-3),
        (OtherLink(latency=0.0), 20e6, 0.0),
        (OtherLink(latency=9e-3), 20e6, 9e-3),
        (OtherLink(10e6, 9e-3), 10e6, 9e-3),
    ):
        found = replay.under(replay.settings, link=link, validate=True)
        assert exposed_of(found) == pytest.approx(of(bandwidth, latency_s)[1], rel=0.02), link


def test_what_is_not_hit_any_more_is_computed(tmp_path):
    machine = KnownMachine(bandwidth=1e9)
    again(machine)
    replay = Replay.read(machine.write(tmp_path / "x.lfr"))
    one = LAYERS * CHUNK * 1024
    small = replay.configured(None, {"pool.size": 4 * one})
    figures = replay.under(small, validate=True)
    assert figures.hits < replay.own.hits and figures.evictions >= 0
    cold = KnownMachine(bandwidth=1e9)
    took = [cold.serve(range(1000 * turn, 1000 * turn + 8 + turn))[1] for turn in range(1, 6)]
    assert sum(sample.value for sample in figures.prefill_s) <= sum(took) + 0.1
    assert figures.prefill.mean > replay.own.prefill.mean


def test_bulk_waits_for_all_of_it_before_its_first_pass(tmp_path):
    machine = KnownMachine(bandwidth=20e6)
    told = again(machine)
    replay = Replay.read(machine.write(tmp_path / "x.lfr"))
    bulk = replay.under(replay.configured(None, {"transfer.mode": "bulk"}))
    whole = [8 + turn for turn in range(5)]
    layer_s = machine.fixed_s + machine.token_s * CHUNK
    loads = [LAYERS * count * CHUNK // 16 * BLOCK_BYTES / 20e6 for count in whole]
    assert [sample.value for sample in bulk.prefill_s][2:] == pytest.approx(
        [load + LAYERS * layer_s for load in loads[1:]], rel=0.05
    )
    assert bulk.exposed.p99 == 0.0 and told[-1][1] < bulk.prefill_s[-1].value


def test_what_was_there_before_the_recording_is_hit(tmp_path):
    machine = KnownMachine()
    machine.stored.update(PROMPT)
    machine.serve(PROMPT)
    machine.serve(PROMPT)
    replay = Replay.read(machine.write(tmp_path / "x.lfr"))
    assert replay.own.hits == replay.recorded.hits == 2 * (8 * CHUNK - 1)


def test_a_recording_that_cannot_be_believed_says_why(tmp_path):
    machine = KnownMachine()
    again(machine)
    machine.records.append(Dropped(machine.now, 7))
    fetch = FetchOpened(1, "1", (0,), (Item(1, 1),))
    machine.records.append((EVENTS[FetchOpened], machine.now, fetch))
    trust = Replay.read(machine.write(tmp_path / "x.lfr")).trust
    assert not trust.trusted
    assert any("7 events are missing" in why for why in trust.reasons)
    assert any("behind the arena" in why for why in trust.reasons)


def test_few_prompts_make_no_p99(tmp_path):
    machine = KnownMachine()
    again(machine, 39)
    assert Replay.read(machine.write(tmp_path / "x.lfr")).trust.reasons == (
        "39 steps with their times are too few to compare: record at least 40",
        "39 prompts with their times are too few to compare: record at least 40",
    )
    machine.serve(PROMPT)
    assert Replay.read(machine.write(tmp_path / "y.lfr")).trust.trusted


def test_failed_loads_and_shed_saves_that_are_not_predicted_are_not_trusted(tmp_path):
    machine = KnownMachine()
    again(machine, 40)
    failed = LoadFailed(2, 1, "1", 0, 0, 1, "it took too long")
    machine.records += [(COMMANDS[LoadFailed], machine.now, failed)] * 3
    trust = Replay.read(machine.write(tmp_path / "x.lfr")).trust
    assert [row.name for row in trust.rows if not row.alike] == ["failed loads"] and not trust.trusted
    machine.records = machine.records[:-4]
    run = read_run(machine.write(tmp_path / "y.lfr"))
    run.samples[-1] = msgspec.structs.replace(run.samples[-1], shed=FEW + 1)
    assert [row.name for row in Replay(run).trust.rows if not row.alike] == ["shed saves"]


def test_what_differs_is_not_trusted(tmp_path):
    machine = KnownMachine()
    again(machine)
    places = [place for place, record in enumerate(machine.records) if isinstance(record, LookedUp)]
    for place in places[:3]:
        machine.records[place] = msgspec.structs.replace(machine.records[place], hit=CHUNK)
    trust = Replay.read(machine.write(tmp_path / "x.lfr")).trust
    assert next(row.name for row in trust.rows if not row.alike) == "hit tokens (%)"


def _recorded_with(machine, section, **keys):
    """As a layerflow with these keys, or with these values, would have recorded it."""
    machine.records[0].sections[section].update(keys)


def test_keys_that_are_not_known_here_are_left_out(tmp_path):
    machine = KnownMachine()
    again(machine)
    _recorded_with(machine, "transfer", of_tomorrow=7)
    machine.records[0].sections["of_tomorrow"] = {"key": 1}
    replay = Replay.read(machine.write(tmp_path / "x.lfr"))
    assert replay.settings == machine.settings and replay.configured(None, {}).transfer == machine.settings.transfer


def test_settings_that_are_refused_name_the_recording(tmp_path):
    machine = KnownMachine()
    again(machine)
    _recorded_with(machine, "transfer", mode="of tomorrow")
    with pytest.raises(ConfigError, match=r"x\.lfr: was recorded under settings .*transfer\.mode") as refused:
        Replay.read(machine.write(tmp_path / "x.lfr"))
    assert "\n" not in str(refused.value)


def test_recorded_deadlines_have_their_bound_with_them(tmp_path):
    long = {"server": {"max_deadline_s": 1200}, "transfer": {"step_timeout_ms": 1_000_000}}
    machine = KnownMachine(settings=Settings(**long))
    again(machine)
    replay = Replay.read(machine.write(tmp_path / "x.lfr"))
    assert replay.configured(None, {"pool.size": "64MiB"}).transfer.step_timeout_ms == 1_000_000
    file = tmp_path / "layerflow.toml"
    file.write_text("[transfer]\nprefetch_layers = 2\n")
    assert RecordedJudge(replay, file).settings.transfer.step_timeout_ms == 1_000_000


def test_nothing_timed_is_refused(tmp_path):
    machine = KnownMachine()
    machine.serve(PROMPT)
    machine.records = [record for record in machine.records if type(record).__name__ != "StepSpans"]
    with pytest.raises(ConfigError, match="no step with times"):
        Replay.read(machine.write(tmp_path / "x.lfr"))


def test_the_end_of_a_recording_is_replayed_by_itself(tmp_path):
    machine = KnownMachine(bandwidth=20e6)
    again(machine, 3)
    began = machine.now + 0.5
    machine.purge()
    told = again(machine, 4)
    path = machine.write(tmp_path / "x.lfr")
    replay = Replay.read(path, machine.now - began)
    assert len(replay.run.prompts) == 4 and believed(replay), replay.trust
    assert exposed_of(replay.own) == pytest.approx([exposed for exposed, _ in told[1:]], rel=0.01)
    with pytest.raises(ConfigError, match="no prompt was looked up"):
        Replay.read(path, 0.0)


def test_a_replay_that_takes_more_memory_than_is_free_is_refused(tmp_path, monkeypatch):
    machine = KnownMachine()
    again(machine, 40)
    path = machine.write(tmp_path / "x.lfr")
    needed = Recording(path).raw_bytes() * REPLAY_MEMORY
    monkeypatch.setattr(recorded, "free_bytes", lambda: needed - 1)
    with pytest.raises(ConfigError, match="GiB are free; replay its end: --last 10m"):
        Replay.read(path)
    monkeypatch.setattr(recorded, "free_bytes", lambda: needed)
    assert Replay.read(path).trust.trusted


def test_what_a_replay_keeps_of_spans_is_packed(tmp_path):
    machine = KnownMachine(settings=Settings(transfer={"mode": "layerwise", "max_transfer_bytes": "16KiB"}))
    again(machine, 40)
    path = machine.write(tmp_path / "x.lfr")
    tracemalloc.start()
    try:
        replay = Replay.read(path)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    spans = sum(step.span_count for each in replay.run.engines[0].passes for step in each.ranks.values())
    assert spans > 5000 and kept < Recording(path).raw_bytes() * REPLAY_MEMORY
    assert kept < 150 * spans, "a span as an object takes twice as much by itself"


def test_ranks_of_one_model_are_one_model(tmp_path):
    machine = KnownMachine(ranks=4)
    again(machine, 3)
    prompts = prompts_of(read_run(machine.write(tmp_path / "x.lfr")))
    assert len(prompts.trace.requests) == 3 and prompts.spec.shard.tp_size == 4
