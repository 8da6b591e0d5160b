"""What people write into the file by hand: slips, other systems' names, the starter file's lines."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerflow.config.settings import Settings, reference
from layerflow.config.sources import FOREIGN
from layerflow.server.terms import limits_of, terms_of
from layerflow_cli.commands.config import starter_file

Toml = Callable[[str], Path]
Refusal = Callable[..., list[str]]

STARTER = starter_file(reference()).splitlines()
DEFAULTS = [place for place, line in enumerate(STARTER) if line.startswith("#") and not line.startswith("# ")]


class TestStarterFile:
    """Each of its settings can be uncommented, and then says what would be used anyway."""

    def test_every_setting_has_a_line(self) -> None:
        keys = [STARTER[place][1:].partition(" = ")[0] for place in DEFAULTS]
        assert keys == [row.key.rpartition(".")[2] for row in reference()]

    @pytest.mark.parametrize("place", DEFAULTS, ids=[row.key for row in reference()])
    def test_each_line_alone(self, toml: Toml, place: int) -> None:
        lines = [*STARTER[:place], STARTER[place][1:], *STARTER[place + 1 :]]
        assert Settings.load(toml("\n".join(lines))) == Settings()

    def test_all_together(self, toml: Toml) -> None:
        lines = [line[1:] if place in DEFAULTS else line for place, line in enumerate(STARTER)]
        assert Settings.load(toml("\n".join(lines))) == Settings()


class TestToml:
    """The error shows the line, and what it should be where that can be known."""

    @pytest.mark.parametrize(
        "text",
        [
            "[proxy]\nadmin_token: s3cret",
            '[proxy]\n"admin_token" = s3cret',
            '[proxy]\nadmin_token "s3cret"',
            "[proxy]\nadmin_token = s3cret",
            'proxy = { admin_token = "s3cret",',
            '[proxy]\nAdmin_Token := "s3cret"',
            '[proxy]\nadmin_token = [\n"s3cret" x',
            'pool.redis = { url = "redis://u:s3cret@h" x }',
        ],
    )
    def test_no_line_that_may_have_a_secret_in_it_is_shown(self, toml: Toml, refusal: Refusal, text: str) -> None:
        (told,) = refusal(toml(f"{text}\n"))
        assert "s3cret" not in told and f"line {len(text.splitlines())}: " in told

    def test_other_lines_beside_a_secret_are(self, toml: Toml, refusal: Refusal) -> None:
        (told,) = refusal(toml('[proxy]\nadmin_token = "x"\nhost = localhost\n'))
        assert 'text needs quotes: host = "localhost"' in told

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("size = 16GiB", 'size = 16GiB: text needs quotes: size = "16GiB"'),
            ("size = 16GiB  # of 64", 'text needs quotes: size = "16GiB"'),
            ('backend = "disk', 'text needs quotes: backend = "disk"'),
            ("disk.path = /var/lib/layerflow", 'text needs quotes: disk.path = "/var/lib/layerflow"'),
            ("warm = True", "warm = True: write warm = true"),
            ("size: 16GiB", "size: 16GiB: that is YAML"),
            ("size =", "size =: no value"),
            ("warm = true\nwarm = true", "warm = true: Cannot overwrite a value"),
            ("warm = true = 3", "warm = true = 3: "),
        ],
    )
    def test_a_slip(self, toml: Toml, refusal: Refusal, line: str, words: str) -> None:
        path = toml(f"[pool]\n{line}\n")
        (told,) = refusal(path)
        assert told.startswith(f"{path}: not valid TOML: line {1 + len(line.splitlines())}: ") and words in told

    def test_a_secret_is_not_shown(self, toml: Toml, refusal: Refusal) -> None:
        (told,) = refusal(toml("[proxy]\nadmin_token = k3y\n"))
        assert 'line 2: admin_token = ***: text needs quotes: admin_token = "***"' in told and "k3y" not in told
        (told,) = refusal(None, {"proxy.admin_token": 4711})
        assert told.startswith("proxy.admin_token = *** (set by a flag)") and "4711" not in told

    def test_bytes_that_are_no_text(self, toml: Toml, refusal: Refusal) -> None:
        path = toml("")
        path.write_bytes(b"[pool]\nsize = '\xff'\n")
        assert "save it as UTF-8" in refusal(path)[0]


def test_unknown_keys_and_wrong_values_are_told_together(
    toml: Toml, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYERFLOW_POL__SIZE", "1GiB")
    monkeypatch.setenv("LAYERFLOW_LOG__LEVEL", "loud")
    path = toml('[pool]\nsiz = "1GiB"\nsize = "3X"\n[transfer]\nmode = "fast"\n')
    lines = refusal(path, {"server.http_prt": 1, "server.http_port": 70_000})
    words = ["pool.siz ", "LAYERFLOW_POL__SIZE", "server.http_prt ", "pool.size = '3X'", "transfer.mode = 'fast'",
             "server.http_port = 70000", "log.level = 'loud'"]  # fmt: skip
    assert len(lines) == len(words) and all(any(word in line for line in lines) for word in words)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[pool]\nfoo = 1\n", "[pool] has backend, size, warm"),
        ("[pool]\nlink_gbp = 1\n", "did you mean pool.link_gbps?"),
        ("[peers]\nlink_gbp = 1\n", "did you mean peers.link_gbps?"),
        ("[pool.mooncake]\npath = '/x'\n", "did you mean pool.disk.path?"),
        ("[pd]\nlease_share = 1\n", "did you mean pool.lease_share?"),
    ],
)
def test_the_section_itself_comes_first(toml: Toml, refusal: Refusal, text: str, hint: str) -> None:
    (line,) = refusal(toml(text))
    assert hint in line


class TestOtherSystems:
    """Keys of LMCache, AscendStore and HiCache."""

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("chunk_size = 256\n", "chunk_tokens"),
            ("local_cpu = true\n", "pool.size"),
            ("max_local_cpu_size = 20\n", 'pool.size with its unit, "20GiB"'),
            ("local_disk = 'file:///x'\n", "pool.disk.path"),
            ("remote_url = 'redis://a:1'\n", "pool.redis.url"),
            ("[pool]\nmax_local_cpu_size = 20\n", "pool.size"),
            ("LMCACHE_MAX_LOCAL_CPU_SIZE = 20\n", "pool.size"),
            ("mooncake_rpc_port = 1\n", "server.endpoint"),
            ("hicache-size = 100\n", "pool.size"),
            ("hicache_storage_backend = 'file'\n", "pool.backend"),
            ("consumer_is_to_put = true\n", "kv_connector_extra_config"),
            ("[kv_connector_extra_config]\nbackend = 'memory'\n", "that is vLLM's"),
        ],
    )
    def test_a_key_is_answered_with_what_to_write(self, toml: Toml, refusal: Refusal, text: str, words: str) -> None:
        (line,) = refusal(toml(text))
        assert words in line and "did you mean" not in line

    def test_what_is_to_be_written_exists(self) -> None:
        keys = {row.key for row in reference()} | {row.key.rpartition(".")[0] for row in reference()}
        for name, advice in FOREIGN.items():
            named = {word.strip('",;()').removesuffix(":") for word in advice.split()}
            named = {word for word in named if word.split(".")[0] in ("pool", "transfer", "peers", "server")}
            assert named <= keys | {"server", "peers", "server's"}, name

    def test_none_of_them_is_a_setting_at_the_top(self, toml: Toml, refusal: Refusal) -> None:
        path = toml("\n".join(f"{name} = 1" for name in FOREIGN))
        assert len(refusal(path)) == len(FOREIGN)

    def test_zero_is_no_limit(self, toml: Toml) -> None:
        settings = Settings.load(toml("layerwise_max_transfer_blocks = 0\nlayerwise_max_transfer_bytes = 0\n"))
        for told in (limits_of(settings, 1 << 30), terms_of(settings, 1)):
            assert told.max_transfer_bytes == settings.transfer.max_inflight_bytes // 2
            assert told.max_transfer_blocks == 1 << 24

    @pytest.mark.parametrize("size", [1, "4095"])
    def test_a_copy_of_next_to_nothing_is_refused(self, refusal: Refusal, size: object) -> None:
        (line,) = refusal(None, {"transfer.max_transfer_bytes": size})
        assert "at least 4KiB, or 0" in line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pool.disk.path", "~/cache"),
        ("pool.memcache.config_file", "~/mmc.conf"),
        ("proxy.admin_socket", "~/admin.sock"),
        ("server.endpoint", "ipc://~/run/control"),
    ],
)
def test_the_home_directory(key: str, value: str) -> None:
    section, _, name = key.rpartition(".")
    found: Any = Settings.load(None, {key: value})
    for part in section.split("."):
        found = getattr(found, part)
    assert getattr(found, name) == value.replace("~", os.path.expanduser("~"))


def test_the_home_directory_of_a_file() -> None:
    found = Settings.load(None, {"server.curve_secret_key_file": "~/key"}).server.curve_secret_key_file
    assert found == Path("~/key").expanduser()


def test_the_home_directory_of_nobody(refusal: Refusal) -> None:
    (line,) = refusal(None, {"pool.disk.path": "~no-such-user/cache"})
    assert "~no-such-user is no user" in line


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("ipc://${XDG_RUNTIME_DIR:-/tmp}/layerflow-1000/control", "$ is not replaced"),
        ("ipc:///run/$USER/control", "$ is not replaced"),
        ("ipc:///run/layerflow-<uid>/control", "< is not replaced"),
        ("ipc://run/layerflow/control", "is relative"),
        ("ipc://control", "is relative"),
    ],
)
class TestEndpoint:
    """An address that only a shell would understand, or only the server's own directory, is none."""

    def test_of_the_server(self, refusal: Refusal, endpoint: str, words: str) -> None:
        (line,) = refusal(None, {"server.endpoint": endpoint})
        assert line.startswith("server.endpoint = ") and words in line

    def test_of_a_peer(self, refusal: Refusal, endpoint: str, words: str) -> None:
        assert words in "\n".join(refusal(None, {"peers.attach": [{"name": "a", "address": endpoint}]}))

    def test_behind_the_proxy(self, refusal: Refusal, endpoint: str, words: str) -> None:
        assert words in "\n".join(refusal(None, {"proxy.prefill": f"http://a:1={endpoint}"}))
