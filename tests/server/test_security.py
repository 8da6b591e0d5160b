"""Key files: Z85 has "#" itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerflow.errors import ConfigError
from layerflow.server.transport.security import Z85_KEY, read_keys

PLAIN, HASHED, LEADING = b"a" * Z85_KEY, b"b#c" + b"d" * (Z85_KEY - 3), b"#" + b"e" * (Z85_KEY - 1)


def read(tmp_path: Path, content: bytes) -> list[bytes]:
    (tmp_path / "keys").write_bytes(content)
    return read_keys(tmp_path / "keys")


def test_keys_comments_and_hashes(tmp_path: Path) -> None:
    content = b"# who may\n\n" + PLAIN + b"\n" + HASHED + b"   # the second\n  " + LEADING + b" \n#" + PLAIN + b"\n"
    assert read(tmp_path, content) == [PLAIN, HASHED, LEADING]


@pytest.mark.parametrize("content", [b"short", PLAIN + b"x", PLAIN + b" " + HASHED, b"\xff" * Z85_KEY])
def test_what_is_no_key(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match="keys"):
        read(tmp_path, content)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(tmp_path / "none")
