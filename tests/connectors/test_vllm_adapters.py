"""Adapters are keyed by what vLLM computes with; where that is not known, nothing of them is loaded or saved."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm_scheduler import House, fakes  # noqa: F401  the stand-ins are an autouse fixture
from vllm_fakes import pieces

from layerflow.agent.values import Hit
from layerflow.connectors.vllm.identity import adapters
from layerflow.connectors.vllm.identity.adapters import Adapters
from layerflow.errors import ConfigError

PATIENCE_S = 20.0


def written(folder: Path, weight: int) -> Path:
    """An adapter of one tensor of 16 bytes, all of this value; replaces what is there."""
    header = json.dumps({"lora_A": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}).encode()
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 1}')
    (folder / "adapter_model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes([weight]) * 16
    )
    return folder


def lora(path: Path | str, number: int = 1, name: str = "a", *, inplace: bool = False, **more: bool) -> SimpleNamespace:
    """vLLM's LoRARequest."""
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), load_inplace=inplace, **more)


class TestContent:
    def test_neither_name_nor_path_nor_id_matter(self, tmp_path: Path) -> None:
        one = Adapters().content(lora(written(tmp_path / "one", 1)))
        assert one
        assert Adapters().content(lora(written(tmp_path / "two", 1), 7, "b")) == one
        assert Adapters().content(lora(written(tmp_path / "one", 2))) != one
        assert Adapters().content(None) == ""

    def test_how_its_experts_lie_matters(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a", 1)
        flat, deep = (Adapters().content(lora(path, is_3d_lora_weight=deep)) for deep in (False, True))
        assert flat != deep

    def test_a_copy_that_keeps_the_time_of_the_original_is_seen(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a", 1)
        old, times = Adapters().content(lora(path)), {file: file.stat().st_mtime_ns for file in path.iterdir()}
        written(path, 2)
        for file, time in times.items():
            os.utime(file, ns=(time, time))
        assert Adapters().content(lora(path)) != old

    def test_other_files_under_an_id_are_not_what_vllm_computes_with(self, tmp_path: Path) -> None:
        adapters, path = Adapters(), written(tmp_path / "a", 1)
        old = adapters.content(lora(path))
        written(path, 2)
        for _ in range(2):
            with pytest.raises(ConfigError, match="under a new id"):
                adapters.content(lora(path))
        assert adapters.content(lora(path, 2)) not in (old, "")
        written(path, 1)
        with pytest.raises(ConfigError):  # vLLM may have dropped it, and have read the other one meanwhile
            adapters.content(lora(path))

    def test_an_id_that_is_given_twice(self, tmp_path: Path) -> None:
        adapters = Adapters()
        adapters.content(lora(written(tmp_path / "a", 1)))
        with pytest.raises(ConfigError):
            adapters.content(lora(written(tmp_path / "b", 2), 1, "b"))

    def test_after_a_replacement_in_place_the_id_says_nothing(self, tmp_path: Path) -> None:
        adapters, path = Adapters(), written(tmp_path / "a", 1)
        for inplace in (True, False):
            with pytest.raises(ConfigError):
                adapters.content(lora(path, inplace=inplace))

    def test_files_that_are_gone_have_been_read(self, tmp_path: Path) -> None:
        adapters, path = Adapters(), written(tmp_path / "a", 1)
        known = adapters.content(lora(path))
        shutil.rmtree(path)
        assert adapters.content(lora(path)) == known
        with pytest.raises(ConfigError):
            adapters.content(lora(path, 2))

    @pytest.mark.parametrize("path", ["/nowhere/at all", "~/nowhere/at all"])
    def test_what_cannot_be_read_is_an_error_of_ours(self, path: str) -> None:
        with pytest.raises(ConfigError, match="cannot be told"):
            Adapters().content(lora(path))

    def test_half_an_adapter_is_an_error_of_ours(self, tmp_path: Path) -> None:
        (written(tmp_path / "a", 1) / "adapter_config.json").unlink()
        with pytest.raises(ConfigError, match="cannot be told"):
            Adapters().content(lora(tmp_path / "a"))


class TestLargeAdapters:
    """They are read behind the scheduler's thread; until that is done their requests are not cached."""

    @pytest.fixture(autouse=True)
    def behind(self, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
        """All are large, and are read once this is set."""
        go, folder_content = threading.Event(), adapters.folder_content

        def late(*given: Any) -> str:
            go.wait(PATIENCE_S)
            return folder_content(*given)

        monkeypatch.setattr(adapters, "SMALL_BYTES", 0)
        monkeypatch.setattr(adapters, "folder_content", late)
        return go

    def read(self, known: Adapters) -> None:
        for reading in known._readings.values():
            assert reading.wait(PATIENCE_S)

    def test_they_have_a_content_once_they_are_read(self, behind: threading.Event, tmp_path: Path) -> None:
        known, asked = Adapters(), lora(written(tmp_path / "a", 1))
        for _ in range(2):
            with pytest.raises(ConfigError, match="being read"):
                known.content(asked)
        assert not known.lost(asked)
        behind.set()
        self.read(known)
        assert known.content(asked) == known.content(asked) != ""

    def test_files_that_were_replaced_meanwhile_may_be_either(self, behind: threading.Event, tmp_path: Path) -> None:
        known, asked = Adapters(), lora(written(tmp_path / "a", 1))
        with pytest.raises(ConfigError, match="being read"):
            known.content(asked)
        written(tmp_path / "a", 2)
        behind.set()
        self.read(known)
        with pytest.raises(ConfigError, match="new id"):
            known.content(asked)
        assert known.lost(asked)


class TestMixed:
    @pytest.mark.parametrize("by_path", [True, False])
    def test_what_vllms_own_cache_cannot_tell_apart(self, by_path: bool, tmp_path: Path) -> None:
        adapters, path = Adapters(keyed_by_path=by_path), written(tmp_path / "a", 1)

        def started(adapter: SimpleNamespace | None) -> bool:
            adapters.content(adapter)
            adapters.starts(adapter)
            return adapters.mixed(adapter)

        assert not started(lora(path))
        assert not started(lora(path, 4)), "other ids of the same content"
        assert started(lora(written(tmp_path / "b", 2), 2)) is not by_path
        written(path, 3)
        assert started(lora(path, 3))
        adapters.forget_cached()
        assert not started(lora(path, 3))
        assert not started(None)

    def test_what_ran_while_its_content_was_not_known(self, tmp_path: Path) -> None:
        adapters, path = Adapters(), written(tmp_path / "a", 1)
        adapters.starts(lora(path))
        adapters.content(lora(path, 2))
        assert adapters.mixed(lora(path, 2))
        adapters.content(lora(path))
        assert not adapters.mixed(lora(path, 2))

    @pytest.mark.parametrize("emptied", ["at the start", "while it waits", "while it waits, its files gone"])
    def test_what_starts_in_the_first_step_on_an_empty_cache_is_known_of(self, emptied: str, tmp_path: Path) -> None:
        house, path = House(), written(tmp_path / "a", 1)
        table: list[object] = [object()]
        house.side.own_cache.meet(lambda: table[0])

        def serve(name: str, number: int, local: int = 0) -> Any:
            return begin(house.arrive(name, hit=Hit(0), lora_request=lora(path, number)), local)

        def begin(made: Any, local: int = 0) -> Any:
            house.side.matched(made, local)
            house.admit(made, 0)
            return house.plan(made.request_id, 150 - local, local).saves

        if emptied != "at the start":
            serve("before", 1)
            waiting = house.arrive("old", hit=Hit(0), lora_request=lora(path, 1))
            table[0] = object()
            if emptied.endswith("gone"):
                shutil.rmtree(path)
            assert begin(waiting)
        else:
            assert serve("old", 1)
        written(path, 2)
        assert not serve("found", 2, 64), "vLLM's own cache has given it blocks of the old adapter"
        assert serve("whole", 2)
        table[0] = object()
        serve("anew", 2)
        assert serve("found again", 2, 64)


class TestRequests:
    def test_an_adapter_that_changes_while_its_request_waits(self, tmp_path: Path) -> None:
        """vLLM reads it when the request starts."""
        house, path = House(), written(tmp_path / "a", 1)
        made = house.arrive(hit=Hit(128), lora_request=lora(path))
        written(path, 2)
        assert house.side.matched(made, 0) == (0, False)
        assert house.lookups.dropped == ["r"]
        house.admit(made, 0)
        assert not house.plan(scheduled=150, computed=0).saves

    def test_a_replacement_in_place_ends_the_saves_of_requests_that_run(self, tmp_path: Path) -> None:
        house, path = House(), written(tmp_path / "a", 1)
        others = {"r": lora(path), "other": lora(written(tmp_path / "b", 2), 2, "b"), "none": None}
        for name, adapter in others.items():
            made = house.arrive(name, hit=Hit(0), lora_request=adapter)
            house.side.matched(made, 0)
            house.admit(made, 0)
        house.arrive("new", lora_request=lora(path, inplace=True))
        assert not house.plan("r", 150, 0).saves
        for name in ("other", "none"):
            assert [part[0] for part in pieces(house.plan(name, 150, 0).saves.parts)] == [name]

    def test_a_load_that_is_on_goes_on(self, tmp_path: Path) -> None:
        house, path = House(), written(tmp_path / "a", 1)
        made = house.arrive(hit=Hit(128), lora_request=lora(path))
        assert house.side.matched(made, 0) == (128, False)
        house.admit(made, 128)
        waiting = house.arrive("new", lora_request=lora(path), hit=Hit(0))
        written(path, 2)
        assert house.side.matched(waiting, 0) == (0, False)
        plan = house.plan()
        assert [part[0] for part in pieces(plan.loads)] == ["r"]
        assert not plan.saves

    def test_old_blocks_that_vllm_finds_by_name_are_not_stored_as_new_ones(self, tmp_path: Path) -> None:
        house, path = House(), written(tmp_path / "a", 1)
        house.side.matched(house.arrive("old", hit=Hit(0), lora_request=lora(path)), 0)
        written(path, 2)
        made = house.arrive(hit=Hit(128), lora_request=lora(path, 2))
        assert house.side.matched(made, 64) == (0, False)
        house.admit(made, 0)
        assert not house.plan(scheduled=86, computed=64).saves
        whole = house.arrive("whole", hit=Hit(0), lora_request=lora(path, 2))
        house.side.matched(whole, 0)
        house.admit(whole, 0)
        assert house.plan("whole", 150, 0).saves

    def test_once_vllm_has_forgotten_its_blocks_its_own_hits_are_saved_on(self, tmp_path: Path) -> None:
        house, path = House(), written(tmp_path / "a", 1)
        for name, number in (("old", 1), ("new", 2)):
            made = house.arrive(name, hit=Hit(0), lora_request=lora(written(path, number), number))
            house.side.matched(made, 0)
            house.side.finished(made)
        house.side.reset()
        made = house.arrive(hit=Hit(0), lora_request=lora(path, 2))
        house.side.matched(made, 64)
        house.admit(made, 0)
        assert house.plan(scheduled=86, computed=64).saves

    def test_a_session_whose_prompt_changes_is_not_cached(self) -> None:
        house = House()
        made = house.arrive(resumable=True)
        assert house.lookups.asked == []
        assert house.side.matched(made, 0) == (0, False)
