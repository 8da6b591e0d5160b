"""SGLang's transfer backend ``layerflow``: its manager, sender, receiver and bootstrap server.

SGLang's control plane is used as it is (bootstrap over HTTP, one ZMQ socket for each rank). Over it, decode tells
prefill where a request's first token goes, and prefill sends that, or why it has failed. Keys and values go through
layerflow: prefill never writes decode's pages, and never waits for decode.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import time
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_hash_str, get_storage_hash_str
from sglang.srt.utils.network import NetworkAddress

from layerflow.agent.lookups import Lookups
from layerflow.connectors.common.guard import attempt, tell
from layerflow.connectors.sglang.batch_saves import ALLOCATORS, BatchSaves, frees_are_seen, untold_layers
from layerflow.connectors.sglang.drafts import drafts_of
from layerflow.connectors.sglang.engine import EngineCache
from layerflow.connectors.sglang.identity import LoadedAdapters
from layerflow.connectors.sglang.layout import KV, MAMBA
from layerflow.connectors.sglang.options import SglangOptions, options_of_environment
from layerflow.connectors.sglang.pages import fetch_slots, page_hashes, whole_pages
from layerflow.connectors.sglang.pd.attempts import asked_attempt, next_attempt
from layerflow.connectors.sglang.pd.decoding import DecodeSide, Following, PromptProgress
from layerflow.connectors.sglang.pd.first_tokens import FirstTokens
from layerflow.connectors.sglang.pd.prefill_watch import PrefillWatch
from layerflow.connectors.sglang.pd.prefilling import PrefillSide, PromptPart
from layerflow.errors import Unsupported
from layerflow.expiring import ExpiringSet
from layerflow.system.threads import OwnedThread

ROOM, ROW, FAILED, ABORT = b"LAYERFLOW_ROOM", b"LAYERFLOW_ROW", b"LAYERFLOW_FAILED", b"ABORT"
"""Tags of frames between ranks: decode is there; the first token's row; prefill has failed; decode has given up."""

GONE_S, MOST_GONE = 600.0, 1024
"""A prefill engine that has ended is not waited for, as one that starts is, for so long; so many of them."""

OPEN_S = 0.5
"""A server that has not said after so long whether it keeps a prompt for its reader is away, and the request fails.
Nobody waits for that answer: prefill computes meanwhile."""

REPLACED = "the weights were replaced, and SGLang's cache was not flushed since"
RELEASED = "SGLang has released the weights' memory (/release_memory_occupation); resume it before you send requests"

UNTOLD = ("input_embeds", "positional_embed_overrides", "multi_item_delimiter_indices")
"""What a request may compute its prompt from besides tokens, by SGLang's name: page hashes do not hold it. SGLang keeps
such requests out of its radix cache, or demands that there is none, but hands them over."""

log = structlog.get_logger("layerflow.sglang")


