"""One scheduler process of SGLang's: its cache, what its keys depend on, and its agent once the weights are known."""

from __future__ import annotations

import functools
import os
import socket
import threading
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import sglang
import structlog
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.runtime_context import get_lora, get_parallel, get_spec

from layerflow.agent import Agent
from layerflow.connectors.common.loaded import LoadedWeights
from layerflow.connectors.common.weights import START_WAIT_S, Checkpoint, Weights, WeightsReading
from layerflow.connectors.sglang.batch_saves import DRAIN_S, BatchSaves
from layerflow.connectors.sglang.drafts import Draft, check_drafting
from layerflow.connectors.sglang.identity import (
    arithmetic_of,
    checkpoint_of,
    draft_checkpoint_of,
    drafting_of,
    loaded_modules,
)
from layerflow.connectors.sglang.layout import KV, SWA, layout_of
from layerflow.connectors.sglang.options import SglangOptions
from layerflow.connectors.sglang.versions import check_version
from layerflow.errors import Unsupported
from layerflow.spec import Shard

ATTACH_WAIT_S = 2.0
"""How long a start waits for a server. Later, the engine attaches when one comes."""

REPLACING = "SGLang replaces the weights"

log = structlog.get_logger("layerflow.sglang")


class EngineCache:
    """The cache of one scheduler process.

    :param cfg: SGLang's ServerArgs.
    :param kvcache: its KV pool. :param states: its request pool, where that holds recurrent states; else None.
    :param page: tokens of a page. :param window: tokens that a sliding layer keeps; 0 = there are none.
    :param drafts: draft models whose caches belong to it.
    :param role: told apart from other agents of the same process; "" = the only one.
    :raises ConfigError: the weights have no name, see :func:`.identity.checkpoint_of`.
    :raises Unsupported: an SGLang, a parallelism, a model or a pool that is not known here.

    :ivar layout: of the cache.
    :ivar rank: this process's place among those that share each page.
    """

    def __init__(
        self,
        cfg: Any,
        options: SglangOptions,
        *,
        kvcache: Any,
        states: Any,
        page: int,
        window: int = 0,
        drafts: Sequence[Draft] = (),
        role: str = "",
    ) -> None:
        check_version(sglang.__version__, allow_unknown=options.allow_unknown)
        parallel = get_parallel()
        config = ModelConfig.from_server_args(cfg)
        _refuse(config, parallel)
        heads = {KV: config.get_total_num_kv_heads(), SWA: config.get_swa_num_kv_heads(1)}
        self.rank = Shard(parallel.attn_tp_rank, parallel.attn_tp_size)
        cached = [(draft.pool, draft.heads) for draft in drafts]
        self.layout = layout_of(kvcache, states, page, window, heads, self.rank, cached)
        if drafts:
            check_drafting(get_spec())
        self._drafted = frozenset(id(module) for draft in drafts for module in draft.modules)
        self.engine = _engine_id(cfg, parallel, role)
        self.name = (options.name or _name(cfg, parallel)) + (f"-{role}" if role else "")
        self._options = options
        modules = loaded_modules()
        dtypes = [str(tensor.dtype) for planes in self.layout.tensors.values() for tensor in planes.values()]
        self._arithmetic = arithmetic_of(
            cfg,
            sglang.__version__,
            modules,
            dtypes,
            get_lora().lora_paths or (),
            drafting=drafting_of(cfg, get_spec()) if drafts else "",
        )
        self._weights = LoadedWeights(modules)
        self._named = Weights(options.model_content)
        self._replaced = 0
        self._stale = ""
        weights = [checkpoint_of(cfg, options.model_content)]
        if drafts and not options.model_content:  # which names them all
            weights.append(draft_checkpoint_of(cfg, get_spec()))
        self._reading = WeightsReading(functools.partial(_content, weights))
        self._agent: Agent | None = None
        # SGLang compiles its page hash at the first call, which would take that request 2 to 18 s.
        get_hash_str(array("q", range(page)), None, page_size=page)
        if not self._reading.wait(START_WAIT_S):
            log.info("weights_being_read", effect="nothing is shared until their digest is known")

    def agent(self) -> Agent | None:
        """The agent; None while the weights are being read."""
        if self._agent is None and self._reading.wait(0):
            spec = msgspec.structs.replace(
                self.layout.spec, name=self.name, content=self._reading.found, quantization=self._arithmetic
            )
            self._agent = Agent(
                self._options.endpoint,
                spec,
                self.layout.tensors,
                self.engine,
                name=self.name,
                wait_s=ATTACH_WAIT_S,
                lookup_timeout_s=self._options.lookup_timeout_s,
            )
        return self._agent

    def number_of(self, layer: Any) -> int | None:
        """layerflow's number of a layer that has just been computed, of SGLang's; None = it has no cache here, or is a
        draft model's: SGLang may run that before the model too, and what it has written is known at the batch's end.

        :param layer: the module itself: models count their layers alike.
        """
        return None if id(layer) in self._drafted else self.layout.layers.get(layer.layer_id)

    def are_replaced(self) -> bool:
        """Are the weights others than those that the keys name? Then nothing is to be loaded or saved until
        :meth:`rename`: SGLang may hold pages of both. Nor is it while they are away: they may come back as others.
        """
        if not self._stale and (change := self._weights.change()):
            self._expire(change)
        return self.weights_are_away or bool(self._stale)

    @property
    def weights_are_away(self) -> bool:
        """Has SGLang released the weights' memory?"""
        return self._weights.are_away

    def weights_go(self) -> None:
        """SGLang is about to release the weights' memory: it is not read until :meth:`weights_return`."""
        self._weights.let_go()

    def weights_return(self) -> None:
        """It is there again. Where it holds what it did, all is as before; else the weights are replaced."""
        self._weights.take_up()

    def about_to_be_replaced(self) -> None:
        """SGLang is about to write to the weights, perhaps while a batch computes: what is being saved may come of both
        old and new ones. None of that is published, and nothing is shared until :meth:`rename`.
        """
        if self._agent is None:
            return
        self._agent.revoke(REPLACING)
        if not self._stale:
            self._expire(REPLACING)

    def _expire(self, seen: str) -> None:
        self._stale = seen
        log.warning("weights_changed", seen=seen, effect="nothing is shared until the cache is flushed")

    def rename(self) -> None:
        """SGLang's cache is empty: if the weights are others now, so are the keys from here on. Weights that are away
        have no name: should others come back, the next flush names them.
        """
        if self._agent is None or self.weights_are_away or not self.are_replaced():
            return
        self._named.replaced(self._agent.spec.content)
        name = self._named.name() if self._named.unnamed else ""
        self._replaced += 1
        if not name and self.rank.workers > 1:
            name = f"{self.engine}/{self._replaced}"  # the same on every rank, and of no other engine
        self._agent.reset(name)
        self._weights.accept()
        self._stale = ""
        log.info("weights_renamed", content=self._agent.spec.content)

    def event(self, stream: Any, *, and_current: bool = False) -> Any:
        """An event behind what `stream` has been given; None on the cpu.

        :param and_current: behind what the calling thread has enqueued, too.
        """
        agent = self._agent
        assert agent is not None
        if agent.device.kind == "cpu" or stream is None:
            return agent.record()
        device = torch.get_device_module(agent.memory.device)
        if and_current:
            both = device.Stream()
            both.wait_stream(stream)
            both.wait_stream(device.current_stream())
            stream = both
        with device.stream(stream):
            return agent.record()

    def batch_saves(
        self, stream: Any, *, by_layer: bool, ask_late: bool = False, drain_s: float = DRAIN_S
    ) -> BatchSaves:
        """The saves of this process's batches; there is an agent.

        :param stream: that forward passes run on; None = the scheduler's own.
        :param by_layer: see :class:`BatchSaves`. :param drain_s: likewise.
        :param ask_late: on a device, what a batch saves is asked for behind its last layer; see there.
        """
        agent = self._agent
        assert agent is not None
        return BatchSaves(
            agent,
            self.layout,
            written=agent.record,
            passed=lambda: self.event(stream, and_current=True),
            by_layer=by_layer,
            computes_at_once=not ask_late or agent.device.kind == "cpu",
            drain_s=drain_s,
        )

    def close(self) -> None:
        """Cut off what is under way, and hang up."""
        self._reading.close()
        self._weights.close()
        if self._agent is not None:
            self._agent.close()


