"""What vLLM's layers have been seen to do with their hooks, and what one forward pass has.

Nothing here follows from a class or a model's name: a layer waits for its loaded blocks if it was seen to ask for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from layerflow.connectors.vllm.layout import Layout, model_layer
from layerflow.connectors.vllm.plan import Asking


class ForwardPass(NamedTuple):
    """What vLLM says of the pass that it is about to run.

    :ivar computes: it has tokens.
    :ivar replayed: it may be one whole CUDA graph, in which no hook is called.
    """

    computes: bool
    replayed: bool


def forward_pass(context: Any, told: Mapping[str, Any]) -> ForwardPass:
    """Read the arguments of ``start_load_kv``.

    vLLM's first model runner names the graph in its forward context. The second one has no such context around a whole
    graph: it hands over the attention's metadata by name instead, and only then.
    """
    mode = getattr(context, "cudagraph_runtime_mode", None)
    replayed = getattr(mode, "name", "") == "FULL" or told.get("attn_metadata") is not None
    return ForwardPass(getattr(context, "attn_metadata", None) is not None or bool(told.get("request_ids")), replayed)


class LayerHooks:
    """Which layers call their hooks, ever and in the pass under way. The engine's threads only, one at a time.

    Layers are layerflow's numbers. Those of recurrent state have no hooks: their blocks are in place before the pass.
    Those of a draft model are called as often as vLLM guesses ahead, or not at all. A cache of it that has no hook (an
    indexer's) is written, and was read before, where another cache of the same layer of the draft model calls its own.

    :ivar drafts: layers of a draft model.
    :ivar asked: in this pass: layers that asked for their loaded blocks.
    :ivar saved: in this pass: layers that said that their new keys and values are written.
    :ivar unseen: some layer has not been seen to ask, nor to be read beside one that asks.
    :ivar ever_drafted: in some pass each of a draft model's layers was seen to be written.
    """

    def __init__(self, layout: Layout) -> None:
        spec = layout.spec
        drafts = {group for group, name in enumerate(spec.shard.drafts) if name}
        states = {group for group, spec_ in enumerate(spec.groups) if spec_.rules.exact}
        self._groups: list[list[int]] = [[] for _ in spec.groups]
        self._model_layers = {number: model_layer(name) for name, number in layout.numbers.items()}
        group_of = [group for group, _ in spec.layer_places()]
        for number in self._model_layers:
            if group_of[number] not in states:
                self._groups[group_of[number]].append(number)
        self.drafts = frozenset(number for number in self._model_layers if group_of[number] in drafts)
        self._watched = frozenset(number for layers in self._groups for number in layers) - self.drafts
        self._ever_asked: set[int] = set()
        self._ever_saved: set[int] = set()
        self._ever_guessed: set[int] = set()
        self._silent = False
        self._written: set[int] = set()
        self.asked: set[int] = set()
        self.saved: set[int] = set()
        self.unseen = bool(self._watched)
        self.ever_drafted = False

    def begin(self) -> None:
        """A pass is about to run."""
        self.asked, self.saved, self._written = set(), set(), set()

    def ask(self, layer: int) -> bool:
        """The layer asks for its loaded blocks. False if it was computed in this pass before."""
        self.asked.add(layer)
        return layer not in self.saved or layer in self.drafts

    def write(self, layer: int) -> bool:
        """Note that a layer's new keys and values are written. False if that was said in this pass before."""
        return self._once(layer, self._written)

    def save(self, layer: int) -> bool:
        """Note that a layer's attention is over. False if that was said in this pass before."""
        return self._once(layer, self.saved)

    @property
    def skipped(self) -> frozenset[int]:
        """Layers that are usually computed with hooks and were not in this pass, in which others were."""
        saved = self.saved | self._written
        return frozenset(self._ever_saved - saved) if saved & self._watched else frozenset()

    @property
    def drafted(self) -> bool:
        """Has the draft model written all of its layers in this pass?"""
        guessed = self.saved & self.drafts
        written = {self._model_layers[layer] for layer in guessed}
        return self._ever_guessed <= guessed and all(self._model_layers[layer] in written for layer in self.drafts)

    def end(self) -> bool:
        """The pass has run: learn from it. True if it is seen for the first time what some layers do."""
        self._ever_saved |= (self.saved | self._written) & self._watched
        guessed = self.saved & self.drafts
        learns = self.unseen or not guessed <= self._ever_guessed
        known = self.asking if learns else ()
        self._ever_guessed |= guessed
        self.ever_drafted = self.ever_drafted or self.drafted
        if not learns:
            return False
        asked = self.asked & self._watched
        self._ever_asked |= asked
        self._silent |= bool(asked)  # hooks were called in this pass, so those who did not call theirs do not
        learnt = self.asking
        self.unseen = Asking.UNSEEN in learnt
        return learnt != known

    @property
    def asking(self) -> tuple[Asking, ...]:
        """Per layerflow group, when its layers ask for their loaded blocks."""
        return tuple(map(self._asking_of, self._groups))

    def _asking_of(self, layers: list[int]) -> Asking:
        if self.drafts.issuperset(layers):  # or none: states are in place before the pass anyway
            guessing = {self._model_layers[layer] for layer in self._ever_guessed}
            read_before = layers and all(self._model_layers[layer] in guessing for layer in layers)
            return Asking.BEFORE if read_before and self._ever_guessed.isdisjoint(layers) else Asking.BY_LAYER
        if self._ever_asked.issuperset(layers):
            return Asking.BY_LAYER
        asking = {self._model_layers[layer] for layer in self._ever_asked}
        beside = self._silent and all(self._model_layers[layer] in asking for layer in layers)
        return Asking.BEFORE if beside and self._ever_asked.isdisjoint(layers) else Asking.UNSEEN

    def _once(self, layer: int, said: set[int]) -> bool:
        again = layer in said and layer not in self.drafts
        said.add(layer)
        return not again