class LayerflowManager(CommonKVManager):  # type: ignore[misc]
    """Of one rank.

    :ivar prefill: its end of hand-offs. :ivar decode: likewise. One is None, both are before :meth:`attach`.
    """

    def __init__(self, args: Any, mode: DisaggregationMode, server_args: Any, is_mla_backend: bool = False) -> None:
        super().__init__(args, mode, server_args, is_mla_backend)
        self.prefill: PrefillSide | None = None
        self.decode: DecodeSide | None = None
        self._pages: EngineCache | None = None
        self._request_pool: Any = None
        self._hashing: PromptHashing | None = None
        self._first = FirstTokens()
        self._control = OwnedThread("layerflow-sglang-pd", self._hear, restart_s=0.1).start()
        self._attempts: dict[int, int] = {}  #: by room: the attempt that is under way here, where it is not the first
        self._gone = ExpiringSet[str](MOST_GONE)  #: bootstrap addresses of prefill engines that have ended
        self._watch: PrefillWatch | None = None
        if mode == DisaggregationMode.DECODE:
            self._start_heartbeat_checker_thread()
            self._watch = PrefillWatch(self._prefill_ended)

    def attach(self, queue: Any) -> None:
        """The engine's pools are there.

        :param queue: SGLang's bootstrap queue (prefill) or preallocation queue (decode), which has made this manager.
        :raises Unsupported: a model or a parallelism that is not known here.
        """
        scheduler = queue.scheduler
        algorithm = scheduler.spec_algorithm
        drafts = drafts_of(_draft_pools(scheduler), algorithm.name)
        if not (drafts or algorithm.is_none()):
            raise Unsupported(
                f"--speculative-algorithm {algorithm.name}: layerflow's transfer backend does not know what it needs "
                "besides keys and values; choose EAGLE or EAGLE3, or run without it"
            )
        kinds = [kind.name for kind in getattr(self.kv_args, "state_types", None) or ()]
        if set(kinds) - {"MAMBA"}:
            raise Unsupported(f"layerflow's transfer backend hands over attention and recurrent states, not {kinds}")
        runner, options = scheduler.tp_worker.model_runner, options_of_environment()
        self._request_pool = scheduler.req_to_token_pool
        states = self._request_pool if getattr(self._request_pool, "mamba_map", None) else None
        self._pages = cache = EngineCache(
            self.server_args,
            options,
            kvcache=queue.token_to_kv_pool,
            states=states,
            page=self.kv_args.page_size,
            drafts=drafts,
            role=self.disaggregation_mode.value,
        )
        self._hashing = PromptHashing(
            self.kv_args.page_size,
            pairs=bool(drafts) and algorithm.is_eagle() and states is None,
            drafts=bool(drafts),
            adapters=LoadedAdapters(runner.lora_manager),
        )
        agent = cache.agent()
        if agent is None:
            raise Unsupported("the weights' digest is not known in time; set model_content in LAYERFLOW_SGLANG_OPTIONS")
        stream = getattr(runner, "forward_stream", None)
        patience_s = max(OPEN_S, options.lookup_timeout_s)
        lookups = Lookups(options.endpoint, cache.engine, agent.spec, name=cache.name, timeout_s=patience_s)
        lookups.wait_connected(1.0)
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            _check_allocator(scheduler.token_to_kv_pool_allocator)
            saves = prefill_saves(cache, stream, self.server_args, options)
            self.prefill = PrefillSide(agent, lookups, cache.layout, saves, leads=cache.rank.tp_rank == 0)
        else:
            self.decode = DecodeSide(
                agent,
                lookups,
                cache.layout,
                after=lambda: cache.event(stream, and_current=True),
                deadline_s=options.handoff_deadline_s,
            )
        log.info("transfer_backend_ready", engine=cache.name, attached=agent.attached)

    def emptied(self) -> None:
        """SGLang's cache is empty: if the weights are others now, so are the keys."""
        if self._pages is not None:
            self._pages.rename()

    def weights_change(self) -> None:
        """SGLang is about to write to the weights: nothing that may come of both old and new ones is handed over."""
        if (cache := self._pages) is not None:
            attempt(cache.about_to_be_replaced, "weights_change")

    def memory_goes(self, *, weights: bool) -> None:
        """SGLang is about to let go of memory: nothing reads or writes its pools any more when this returns.

        :param weights: that of the weights goes too.
        """
        if (cache := self._pages) is None:
            return
        if weights:
            cache.weights_go()
        if (agent := cache.agent()) is not None:
            attempt(lambda: agent.revoke("SGLang lets go of its cache's memory"), "memory_goes")

    def weights_return(self) -> None:
        """The weights' memory is there again, and may hold anything."""
        if (cache := self._pages) is not None:
            attempt(cache.weights_return, "weights_return")

    def hashes_of(self, request: Any) -> list[str]:
        """Of a request's prompt, see :meth:`PromptHashing.of`."""
        assert self._hashing is not None
        return self._hashing.of(request)

    def can_hash(self, request: Any) -> bool:
        """May :meth:`hashes_of` be asked, or would the scheduler stand for it? See :meth:`PromptHashing.is_ready`."""
        assert self._hashing is not None
        return self._hashing.is_ready(request)

    @property
    def obstacle(self) -> str:
        """Why nothing is handed over now; "" = it is."""
        if (cache := self._pages) is None or not cache.are_replaced():
            return ""
        return RELEASED if cache.weights_are_away else REPLACED

    def begin_attempt(self, room: int, attempt: int) -> None:
        """A room is used from now on: for the first time, or once more; see :func:`.prefilling.handoff_name`."""
        if attempt:
            self._attempts[room] = attempt

    def attempt(self, room: int) -> int:
        """How often a room that is in use was used before."""
        return self._attempts.get(room, 0)

    # -- prefill: SGLang's scheduler thread ----------------------------------------------------------

    def begin_batch(self, batch: Any, loading: Collection[str] = ()) -> None:
        """A batch is about to run: what it computes of prompts that decode engines wait for is saved as it comes.

        :param loading: ids of its requests that a cache linker loads some of.
        """
        assert self.prefill is not None
        parts, obstacle = [], self.obstacle
        for request in batch.reqs:
            sender = getattr(request, "disagg_kv_sender", None)
            if not isinstance(sender, LayerflowSender):
                continue
            if obstacle:
                self.give_up(sender.bootstrap_room, obstacle)
                continue
            try:
                sender.hashes = sender.hashes or self.hashes_of(request)
                parts.append(self._part(request, sender, loads=request.rid in loading))
            except Exception as error:  # noqa: BLE001 - told, and decode is; other requests of the batch go on
                tell("run_batch", request.rid, error)
                self.give_up(sender.bootstrap_room, f"{type(error).__name__}: {error}")
        self.prefill.begin(parts)

    def end_batch(self, batch: Any) -> None:
        """It has run, or has been given to the device. SGLang has marked the requests whose loads have failed, the same
        ones on every rank.
        """
        assert self.prefill is not None
        failed = {
            request.bootstrap_room: f"its cached prefix could not be loaded: {request.discard_output_reason.message}"
            for request in batch.reqs
            if isinstance(getattr(request, "disagg_kv_sender", None), LayerflowSender)
            and request.discard_output_reason is not None
        }
        self.prefill.end_batch(failed)
        for room, reason in failed.items():
            self.tell_failure(room, reason)

    def layer_done(self, layer: Any) -> None:
        """A layer's new keys and values, or its state, are written.

        :param layer: SGLang's module, of the model or of a draft model.
        """
        assert self.prefill is not None and self._pages is not None
        if self.prefill.saves.running:
            self.prefill.saves.layer_done(self._pages.number_of(layer))

    def pages_freed(self, allocator: Any, pages: Sequence[Any]) -> None:
        """SGLang gives pages to other requests.

        :param pages: tensors of page numbers, on the device.
        """
        assert self.prefill is not None
        self.prefill.let_go(pages)

    def _part(self, request: Any, sender: LayerflowSender, *, loads: bool) -> PromptPart:
        page, total = self.kv_args.page_size, len(request.origin_input_ids)
        end = min(int(request.extend_end), total)
        pages = -(-end // page) if end == total else end // page
        (taken,) = fetch_slots(self._request_pool, [(request.kv.req_pool_idx, 0, pages)], page)()
        slots = {KV: taken}
        if end == total and request.kv.holds_mamba:
            slots[MAMBA] = _state_slot(self._request_pool, request.kv.req_pool_idx)
        return PromptPart(
            sender.bootstrap_room, sender.hashes, pages, slots, loads, self.attempt(sender.bootstrap_room)
        )

    def add_transfer_request(
        self, room: int, kv_indices: Any, index_slice: Any, is_last_chunk: bool, aux_index: Any = None, **_: Any
    ) -> None:
        """SGLang has computed a chunk of a prompt; with the last one there is a first token."""
        if not is_last_chunk or self.prefill is None:
            return
        self.prefill.end(room)
        arguments = zip(self.kv_args.aux_data_ptrs, self.kv_args.aux_item_lens, strict=True)
        rows = [ctypes.string_at(start + aux_index * length, length) for start, length in arguments]
        self._first.put(room, rows, self.attempt(room))
        self.update_status(room, KVPoll.Transferring)
        self._send_rows(room, self.attempt(room))

    def give_up(self, room: int, reason: str) -> None:
        """Prefill does not compute a prompt any further; decode hears why."""
        if self.prefill is not None:
            self.prefill.give_up(room, reason)
        self.tell_failure(room, reason)

    def tell_failure(self, room: int, reason: str) -> None:
        """Tell each decode rank that waits for a room."""
        self._tell(room, self.attempt(room), reason)

    def _tell(self, room: int, attempt: int, reason: str) -> None:
        for address in self._first.fail(room, reason, attempt):
            self._send_failure(address, room, attempt, reason)

    def _send_failure(self, address: tuple[str, int], room: int, attempt: int, reason: str) -> None:
        self._send(address, [FAILED, str(room).encode(), reason.encode(), str(attempt).encode()])

    # -- decode --------------------------------------------------------------------------------------

    def build_receiver_registration_message(self) -> list[bytes]:
        """Nothing need be known of a decode rank before its first request."""
        return [b"LAYERFLOW_HELLO"]

    def build_receiver_metadata_message(
        self, *, bootstrap_room: int, required_dst_info_num: int, **_: Any
    ) -> list[bytes]:
        """Where the first token of a room goes, and how many ranks of this engine tell the same prefill rank so."""
        told = bootstrap_room, self.local_ip, self.rank_port, self.attempt(bootstrap_room), required_dst_info_num
        return [ROOM, *(str(each).encode() for each in told)]

    def take_row(self, room: int, index: int) -> bool:
        """Write the first token of a room into SGLang's metadata buffers, if it has come."""
        rows = self._first.take(room, self.attempt(room))
        for row, start, length in zip(rows, self.kv_args.aux_data_ptrs, self.kv_args.aux_item_lens, strict=False):
            ctypes.memmove(start + index * length, row, min(length, len(row)))
        return bool(rows)

    def forget(self, room: int) -> None:
        """The scheduler has let go of a room. Prefill keeps a first token for a decode that comes later."""
        attempt = self._attempts.pop(room, 0)
        if self.disaggregation_mode == DisaggregationMode.DECODE:
            self._first.take(room, attempt)

    def watch_prefill(self, address: str, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Fail the requests of a prefill engine as soon as one of these ranks has ended.

        :param address: of its bootstrap server. :param ranks: as that has told of them.
        """
        if self._watch is not None:
            self._watch.watch(
                address, [NetworkAddress(each["rank_ip"], int(each["rank_port"])).to_tcp() for each in ranks]
            )

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Look for a prefill engine. One that does not answer may be starting, and SGLang tries 15 times; but not where
        it has ended a while ago.
        """
        if super().try_ensure_parallel_info(bootstrap_addr):
            self._gone.discard(bootstrap_addr)
            return True
        if self._gone.holds(bootstrap_addr, time.monotonic()):
            for room in self._waiting_for(bootstrap_addr):
                self.record_failure(room, f"layerflow: the prefill engine at {bootstrap_addr} has ended")
                self.update_status(room, KVPoll.Failed)
        return False

    def _prefill_ended(self, address: str) -> None:
        waiting = self._waiting_for(address)
        if waiting or address in self.prefill_info_table:  # else another of its ranks has told so
            log.warning("prefill_engine_ended", address=address, requests=len(waiting))
            self._gone.add(address, time.monotonic() + GONE_S)
            self._handle_node_failure(address)

    def _waiting_for(self, address: str) -> list[int]:
        with self.connection_lock:
            rooms = list(self.addr_to_rooms_tracker.get(address, ()))
        return [room for room in rooms if self.request_status.get(room) not in (None, KVPoll.Success, KVPoll.Failed)]

    # -- the control thread --------------------------------------------------------------------------

    def _hear(self) -> None:
        while True:
            frames = self.server_socket.recv_multipart()
            attempt(functools.partial(self._handle, frames), "control message")

    def _handle(self, frames: Sequence[bytes]) -> None:
        tag = frames[0]
        if tag == ROOM:
            room, address, attempt = int(frames[1]), (frames[2].decode(), int(frames[3])), int(frames[4])
            if reason := self._first.wait(room, address, attempt, ranks=int(frames[5])):
                self._send_failure(address, room, attempt, reason)
            else:
                self._send_rows(room, attempt)
        elif tag == ROW:
            self._first.put(int(frames[1]), list(frames[3:]), int(frames[2]))
        elif tag == FAILED:
            room, attempt = int(frames[1]), int(frames[3])
            if room in self.request_status and attempt == self.attempt(room):
                self.record_failure(room, f"layerflow: the prefill engine has failed: {frames[2].decode()}")
                self.update_status(room, KVPoll.Failed)
        elif tag == ABORT:
            self._first.leave(int(frames[1]))

    def _send_rows(self, room: int, attempt: int) -> None:
        rows, waiting = self._first.ready(room, attempt)
        for address in waiting:
            self._send(address, [ROW, str(room).encode(), str(attempt).encode(), *rows])

    def _send(self, address: tuple[str, int], frames: list[bytes]) -> None:
        host, port = address
        attempt(lambda: self._send_multipart_locked(f"tcp://{host}:{port}", frames), "send")


class LayerflowSender(CommonKVSender):  # type: ignore[misc]
    """A prompt on the prefill engine: it begins at once, and its pages are free when its saves have ended."""

    def __init__(self, mgr: LayerflowManager, bootstrap_addr: str, bootstrap_room: int, *args: Any, **kwargs: Any):
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **kwargs)
        self.hashes: Sequence[str] = ()
        self._refused = False
        self._unread: Any = None  #: the request, while its adapter is being read
        mgr.update_status(bootstrap_room, KVPoll.WaitingForInput)  # nothing of decode is needed to begin

    def prepare(self, request: Any) -> None:
        """Learn which attempt at its room this is, and what its pages are named by."""
        self.kv_mgr.begin_attempt(self.bootstrap_room, asked_attempt(request.sampling_params.custom_params))
        self._unread = request

    def poll(self) -> Any:
        """Success once the prompt is computed and no save reads its pages, whether or not decode has come.

        It bootstraps until its adapter is read: SGLang does not compute it before all ranks have read theirs. The
        server's answer to the hand-off is awaited too: decode is told of a refusal, and nobody would ask later.
        """
        status, side = super().poll(), self.kv_mgr.prefill
        if status in (KVPoll.Success, KVPoll.Failed) or side is None:
            return status
        if self._unread is not None:
            if not _is_ready(self.kv_mgr, self._unread):
                return KVPoll.Bootstrapping
            self._unread = None
        undecided = side.undecided(self.bootstrap_room)
        if not self._refused and (reason := side.refusal(self.bootstrap_room)):
            self._refused = True
            self.kv_mgr.tell_failure(self.bootstrap_room, reason)
        if status == KVPoll.Transferring and not undecided and not side.saving(self.bootstrap_room):
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)
            return super().poll()
        return status

    def abort(self) -> None:
        """The request is given up: nothing reads its pages when this returns."""
        self.kv_mgr.give_up(self.bootstrap_room, "the request was aborted")
        super().abort()

    def clear(self) -> None:
        """SGLang frees the request's pages next."""
        if self.conclude_state != KVPoll.Success:
            self.kv_mgr.give_up(self.bootstrap_room, "the request has ended before its prompt was computed")
        if self.kv_mgr.prefill is not None:
            self.kv_mgr.prefill.forget(self.bootstrap_room)
        self.kv_mgr.forget(self.bootstrap_room)
        super().clear()