def _content(weights: Sequence[Checkpoint], stop: threading.Event) -> str:
    """Digest of all of these."""
    return "+".join(each.content(stop) for each in weights)


def _refuse(config: ModelConfig, parallel: Any) -> None:
    """:raises Unsupported: what would be stored under keys that do not tell it apart, or not be stored whole."""
    for name, size in (
        ("--pp-size", parallel.pp_size),
        ("--attn-cp-size", parallel.attn_cp_size),
        ("--dcp-size", getattr(parallel, "attn_dcp_size", 1)),
    ):
        if size > 1:
            raise Unsupported(f"{name} {size}: layerflow does not support it in SGLang yet; set it to 1")
    if config.is_multimodal:  # with --language-only too: an encoder elsewhere sends it what images are made into
        raise Unsupported(
            "a multimodal model: it has not been shown that SGLang's page hashes tell all images apart for ever; serve "
            "text alone (--language-model-only), or run without layerflow"
        )
    if not config.is_generation:
        raise Unsupported("an embedding or reward model: layerflow knows generating models only")


def _engine_id(cfg: Any, parallel: Any, role: str) -> str:
    """Shared by all ranks of one scheduler group, and by no other engine.

    Ranks on one machine have one parent, which starts anew with another number.
    """
    where = cfg.dist_init_addr if cfg.nnodes > 1 else f"{socket.gethostname()}:{cfg.port}:{os.getppid()}"
    return f"sglang-{where}-dp{parallel.attn_dp_rank}{role}"


def _name(cfg: Any, parallel: Any) -> str:
    model = cfg.served_model_name or os.path.basename(cfg.model_path.rstrip("/"))
    rank = f"-dp{parallel.attn_dp_rank}" if parallel.attn_dp_size > 1 else ""
    return f"{model}@{socket.gethostname()}:{cfg.port}{rank}"
