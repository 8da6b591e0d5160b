import fcntl
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from layerflow import content
from layerflow.content import content_of_tensors, file_digest, model_content, weight_files, weights_content
from layerflow.errors import SpecError

CONFIG = {"hidden_size": 64, "rope_theta": 1e4, "torch_dtype": "bfloat16"}
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int8: "I8"}


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "b.weight": torch.randn((300, 70), generator=generator),
        "a.weight": torch.randn((40, 64), generator=generator).to(torch.bfloat16),
        "a.bias": torch.arange(5, dtype=torch.int8),
    }


def safetensors(tensors, metadata=None):
    header, body = {"__metadata__": metadata} if metadata else {}, b""
    for name, tensor in tensors.items():
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + body


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "layerflow" / "digests"


@pytest.fixture
def settled(monkeypatch):
    """Files that were written a moment ago count as settled."""
    monkeypatch.setattr(content, "SETTLED_S", -60.0)


@pytest.fixture
def reads(monkeypatch):
    """Files that were read to tell their digest."""
    seen = []
    sha256 = content._sha256
    monkeypatch.setattr(content, "_sha256", lambda file, path, stop: seen.append(path) or sha256(file, path, stop))
    return seen


@pytest.fixture
def checkpoint(tmp_path):
    def make(name="model", config=CONFIG, **files):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        for file, raw in (files or {"model": safetensors(weights())}).items():
            (folder / f"{file}.safetensors").write_bytes(raw)
        return folder

    return make


def test_neither_path_nor_file_times_nor_spelling_matter(checkpoint):
    one = checkpoint("one")
    two = checkpoint(
        "elsewhere",
        config={"_name_or_path": "/home/somebody", "transformers_version": "9", **dict(reversed(CONFIG.items()))},
        renamed=safetensors(weights()),
    )
    os.utime(two / "renamed.safetensors", (1, 1))
    assert model_content(one) == model_content(two)
    assert len(model_content(one)) == 32


