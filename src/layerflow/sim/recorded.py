"""The prompts of a recording (:mod:`layerflow.recording`), to replay what its pool would have hit at other sizes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from layerflow.errors import ConfigError
from layerflow.recording.format import MAGIC, LookedUp, ModelSeen, SessionSeen, SettingsInForce, StepSeen
from layerflow.recording.reader import Recording
from layerflow.sim.trace import RequestTrace, TracedRequest, numbered_digest
from layerflow.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class RecordedPrompts:
    """What a recording tells of one model's prompts.

    :param trace: each with one token of output: what requests generated is not recorded.
    :param arena_bytes: of the pool that it was recorded with, when the recording ended.
    :param hit_tokens: that could be loaded, as the server answered.
    """

    trace: RequestTrace
    spec: ModelSpec
    arena_bytes: int
    hit_tokens: int


@dataclass(slots=True)
class _Prompt:
    at: float
    tokens: int = 0
    chunks: tuple[int, ...] = ()
    tail: int = 0
    hit: int = 0
    saved: dict[int, int] = field(default_factory=dict)


def is_recording(path: Path) -> bool:
    """Does the file begin as a recording? What cannot be read does not."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_prompts(path: Path) -> RecordedPrompts:
    """Take the prompts of the model that had most of them.

    A prompt is what its last lookup told. Of those that a client answered by itself, from the table of what is stored,
    only what was saved is known: they hit nothing.

    :raises ConfigError: it cannot be read, or no prompt is in it.
    """
    specs: dict[int, ModelSpec] = {}
    models: dict[int, int] = {}
    found: dict[tuple[int, int], _Prompt] = {}
    arena_bytes = 0
    for record in Recording(path).records():
        match record:
            case ModelSeen():
                specs[record.model] = record.spec
            case SessionSeen():
                models[record.session] = record.model
            case SettingsInForce():
                arena_bytes = int(record.sections["pool"]["size"])
            case LookedUp() if record.session in models:
                prompt = found.setdefault((models[record.session], record.request), _Prompt(record.at))
                prompt.tokens, prompt.chunks, prompt.tail = record.tokens, record.chunks, record.tail
                prompt.hit = record.hit
            case StepSeen() if record.session in models:
                model = models[record.session]
                for part in record.saves:
                    prompt = found.setdefault((model, part.request), _Prompt(record.at))
                    if part.group == 0:
                        prompt.saved.update(zip(part.chunks, part.tokens, strict=True))
    if not found:
        raise ConfigError(f"{path}: no prompt was looked up or saved while it was recorded; record for longer")
    [(model, _)] = Counter(model for model, _ in found).most_common(1)
    spec = specs[model]
    requests: list[TracedRequest] = []
    hit_tokens = 0
    begin = min(prompt.at for prompt in found.values())
    for (of, _), prompt in found.items():
        if of != model:
            continue
        request = _request(prompt, len(requests), prompt.at - begin, spec.chunk_tokens)
        if request is not None:
            requests.append(request)
            hit_tokens += prompt.hit
    requests.sort(key=lambda request: request.at)
    trace = RequestTrace(path.name, tuple(requests), spec.chunk_tokens)
    return RecordedPrompts(trace, spec, arena_bytes, hit_tokens)


def _request(prompt: _Prompt, number: int, at: float, chunk_tokens: int) -> TracedRequest | None:
    tokens, chunks, tail = prompt.tokens, prompt.chunks, prompt.tail
    if not tokens:
        tokens = sum(prompt.saved.values())
        chunks = tuple(chunk for chunk, held in prompt.saved.items() if held == chunk_tokens)
    if tokens < 1:
        return None
    digests = tuple(map(numbered_digest, chunks))
    return TracedRequest(number, at, tokens, 1, digests, numbered_digest(tail) if tail else b"")
