"""What a proxy does with a prompt: which leg leaves first, and what each is told."""

from __future__ import annotations

import contextlib
import json
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from engines import Engine
from scenario import Answer, Prompt, Terms

SIX_KEYS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill_first(prefill: Engine, decode: Engine, prompt: Prompt, max_tokens: int) -> Answer:
    """Two phases: what P's response says goes to D."""
    first = prefill.one(prompt, max_tokens=1, terms=Terms(transfer=SIX_KEYS))
    return decode.one(prompt, max_tokens=max_tokens, terms=Terms(transfer=first.transfer))


def concurrent(prefill: Engine, decode: Engine, prompt: Prompt, max_tokens: int) -> Answer:
    """Both legs at once."""
    return concurrently(prefill, decode, [prompt], max_tokens)[0]


def concurrently(prefill: Engine, decode: Engine, prompts: Sequence[Prompt], max_tokens: int) -> list[Answer]:
    """Both legs of several prompts at once."""
    shared = [{"transfer_id": f"xfer-{uuid.uuid4()}"} for _ in prompts]
    to_decode = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p0"}
    to_prefill = {"do_remote_decode": True, "do_remote_prefill": False}
    decode.begin(prompts, max_tokens, terms=[Terms(transfer=to_decode | each) for each in shared])
    prefill.begin(prompts, 1, terms=[Terms(transfer=to_prefill | each) for each in shared])
    prefill.finish()
    return decode.finish()


def decode_first(prefill: Engine, decode: Engine, prompt: Prompt, max_tokens: int) -> Answer:
    """The decode engine asks this proxy's metaserver for the prefill."""

    def start(body: dict[str, Any]) -> int:
        prefill.begin([prompt], 1, terms=[Terms(transfer=body)])
        return 200 if prefill.finish()[0].reason == "length" else 502

    with metaserver(start) as url:
        told = {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": url}
        return decode.one(prompt, max_tokens=max_tokens, terms=Terms(transfer=told))


@contextlib.contextmanager
def metaserver(start: Callable[[dict[str, Any]], int]) -> Iterator[str]:
    """The URL of one that answers each POST with the status that `start` has for its body.

    What `start` does has ended when the block is left: the engine that it asks is then the test's again.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = b'{"status": "ok"}'
            self.send_response(start(body))
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # closing waits for them
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/metaserver"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


ORDERS = {"prefill-first": prefill_first, "concurrent": concurrent, "decode-first": decode_first}