class LayerflowReceiver(CommonKVReceiver):  # type: ignore[misc]
    """A prompt on the decode engine: followed as soon as it has pages."""

    def __init__(self, mgr: LayerflowManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        self._hashes: Sequence[str] = ()
        self._unread: Any = None  #: the request, while its adapter is being read
        self._refusal = ""
        self._following: Following | None = None
        self._index = 0

    def prepare(self, request: Any) -> None:
        """Learn which request this is: SGLang hands a receiver pages, not tokens."""
        try:
            if again := getattr(request, "pd_rebootstrap_in_progress", False):
                self.kv_mgr.begin_attempt(self.bootstrap_room, next_attempt(request))
            if again and request.lora_id is not None:
                raise Unsupported("SGLang asks prefill to compute a retracted request without its adapter")
            self._unread = request
            if self.kv_mgr.can_hash(request):
                self._take_hashes()
        except Exception as error:  # noqa: BLE001 - told, and this request fails
            self._refuse(request, error)

    def _take_hashes(self) -> None:
        request, self._unread = self._unread, None
        try:
            self._hashes = self.kv_mgr.hashes_of(request)
        except Exception as error:  # noqa: BLE001 - told, and this request fails
            self._refuse(request, error)

    def _refuse(self, request: Any, error: Exception) -> None:
        tell("prepare", request.rid, error)
        self._unread, self._refusal = None, str(error)

    def init(self, prefill_dp_rank: int) -> None:
        """Prefill is known: tell of its end as soon as that comes."""
        super().init(prefill_dp_rank)
        if self.conclude_state != KVPoll.Failed:
            self.kv_mgr.watch_prefill(self.bootstrap_addr, self.bootstrap_infos or ())

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None,
        **kwargs: Any,
    ) -> None:
        """The request has pages: tell prefill where its first token goes, and load into them what it saves."""
        super().send_metadata(kv_indices, aux_index, state_indices, decode_prefix_len, **kwargs)
        side = self.kv_mgr.decode
        if side is None or self.conclude_state == KVPoll.Failed:
            return
        if self._unread is not None:
            self._take_hashes()
        if reason := self._refusal or self.kv_mgr.obstacle:
            self._fail(reason)
            return
        self._index = aux_index or 0
        try:
            self._following = self._follow(side, kv_indices, state_indices, decode_prefix_len or 0)
        except Exception as error:  # noqa: BLE001 - told, and this request fails
            tell("send_metadata", None, error)
            self._fail(f"{type(error).__name__}: {error}")

    def _follow(
        self, side: DecodeSide, kv_indices: Any, state_indices: Sequence[Any] | None, prefix_len: int
    ) -> Following:
        page = self.kv_mgr.kv_args.page_size
        slots = {KV: (np.asarray(kv_indices, np.int64)[:, None] * page + np.arange(page)).reshape(-1)}
        for kind, indices in zip(self.kv_mgr.kv_args.state_types or (), state_indices or (), strict=False):
            if kind.name == "MAMBA" and indices is not None:
                slots[MAMBA] = np.asarray(indices, np.int64).reshape(-1)
        attempt = self.kv_mgr.attempt(self.bootstrap_room)
        return side.follow(self.bootstrap_room, self._hashes, prefix_len // page, slots, attempt=attempt)

    def poll(self) -> Any:
        """Success once all of the prompt is in place and its first token is there.

        It bootstraps until its adapter is read: SGLang has no pages for it before all ranks have read theirs.
        """
        status, following = super().poll(), self._following
        if status in (KVPoll.Success, KVPoll.Failed):
            if status == KVPoll.Failed:
                self._give_up()
            return status
        if self._unread is not None:
            if not _is_ready(self.kv_mgr, self._unread):
                return KVPoll.Bootstrapping
            self._take_hashes()
        if following is None:
            return status
        try:
            progress = self.kv_mgr.decode.poll(following)
        except Exception as error:  # noqa: BLE001 - told, and this request fails
            tell("poll", None, error)
            self._fail(f"{type(error).__name__}: {error}")
            return super().poll()
        if progress is PromptProgress.LOST:
            self._fail(following.reason)
        elif progress is PromptProgress.THERE and self.kv_mgr.take_row(self.bootstrap_room, self._index):
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)
        return super().poll()

    def abort(self) -> None:
        """The request is given up: nothing writes its pages when this returns."""
        self._give_up()
        super().abort()

    def clear(self) -> None:
        """SGLang frees the request's pages next, or has them filled: on every rank, as all of them have polled."""
        self._give_up()
        if self._following is not None:
            self.kv_mgr.decode.release(self._following)
        self.kv_mgr.forget(self.bootstrap_room)
        super().clear()

    def _fail(self, reason: str) -> None:
        self.kv_mgr.record_failure(self.bootstrap_room, f"layerflow: {reason}")
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)

    def _give_up(self) -> None:
        if self._following is not None:
            self.kv_mgr.decode.give_up(self._following)


