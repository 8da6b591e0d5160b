"""Which part of a hand-off a request's ``kv_transfer_params`` ask this engine to play."""

from __future__ import annotations

from layerflow.connectors.vllm.pd.conventions import concurrent, metaserver, twophase
from layerflow.connectors.vllm.pd.conventions.parts import PLAIN, HandoffTerms, NoHandoff, Part, RequestParams, terms_in
from layerflow.errors import ProtocolError


def part_of(request_params: RequestParams, *, answers: bool, producer: bool, consumer: bool) -> Part:
    """By what the keys hold; never by how the engine was started alone.

    :param request_params: of the request; its `terms` are read here.
    :param answers: this connector answers the keys of NIXL, Mooncake and vLLM-Ascend. In a MultiConnector another one
        may: then only what names a hand-off of layerflow's is meant for this one.
    :param producer: this engine may prefill for others.
    :param consumer: it may decode what others have prefilled.
    """
    params = request_params.params
    try:
        terms = terms_in(params)
        request_params = request_params._replace(terms=terms)
        if params.get("do_remote_decode"):
            return _prefill(request_params, terms, answers=answers) if producer else PLAIN
        if params.get("do_remote_prefill"):
            return _decode(request_params, terms, answers=answers) if consumer else PLAIN
    except ProtocolError as error:
        return NoHandoff(str(error))
    return PLAIN


def _prefill(request_params: RequestParams, terms: HandoffTerms | None, *, answers: bool) -> Part:
    meant = answers or terms is not None
    if meant and request_params.params.get("transfer_id"):
        return concurrent.prefill_part(request_params)
    if terms is not None:
        return metaserver.prefill_part(request_params)
    return twophase.prefill_part(request_params) if answers else PLAIN


def _decode(request_params: RequestParams, terms: HandoffTerms | None, *, answers: bool) -> Part:
    meant = answers or terms is not None
    if meant and request_params.params.get("transfer_id"):
        return concurrent.decode_part(request_params)
    if answers and terms is None and request_params.params.get("metaserver"):
        return metaserver.decode_part(request_params)
    return twophase.decode_part(request_params) if meant else PLAIN
