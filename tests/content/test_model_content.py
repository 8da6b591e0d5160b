import json
import os

import numpy as np
import pytest
import torch

from layerflow.content import SAMPLE_BYTES, SAMPLES, content_of_tensors, model_content
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
        renamed=safetensors(dict(reversed(weights().items())), metadata={"format": "pt"}),
    )
    os.utime(two / "renamed.safetensors", (1, 1))
    assert model_content(one) == model_content(two)
    assert len(model_content(one)) == 32


def test_how_a_checkpoint_is_sharded_does_not_matter(checkpoint):
    tensors = weights()
    first = {"a.weight": tensors.pop("a.weight")}
    sharded = checkpoint("sharded", m1=safetensors(tensors), m2=safetensors(first))
    assert model_content(sharded) == model_content(checkpoint("whole"))


def test_files_in_memory_and_on_disk_agree(checkpoint):
    assert content_of_tensors(CONFIG, weights()) == model_content(checkpoint())
    as_arrays = {name: tensor.numpy() for name, tensor in weights().items() if tensor.dtype is not torch.bfloat16}
    as_tensors = {name: torch.from_numpy(array) for name, array in as_arrays.items()}
    assert content_of_tensors({}, as_arrays) == content_of_tensors({}, as_tensors)


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


def test_large_tensors_are_sampled_from_their_first_byte_to_their_last():
    size = 100_000
    assert size > SAMPLES * SAMPLE_BYTES
    base = np.zeros(size, dtype=np.uint8)
    digest = content_of_tensors({}, {"w": base})
    for place in (0, size - 1, 7 * (size - SAMPLE_BYTES) // (SAMPLES - 1)):
        changed = base.copy()
        changed[place] = 1
        assert content_of_tensors({}, {"w": changed}) != digest
    assert content_of_tensors({}, {"w": base + 1}) != digest


def test_strided_and_empty_tensors_work():
    tensor = torch.arange(60.0).reshape(6, 10)
    assert content_of_tensors({}, {"w": tensor.T}) == content_of_tensors({}, {"w": tensor.T.contiguous()})
    assert content_of_tensors({}, {"w": torch.zeros(0, 4)}) != content_of_tensors({}, {"w": torch.zeros(0, 5)})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "cut off"),
        (b"\x00" * 4, "cut off"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "cut off"),
        ((2).to_bytes(8, "little") + b"[]", "unreadable"),
        ((3).to_bytes(8, "little") + b"{x}", "unreadable"),
        (safetensors(weights())[:-1], "outside the file"),
    ],
)
def test_a_broken_file_is_named(checkpoint, raw, message):
    with pytest.raises(SpecError, match=message):
        model_content(checkpoint("broken", model=raw))


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
