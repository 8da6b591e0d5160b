"""What prompts are called now: keys change with the weights, and vLLM may still hold blocks of the old ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from layerflow.connectors.common.weights import Weights
from layerflow.connectors.vllm.identity.identity import RequestKeys
from layerflow.content import renewed_content
from layerflow.keys import Chain
from layerflow.spec import ModelSpec


class PromptKeys:
    """The keys of one engine's prompts.

    :param requests: hashes them.
    :param model_content: the connector's option of that name.

    :ivar spec: of one worker, with the present weights' content; None = no worker has told its layout yet.
    """

    def __init__(self, requests: RequestKeys, model_content: str) -> None:
        self.spec: ModelSpec | None = None
        self._requests = requests
        self._weights = Weights(model_content)
        self._old_in_use = False

    def chain(self, request: Any) -> Chain:
        """A request's digests.

        :raises LayerflowError: as of :meth:`RequestKeys.chain`.
        """
        assert self.spec is not None
        return self._requests.chain(self.spec, request)

    def replaced(self, in_use: bool) -> None:
        """The weights are being replaced under the same name.

        :param in_use: vLLM cannot forget blocks that are in use: it goes on to find them in its own cache.
        """
        assert self.spec is not None
        self._weights.replaced(self.spec.content)
        self.spec = msgspec.structs.replace(self.spec, content=renewed_content(self.spec.content))
        self._old_in_use = in_use
        if not in_use:
            self._requests.adapters.forget_cached()

    def forget_cached(self) -> None:
        """VLLM's own prefix cache was emptied, none of its blocks was in use, and no request has started since."""
        self._old_in_use = False
        self._requests.adapters.forget_cached()

    def renamed(self) -> bool:
        """Have new weights a name of their own, that was not known before? All keys are others then."""
        assert self.spec is not None
        if not self._weights.unnamed or not (name := self._weights.name()):
            return False
        self.spec = msgspec.structs.replace(self.spec, content=renewed_content(self.spec.content, name))
        return True

    def starts(self, request: Any) -> None:
        """VLLM asks about a request that it may begin in this step, the first time or anew."""
        self._requests.adapters.starts(request.lora_request)

    def are_mixed(self, request: Any) -> bool:
        """May what the request takes from vLLM's own cache be of earlier weights, or of an earlier adapter?"""
        return self._old_in_use or self._requests.adapters.mixed(request.lora_request)

    def read_adapter(self, request: Any) -> None:
        """vLLM reads the request's adapter now, if not before.

        :raises LayerflowError: its content cannot be told.
        """
        self._requests.adapters.content(request.lora_request)

    def close(self) -> None:
        """Give up what is being read."""
        self._requests.adapters.close()

    def lost(self, request: Any) -> bool:
        """Is it not known any more what vLLM computes with under the id of the request's adapter?"""
        return self._requests.adapters.lost(request.lora_request)


# Sees when vLLM's own prefix cache has forgotten everything.


class OwnCache:
    """VLLM's own prefix cache, as far as its block pool shows it.

    A reset that succeeds gives the pool a new table, and is possible only while no request has a block. So what the
    table holds behind it was computed by steps that were planned behind it.

    :ivar step: the number of the step that is planned, among those that compute.
    """

    def __init__(self) -> None:
        self._table: Callable[[], object] = lambda: None
        self._known: object = None  # kept, so that no other table gets its address
        self._empty_at = 0
        self.step = 1

    def meet(self, table: Callable[[], object]) -> None:
        """The scheduler has its blocks.

        :param table: of the blocks that it can find again; None where this vLLM has none.
        """
        self._table = table

    @property
    def is_seen(self) -> bool:
        """Does this vLLM show what its cache holds?"""
        return self._table() is not None

    def look(self) -> bool:
        """Before the first request of a step starts, or when it is planned: was the cache emptied since the one before?

        Whoever asks later in a step than its first request takes what that one puts into the cache for forgotten.
        """
        table = self._table()
        if table is self._known:
            return False
        self._known, self._empty_at = table, self.step
        return True

    def was_empty_at(self, step: int) -> bool:
        """Is all that it holds of this step, or of later ones?"""
        return self._empty_at == step

    def planned(self, *, computes: bool) -> None:
        """The step is planned."""
        self.step += computes
