"""Which of vLLM's caches are cut between KV heads, and what their workers tell of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layerflow.boxes import HeadAxis
from layerflow.connectors.vllm import layout as heads
from layerflow.connectors.vllm.layout import group_axis, wanted_layout

BLOCKS = 5


class FullAttentionSpec(SimpleNamespace):
    """vLLM's, by name."""


class MLAAttentionSpec(SimpleNamespace):
    """vLLM's, by name."""


class Layers:
    """A model's facts where its layers differ."""

    def __init__(self, *heads: int) -> None:
        self._heads = heads

    def __getitem__(self, layer: int) -> SimpleNamespace:
        return SimpleNamespace(total_num_kv_heads=self._heads[layer])


def config(heads: int = 8, size: int = 2, **model: Any) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=size),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads, use_mla=False, **model),
        speculative_config=None,
        device_config=SimpleNamespace(device_type="cuda"),
    )


def cache(order: str = "BHNC", heads: int = 4, blocks: int = BLOCKS) -> torch.Tensor:
    """vLLM's view (blocks, heads, tokens, content), in memory in `order`."""
    sizes = {"B": blocks, "H": heads, "N": 16, "C": 32}
    raw = torch.empty([sizes[axis] for axis in order], dtype=torch.bfloat16)
    return raw.permute([order.index(axis) for axis in "BHNC"])


def layers(*tensors: torch.Tensor, heads: int = 4) -> dict[str, Any]:
    spec = FullAttentionSpec(num_kv_heads=heads)
    return {f"model.layers.{n}.attn": (spec, [tensor]) for n, tensor in enumerate(tensors)}


def test_heads_outside_of_tokens_are_cut() -> None:
    assert group_axis(config(), "full", layers(cache(), cache()), BLOCKS) == HeadAxis(8)
    assert group_axis(config(2, 8), "full", layers(cache(heads=1), heads=1), BLOCKS) == HeadAxis(2)


def test_latent_planes_are_one_head() -> None:
    latent = {"layers.0": (MLAAttentionSpec(num_kv_heads=1), [torch.empty(BLOCKS, 1, 16, 576)])}
    assert group_axis(config(128, 8), "mla", latent, BLOCKS) == HeadAxis(1)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (cache("BNHC"), "packed NHC: tokens outside of heads"),
        (cache("HBNC").transpose(0, 1), "only its attention backend knows"),
        (cache(heads=8), "only its attention backend knows"),
        (cache(blocks=2 * BLOCKS), "only its attention backend knows"),
        (torch.empty(BLOCKS, 16 * 4 * 32), "only its attention backend knows"),
    ],
)
def test_other_layouts_are_refused(tensor: torch.Tensor, says: str) -> None:
    axis = group_axis(config(), "full", layers(tensor), BLOCKS)
    assert axis.heads == 2 and says in axis.refusal


def test_layers_with_heads_of_their_own_are_not_taken_for_replicas() -> None:
    """Each of 8 ranks has one head of both layers: the same one twice in the first, 8 heads in the second."""
    model = config(4, 8, model_arch_config=Layers(4, 8))
    one = cache(heads=1)
    axis = group_axis(model, "full", layers(one, one, heads=1), BLOCKS)
    assert axis == HeadAxis(8, "its layers have different numbers of KV heads")


def test_recurrent_state_binds_to_the_tensor_size() -> None:
    assert "recurrent state" in group_axis(config(), "state", layers(cache()), BLOCKS).refusal


def test_the_layout_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "_LAYOUTS", "layerflow")  # a vLLM that names its layouts
    assert wanted_layout(config()) == "LBHNC"
    ascend = config()
    ascend.device_config.device_type = "npu"
    assert wanted_layout(ascend) == "HND", "as its other connectors say, or a MultiConnector refuses them"
    latent, unknown = config(), config()
    latent.model_config.use_mla, unknown.model_config = True, None
    assert wanted_layout(latent) is None and wanted_layout(unknown) is None
    monkeypatch.setattr(heads, "_LAYOUTS", "no_such_module")
    assert wanted_layout(config()) is None
