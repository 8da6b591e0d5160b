"""P and D of different tensor and pipeline sizes, over one server and between two."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from comparison import prompt
from engines import Engine, connector
from scenario import Terms

from layerflow_cli.bench.harness import ServerProcess

MAX_TOKENS = 6
EXTRA = {"chunk_tokens": 64}
TP2 = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
PP2 = {
    "pipeline_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "worker_cls": "staged_worker.StagedWorker",
    "max_num_batched_tokens": 256,
    "enable_chunked_prefill": True,
}

Start = Callable[..., Engine]
Serve = Callable[..., ServerProcess]


class Sizes:
    """Two servers that read from each other, and at each an engine of size one that prefills and decodes."""

    def __init__(self, serve: Serve, vllm: Start, plain: Start) -> None:
        settings = {"peers__serve": "true", "peers__link_address": "127.0.0.1:0", "peers__learn": "true"}
        self.here, self.there = serve(**settings), serve(**settings)
        self._vllm, self._plain = vllm, plain
        self.near, self.far = self.engine(self.here), self.engine(self.there)
        self._asked = 100

    def engine(self, server: ServerProcess, **size: Any) -> Engine:
        return self._vllm("llama", kv_transfer_config=connector(server.endpoint, "kv_both", **EXTRA), **size)

    def hand_over(self, prefill: Engine, decode: Engine, servers: list[str]) -> None:
        """Both legs at once, of prompts that nobody has seen; all but the last token comes from the prefill engine.

        :param servers: of the prefill engine, where the decode engine's is another one.
        """
        asked = [prompt(self._asked + number, 150 + 150 * number) for number in range(2)]
        self._asked += 2
        wanted = [self._plain("llama").one(each, max_tokens=MAX_TOKENS).tokens for each in asked]
        shared = [{"transfer_id": f"xfer-{uuid.uuid4()}"} for _ in asked]
        to_decode = {"do_remote_prefill": True, "layerflow": {"v": 1, "servers": servers}}
        decode.begin(asked, MAX_TOKENS, terms=[Terms(transfer=to_decode | each) for each in shared])
        prefill.begin(asked, 1, terms=[Terms(transfer={"do_remote_decode": True} | each) for each in shared])
        prefill.finish()
        answers = decode.finish()
        assert [answer.tokens for answer in answers] == wanted
        told = [answer.transfer["layerflow"] for answer in answers if answer.transfer is not None]
        assert [(each["handoff"], each["hit_tokens"]) for each in told] == [
            ("loaded", len(each) - 1) for each in asked
        ], told
        for engine in (prefill, decode):
            engine.assert_no_block_lost()


@pytest.fixture(scope="module")
def sizes(serve: Serve, vllm: Start, plain: Start) -> Iterator[Sizes]:
    yield Sizes(serve, vllm, plain)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("size", [TP2, PP2], ids=["tp2", "pp2"])
def test_two_ranks_and_one_hand_over_to_each_other(size: dict[str, Any], sizes: Sizes) -> None:
    two = sizes.engine(sizes.here, **size)
    two.one(prompt(1, 40), max_tokens=2)  # ranks compile at their first prompt, for as long as a save may take
    here, there = [sizes.here.endpoint], [sizes.there.endpoint]
    sizes.hand_over(two, sizes.near, [])
    sizes.hand_over(sizes.near, two, [])
    sizes.hand_over(two, sizes.far, here)
    sizes.hand_over(sizes.far, two, there)
    two.close()
