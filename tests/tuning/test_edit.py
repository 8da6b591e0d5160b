"""A configuration file with some keys changed, and nothing else."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerflow.config.fields import parse_size
from layerflow.config.settings import Settings
from layerflow.errors import ConfigError
from layerflow.tuning.edit import Written, as_toml, edited

FILE = """\
# Of the machine in the corner.
backend = "memory"   # an alias

[transfer]   # how layers move
prefetch_layers = 1   # as it was
max_transfer_bytes = "1MiB"

# The pool.
[pool]
size = "2GiB"
"""
CHANGES = {
    "transfer.prefetch_layers": Written(4, "loads run further ahead"),
    "transfer.h2d_stagger_us": Written(50, "ranks in turn"),
    "transfer.mode": Written("bulk", "suits better"),
}


def test_only_the_changed_lines_differ() -> None:
    before, after = FILE.splitlines(), edited(FILE, CHANGES).splitlines()
    assert "prefetch_layers = 4 # loads run further ahead | as it was" in after
    assert [line for line in before if line not in after] == ["prefetch_layers = 1   # as it was"]
    assert len(after) == len(before) + 2
    assert after.index('mode = "bulk" # suits better') < after.index("# The pool.")


def test_an_alias_is_changed_where_it_stands() -> None:
    text = 'layerwise_prefetch_layers = 1\n[pool]\nsize = "2GiB"\n'
    after = edited(text, {"transfer.prefetch_layers": Written(4, "x")})
    assert after.startswith("layerwise_prefetch_layers = 4 # x\n[pool]")
    assert "layerwise_max_transfer_bytes" not in after


def test_a_file_without_the_section_gets_one() -> None:
    for text in ("", "# empty\n", '[pool]\nsize = "2GiB"\n'):
        after = edited(text, {"transfer.prefetch_layers": Written(4, "x")})
        assert after.startswith(text.rstrip("\n")) and tomllib.loads(after)["transfer"] == {"prefetch_layers": 4}


def test_other_ways_to_write_a_section() -> None:
    for text in ("transfer.prefetch_layers = 1\n", "transfer = { prefetch_layers = 1 }\n"):
        after = edited(text, {"transfer.prefetch_layers": Written(4, "x")})
        assert tomllib.loads(after)["transfer"]["prefetch_layers"] == 4


def test_the_switch_of_others_is_refused() -> None:
    with pytest.raises(ConfigError, match="use_layerwise"):
        edited("use_layerwise = true\n", {"transfer.mode": Written("bulk", "x")})


@given(
    st.dictionaries(
        st.sampled_from(["prefetch_layers", "max_transfer_blocks", "h2d_stagger_us", "step_timeout_ms"]),
        st.integers(1, 1000),
    ),
    st.dictionaries(
        st.sampled_from(
            ["transfer.prefetch_layers", "transfer.max_transfer_blocks", "pool.lease_ms", "log.slow_step_ms"]
        ),
        st.integers(1, 1000),
        min_size=1,
    ),
    st.lists(st.sampled_from(["# a comment", "", "   "]), max_size=3),
)
def test_any_file_keeps_what_is_not_changed(had: dict[str, int], wanted: dict[str, int], between: list[str]) -> None:
    body = "\n".join(
        [*between, "[transfer]", *(f"{key} = {value}  # {key}" for key, value in had.items()), *between, ""]
    )
    after = edited(body, {key: Written(value, "why") for key, value in wanted.items()})
    expected = {f"transfer.{key}": value for key, value in had.items()} | wanted
    assert Settings.load(None, tomllib.loads(after)) == Settings.load(None, expected)
    assert after.count("# a comment") == body.count("# a comment")
    assert edited(after, {}) == after


@pytest.mark.parametrize("size", [4096, 1 << 20, 3 << 29, 12345])
def test_sizes_are_written_with_their_unit(size: int) -> None:
    assert parse_size(as_toml("transfer.max_transfer_bytes", size)) == size
    assert as_toml("transfer.prefetch_layers", 4) == 4
