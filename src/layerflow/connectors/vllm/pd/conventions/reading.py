"""Which part of a hand-off a request's ``kv_transfer_params`` ask this engine to play."""

from __future__ import annotations

from layerflow.connectors.vllm.pd.conventions import concurrent, metaserver, twophase
from layerflow.connectors.vllm.pd.conventions.parts import PLAIN, HandoffTerms, NoHandoff, Part, RequestParams, terms_in
from layerflow.errors import ProtocolError


def part_of(words: RequestParams, *, speaks: bool, producer: bool, consumer: bool) -> Part:
    """By what the keys hold; never by how the engine was started alone.

    :param words: of the request; its `terms` are read here.
    :param speaks: this connector answers the keys of NIXL, Mooncake and vLLM-Ascend. In a MultiConnector another one
        may: then only what names a hand-off of layerflow's is meant for this one.
    :param producer: this engine may prefill for others.
    :param consumer: it may decode what others have prefilled.
    """
    params = words.params
    try:
        terms = terms_in(params)
        words = words._replace(terms=terms)
        if params.get("do_remote_decode"):
            return _prefill(words, terms, speaks=speaks) if producer else PLAIN
        if params.get("do_remote_prefill"):
            return _decode(words, terms, speaks=speaks) if consumer else PLAIN
    except ProtocolError as error:
        return NoHandoff(str(error))
    return PLAIN


def _prefill(words: RequestParams, terms: HandoffTerms | None, *, speaks: bool) -> Part:
    meant = speaks or terms is not None
    if meant and words.params.get("transfer_id"):
        return concurrent.prefill_part(words)
    if terms is not None:
        return metaserver.prefill_part(words)
    return twophase.prefill_part(words) if speaks else PLAIN


def _decode(words: RequestParams, terms: HandoffTerms | None, *, speaks: bool) -> Part:
    meant = speaks or terms is not None
    if meant and words.params.get("transfer_id"):
        return concurrent.decode_part(words)
    if speaks and terms is None and words.params.get("metaserver"):
        return metaserver.decode_part(words)
    return twophase.decode_part(words) if meant else PLAIN
