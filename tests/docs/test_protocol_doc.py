"""docs/protocol.md says what the code does: every message, code, layout and key."""

import hashlib
import json
import re
import struct
from typing import Annotated, get_args, get_origin

import msgspec
import pytest
from pages import ROOT, code, page, rows, sections

from layerflow.config.settings import Settings
from layerflow.hits import MAX_TAILS
from layerflow.keys import Chain, Media, object_key, root_digest
from layerflow.objects import object_bytes, pack_header
from layerflow.presence import place_of
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard
from layerflow.wire import codec, messages
from layerflow.wire.messages import STRANGER, VERSION, Message

TEXT = page("protocol.md")
KINDS = [
    kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
]
WORDS = {bytes: "bin", int: "int", float: "float", bool: "bool", str: "str"}


def heading(kind: type) -> str:
    tag = kind.__struct_config__.tag
    return f"{tag} {kind.__name__}" if tag is not None else kind.__name__


def word(annotation: object) -> str:
    if get_origin(annotation) is Annotated:
        return word(get_args(annotation)[0])
    if get_origin(annotation) in (list, tuple):
        return f"[{word(get_args(annotation)[0])}]"
    return WORDS.get(annotation) or annotation.__name__


@pytest.mark.parametrize("kind", [*KINDS, ModelSpec, GroupSpec, Plane, Shard], ids=lambda kind: kind.__name__)
def test_every_message_is_there_with_exactly_its_fields(kind):
    table = rows(sections(TEXT)[heading(kind)])
    assert table[0][:2] == ["field", "type"]
    told = [(code(cells[0]), cells[1]) for cells in table[1:]]
    assert told == [(field.name, word(field.type)) for field in msgspec.structs.fields(kind)]


def test_no_message_is_there_that_the_protocol_lacks():
    told = {name for name in sections(TEXT) if re.match(r"\d+ [A-Z]", name)}
    assert told == {heading(kind) for kind in KINDS if kind.__struct_config__.tag is not None}


def test_the_greeting_is_the_current_one():
    assert codec.FINGERPRINT.hex() in TEXT
    assert codec.greeting().hex() in TEXT
    assert f"Version {codec.PROTOCOL_VERSION}." in TEXT


def test_limits_are_the_current_ones():
    assert f"`server.max_deadline_s`, {Settings().server.max_deadline_s:,.0f} s by default" in TEXT
    assert f"{codec.SMALL_BYTES >> 10} KiB" in TEXT
    assert f"{messages.MAX_NAME:,} characters" in TEXT
    assert f"{messages.MAX_PARTS:,} parts" in TEXT
    assert f"{messages.MAX_ITEMS:,} items" in TEXT
    assert f"at most {MAX_TAILS}" in TEXT
    assert f"`server.max_message_bytes`, {Settings().server.max_message_bytes >> 20} MiB by default" in TEXT


def test_every_problem_code_is_listed():
    source = "".join(path.read_text() for path in sorted((ROOT / "src/layerflow/server").rglob("*.py")))
    source += (ROOT / "src/layerflow/wire/rights.py").read_text()
    raised = set(re.findall(r'(?:Refused|NotAllowed)\(\s*"(\w+)"', source))
    raised |= set(re.findall(r'_refuse\(session, message, "(\w+)"', source))
    raised |= set(re.findall(r'= "(\w+)" if .* else ', source)) | {STRANGER, VERSION}
    assert {code(cells[0]) for cells in rows(sections(TEXT)["Problems"])[1:]} == raised


VECTOR = {cells[0]: code(cells[1]) for cells in rows(sections(TEXT)["Test vector"])[1:]}


class TestVector:
    tokens = range(1, 10)

    def test_layerflow_computes_it(self):
        planes = (Plane("k", "float16", (1, 4)), Plane("v", "float16", (1, 4)))
        group = GroupSpec("full", 2, (0, 1), planes)
        spec = ModelSpec("tiny", "weights-1", (group,), attention="demo/NHD", chunk_tokens=4)
        root = root_digest(spec.fingerprint, adapter="lora-a", salt="tenant-1")
        chain = Chain(root, list(self.tokens), 4, [Media(5, 2, b"\x01\x02")])
        key = object_key(chain.digests[1], 0, Shard())
        assert spec.fingerprint.hex() == VECTOR["fingerprint"]
        assert root.hex() == VECTOR["root"]
        assert [digest.hex() for digest in chain.digests] == [VECTOR["chunk 0"], VECTOR["chunk 1"]]
        assert chain.partial(2, 1).hex() == VECTOR["tail of 1 token"]
        assert key.hex() == VECTOR["key of chunk 1, group 0, ranks 0"]
        header = pack_header(key, blocks=2, tokens=4, payload=object_bytes(group, 2) - 64)
        assert header.hex() == VECTOR["its header"]
        assert "{}, {:016x}".format(*place_of(key, 0, 512)) == VECTOR["its bucket and tag, of 512 buckets"]

    def test_so_does_another_implementation_by_the_page(self):
        def blake(person: bytes, data: bytes) -> bytes:
            return hashlib.blake2b(data, digest_size=16, person=person).digest()

        def ids(tokens: range) -> bytes:
            return struct.pack(f"<{len(tokens)}q", *tokens)

        text = VECTOR["JSON"]
        assert json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) == text
        fingerprint = blake(b"layerflow-model", text.encode())
        assert fingerprint.hex() == VECTOR["fingerprint"]
        parts = (fingerprint, b"lora-a", b"tenant-1")
        root = blake(b"layerflow-root", b"".join(struct.pack("<I", len(part)) + part for part in parts))
        assert root.hex() == VECTOR["root"]
        first = blake(b"layerflow-chunk", root + ids(self.tokens[:4]))
        assert first.hex() == VECTOR["chunk 0"]
        media = struct.pack("<qqI", 1, 2, 2) + b"\x01\x02"
        second = blake(b"layerflow-chunk", first + ids(self.tokens[4:8]) + media)
        assert second.hex() == VECTOR["chunk 1"]
        tail = blake(b"layerflow-chunk", second + ids(self.tokens[8:]))
        assert tail.hex() == VECTOR["tail of 1 token"]
        key = second + struct.pack("<HHHxx", 0, 0, 0)
        assert key.hex() == VECTOR["key of chunk 1, group 0, ranks 0"]
        header = b"LFOB" + struct.pack("<HHIIQ", 1, 0, 2, 4, 2 * 2 * 32) + key + bytes(16)
        assert header.hex() == VECTOR["its header"]
        a, b, c = struct.unpack("<QQQ", key)
        for salt, name in (
            (0, "its bucket and tag, of 512 buckets"),
            (0xC2B2AE3D27D4EB4F, "bucket and tag of a tail after it"),
        ):
            m = (c * 0x9E3779B97F4A7C15 + salt) % 2**64
            assert f"{(a + m) % 2**64 * 512 // 2**64}, {b ^ m:016x}" == VECTOR[name]