def _is_ready(manager: LayerflowManager, request: Any) -> bool:
    """May a prompt be named? Also where that cannot be told, which naming it then says."""
    try:
        return manager.can_hash(request)
    except Exception as error:  # noqa: BLE001 - told, and this request fails
        tell("poll", request.rid, error)
        return True


class LayerflowBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """SGLang's own."""


def prefill_saves(cache: EngineCache, stream: Any, server_args: Any, options: SglangOptions) -> BatchSaves:
    """The saves of a prefill engine's batches.

    :param stream: that forward passes run on; None = the scheduler's own.
    """
    return cache.batch_saves(stream, by_layer=options.save_by_layer and not untold_layers(server_args))


def _check_allocator(allocator: Any) -> None:
    """:raises Unsupported: its frees are not seen, see :func:`.plugin.pages_freed`."""
    if not frees_are_seen(allocator):
        raise Unsupported(
            f"SGLang frees this model's pages by a {type(allocator).__name__}, which layerflow does not know (it knows "
            f"{', '.join(ALLOCATORS)}); run prefill without KV sharding, hierarchical sparse pools and unified memory"
        )


@dataclass(frozen=True, slots=True)
class PromptHashing:
    """How both engines name the pages of a prompt that is handed over.

    :param pairs: as of :func:`.pages.page_hashes`, as SGLang's own cache has it.
    :param drafts: a draft model's cache is handed over too. :param adapters: that the engine has loaded.
    """

    page: int
    pairs: bool = False
    drafts: bool = False
    adapters: LoadedAdapters = field(default_factory=lambda: LoadedAdapters(None))

    def is_ready(self, request: Any) -> bool:
        """Does :meth:`of` answer at once? An adapter is read in the background from the first question on."""
        return request.lora_id is None or self.adapters.is_read(request.lora_id)

    def of(self, request: Any) -> list[str]:
        """Page hashes of a prompt, as SGLang's stores have them, and one of what is left behind the last whole page.

        Of a request that decode has retracted, its output so far belongs to the prompt that prefill is asked to
        compute.

        An adapter's id in SGLang is another one in each engine, so a prompt with one is handed over under its room and
        the adapter's content: what was handed over before, in a room of that number, may be of another adapter. A
        prompt's last page belongs to its room too where there is a draft model: that one's row of the last token
        depends on the token that is made next.

        :raises Unsupported: the request has something :data:`UNTOLD`, or an adapter that is not loaded.
        :raises ConfigError: its adapter could not be read.
        """
        if untold := [name for name in UNTOLD if getattr(request, name) is not None]:
            raise Unsupported(
                f"request {request.rid}: its keys and values depend on {' and '.join(untold)}, which SGLang's page "
                "hashes do not hold, so that it cannot be handed over; send it to a server without disaggregation"
            )
        extra, salt, room = request.extra_key, request.cache_salt, f"room-{request.bootstrap_room}"
        if request.lora_id is not None:
            extra, salt = f"{room} adapter-{self.adapters.content(request.lora_id)}", None
        tokens = request.origin_input_ids
        if getattr(request, "pd_rebootstrap_in_progress", False):
            tokens = array("q", [*tokens, *request.output_ids])
        whole = whole_pages(len(tokens), self.page, pairs=self.drafts) * self.page
        hashes = page_hashes(
            tokens[: whole + self.pairs], self.page, extra_key=extra, cache_salt=salt, pairs=self.pairs
        )
        if left := tokens[whole:]:
            rest = RadixKey(left, extra, cache_salt=salt)
            found = get_hash_str(rest, hashes[-1]) if hashes else get_storage_hash_str(rest, None)
            hashes.append(hashlib.sha256(f"{found} {room}".encode()).hexdigest() if self.drafts else found)
        return hashes


def _draft_pools(scheduler: Any) -> list[Any]:
    """Caches of the draft models of its speculative decoding, in the order of their steps."""
    worker = scheduler.draft_worker
    return [runner.token_to_kv_pool for runner in worker._draft_model_runners()] if worker is not None else []


def _state_slot(pool: Any, index: int) -> np.ndarray:
    slot = pool.translate_mamba_indices(pool.req_index_to_mamba_index_mapping[index])
    return slot.reshape(-1).to("cpu").numpy().astype(np.int64)  # type: ignore[no-any-return]