def test_the_index_says_which_files_count(checkpoint):
    folder = checkpoint("twice", **{"model-1": safetensors(weights()), "consolidated": safetensors(weights(seed=5))})
    both = model_content(folder)
    index = {"weight_map": dict.fromkeys(weights(), "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert model_content(folder) != both
    assert model_content(folder) == model_content(checkpoint())


@pytest.mark.parametrize(
    "change",
    [
        lambda config, tensors: config.update(rope_theta=2e4),
        lambda config, tensors: tensors.update({"a.bias": tensors["a.bias"] + 1}),
        lambda config, tensors: tensors.update({"b.weight": tensors["b.weight"].reshape(70, 300)}),
        lambda config, tensors: tensors.update(
            {"b.weight": tensors["b.weight"].view(torch.int32).view(torch.float32) * 2}
        ),
        lambda config, tensors: tensors.update({"c": tensors.pop("a.bias")}),
        lambda config, tensors: tensors.update({"a.weight": tensors["a.weight"].float()}),
    ],
)
def test_whatever_changes_the_model_changes_the_digest(change):
    config, tensors = dict(CONFIG), weights()
    change(config, tensors)
    assert content_of_tensors(config, tensors) != content_of_tensors(CONFIG, weights())


def test_every_byte_of_a_tensor_counts():
    base = np.zeros(100_000, dtype=np.uint8)
    digest = content_of_tensors({}, {"w": base})
    for place in (0, 12_345, 99_999):
        changed = base.copy()
        changed[place] = 1
        assert content_of_tensors({}, {"w": changed}) != digest


def test_a_few_rows_trained_anew_make_another_model(checkpoint):
    """New special tokens: 9 of 300 rows, and nothing else."""
    tensors = weights()
    tensors["b.weight"] = tensors["b.weight"].clone()
    tensors["b.weight"][280:289] += 1
    assert model_content(checkpoint("tuned", model=safetensors(tensors))) != model_content(checkpoint())


def test_tensors_in_memory_and_arrays_agree():
    as_arrays = {name: tensor.numpy() for name, tensor in weights().items() if tensor.dtype is not torch.bfloat16}
    as_tensors = {name: torch.from_numpy(array) for name, array in as_arrays.items()}
    assert content_of_tensors({}, as_arrays) == content_of_tensors({}, as_tensors)


class TestDigests:
    def test_a_file_is_read_once(self, checkpoint, reads, settled):
        first = model_content(folder := checkpoint())
        folder.rename(folder.with_name("moved"))
        assert model_content(folder.with_name("moved")) == first
        assert len(reads) == 1

    def test_one_that_was_written_just_now_is_read_again(self, checkpoint, reads, monkeypatch):
        """A change within the same tick of the file system's clock has the same time."""
        monkeypatch.setattr(content, "SETTLED_S", 3600.0)  # however long the machine takes for what follows
        folder = checkpoint()
        assert model_content(folder) == model_content(folder)
        assert len(reads) == 2

    def test_other_bytes_under_the_old_times_are_other_content(self, checkpoint, settled):
        file = checkpoint() / "model.safetensors"
        before, stat = file_digest(file), file.stat()
        file.write_bytes(file.read_bytes()[::-1])
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert file_digest(file) != before

    def test_the_hubs_cache_names_its_files(self, tmp_path, reads):
        blobs = tmp_path / "models--a--b" / "blobs"
        blobs.mkdir(parents=True)
        digest = hashlib.sha256(b"weights").hexdigest()
        (blobs / digest).write_bytes(b"weights")
        snapshot = tmp_path / "models--a--b" / "snapshots" / "main"
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").symlink_to(f"../../blobs/{digest}")
        assert file_digest(snapshot / "model.safetensors") == digest and reads == []
        plain = shutil.copy(blobs / digest, tmp_path / "model.safetensors")
        assert file_digest(Path(plain)) == digest and len(reads) == 1

    def test_a_process_that_keeps_a_files_lock_for_ever_holds_nobody_up(
        self, checkpoint, reads, settled, tmp_path, monkeypatch
    ):
        """It was stopped, say, while it read."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(content, "LOCK_S", 0.0)
        file = checkpoint() / "model.safetensors"
        digest = file_digest(file)
        [entry] = (tmp_path / "cache" / "layerflow" / "digests").iterdir()
        with entry.open("r+b") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert file_digest(file) == digest
        assert len(reads) == 2

    def test_several_that_ask_at_once_read_once(self, checkpoint, reads, settled):
        file = checkpoint() / "model.safetensors"
        found = []
        readers = [threading.Thread(target=lambda: found.append(file_digest(file))) for _ in range(4)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert len(set(found)) == 1 and len(found) == 4
        assert len(reads) == 1

    @pytest.mark.parametrize("kept", [b"", b"0" * 63, b"zz" * 32, b"0" * 64 + b"x"])
    def test_an_entry_that_is_no_digest_is_written_anew(self, checkpoint, cache, reads, settled, kept):
        file = checkpoint() / "model.safetensors"
        digest = file_digest(file)
        [entry] = cache.iterdir()
        assert entry.read_bytes() == digest.encode()
        entry.write_bytes(kept)
        assert [file_digest(file), file_digest(file)] == [digest, digest]
        assert len(reads) == 2

    def test_without_a_cache_it_is_read_each_time(self, checkpoint, tmp_path, monkeypatch, reads):
        (tmp_path / "taken").write_text("a file where the cache should be")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
        folder = checkpoint()
        assert model_content(folder) == model_content(folder)
        assert len(reads) == 2

    def test_a_user_without_a_home_has_no_cache(self, checkpoint, monkeypatch, reads):
        def homeless():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", homeless)
        folder = checkpoint()
        assert model_content(folder) == model_content(folder)
        assert len(reads) == 2

    def test_one_that_is_written_to_meanwhile_has_none(self, checkpoint, monkeypatch):
        file = checkpoint() / "model.safetensors"
        sha256 = content._sha256

        def beside_a_writer(opened, path, stop):
            digest = sha256(opened, path, stop)
            with file.open("ab") as other:
                other.write(b"more")
            return digest

        monkeypatch.setattr(content, "_sha256", beside_a_writer)
        with pytest.raises(SpecError, match="written to"):
            file_digest(file)

    def test_a_file_whose_reader_fails_is_not_left_out(self, checkpoint, monkeypatch):
        folder = checkpoint(**{f"m{number}": safetensors(weights(seed=number)) for number in range(3)})
        digest = content.file_digest

        def failing(file, stop):
            return digest(file, stop) if file.name != "m1.safetensors" else 1 / 0

        monkeypatch.setattr(content, "file_digest", failing)
        with pytest.raises(ZeroDivisionError):
            weights_content(weight_files(folder))

    def test_it_can_be_given_up(self, checkpoint):
        stop = threading.Event()
        stop.set()
        with pytest.raises(SpecError, match="shutting down"):
            weights_content(weight_files(checkpoint()), stop)

    def test_old_ones_go(self, checkpoint, cache, monkeypatch, settled):
        monkeypatch.setattr(content, "MOST_KEPT", 4)
        files = {f"m{number}": safetensors(weights(seed=number)) for number in range(9)}
        folder = checkpoint(**files)
        model_content(folder)
        assert 0 < len(list(cache.iterdir())) <= 6


def test_which_files_an_engine_loads(checkpoint):
    folder = checkpoint(**{"model-1": b"a", "model-2": b"b", "consolidated": b"c"})
    names = {
        kind: [file.name for file in weight_files(folder, kind)] for kind in ("", "safetensors", "auto", "mistral")
    }
    assert names["auto"] == names["mistral"] == ["consolidated.safetensors"]
    assert names[""] == names["safetensors"] and len(names[""]) == 3
    (folder / "consolidated.safetensors").unlink()
    assert [file.name for file in weight_files(folder, "auto")] == ["model-1.safetensors", "model-2.safetensors"]


def test_strided_and_empty_tensors_work():
    tensor = torch.arange(60.0).reshape(6, 10)
    assert content_of_tensors({}, {"w": tensor.T}) == content_of_tensors({}, {"w": tensor.T.contiguous()})
    assert content_of_tensors({}, {"w": torch.zeros(0, 4)}) != content_of_tensors({}, {"w": torch.zeros(0, 5)})


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"config\.json"):
        model_content(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SpecError, match=r"no \.safetensors file"):
        model_content(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(SpecError, match="list"):
        model_content(tmp_path)
    with pytest.raises(SpecError, match="plain JSON"):
        content_of_tensors({"dtype": torch.float16}, {})
