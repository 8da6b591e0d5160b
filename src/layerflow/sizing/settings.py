"""The settings that a model, a machine and its prompts ask for: a short TOML file with a reason for each line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from layerflow.config.settings import MIN_TRANSFER_BYTES, MOST_SESSIONS, Settings, format_size
from layerflow.config.sources import Values, nested
from layerflow.errors import ConfigError
from layerflow.findings import size_text
from layerflow.flow.cost import LinkCost
from layerflow.http_server import MAX_CONNECTIONS
from layerflow.server.terms import PLANNED_SHARE, limits_of, sharers, terms_of
from layerflow.sizing.capacity import Capacity, widest
from layerflow.system.descriptors import most_used
from layerflow.system.memfd import HUGE_PAGE_BYTES

COPY_S = 0.002
"""What is urgent waits no longer for a copy that has begun, on the link that is given."""
_WORTH_HUGE_PAGES = 32 << 30  # as the doctor advises
_LOADS_IN_TIME = 4  # a step may take so many times as long as its loads, before they have failed


@dataclass(frozen=True, slots=True)
class Line:
    """One setting.

    :param value: as TOML. :param reason: with the figure that it follows from.
    """

    section: str
    key: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """The lines, and what they ask of the machine.

    :param settings: what the lines come to.
    :param memlock_bytes: that server and engine processes have to be allowed to pin (``ulimit -l``).
    :param descriptors: that the server may take (``ulimit -n``).
    :param window_bytes: what each worker may have in flight of loads by plans.
    :param granted_bytes: what the server grants of other loads and of saves, all workers together; saves get half.
    """

    lines: tuple[Line, ...]
    settings: Settings
    memlock_bytes: int
    descriptors: int
    window_bytes: int
    granted_bytes: int

    def toml(self, header: list[str]) -> str:
        """Return the file's text; `header` stands above it as comments."""
        text = [f"# {line}".rstrip() for line in header]
        section = ""
        for line in self.lines:
            if line.section != section:
                section = line.section
                text += ["", f"[{section}]"]
            text.append(f"{line.key} = {line.value}  # {line.reason}")
        return "\n".join(text) + "\n"


def planned_file(
    capacity: Capacity, *, arena_bytes: int, prompt_tokens: int, link: LinkCost | None, engines: int = 1
) -> PlannedFile:
    """Return the settings for prompts of so many tokens.

    :param link: of each worker to the arena; None = unknown, and what follows from it keeps its default.
    :param engines: instances of the model that share the server.
    :raises ConfigError: the arena holds not even two such prompts, a server has not so many workers, or the link is too
        slow for one prompt.
    """
    prompt = capacity.prompt_bytes(prompt_tokens)
    if capacity.prompts_in(arena_bytes, prompt_tokens) < 2:
        raise ConfigError(
            f"--ram {format_size(arena_bytes)} does not hold two prompts of {prompt_tokens:,} tokens, which take "
            f"{size_text(prompt)} each: one is saved while another is read; give more, or a shorter --prompt"
        )
    workers = capacity.workers * engines
    if 2 * workers > MOST_SESSIONS:
        raise ConfigError(
            f"{workers:,} workers (--engines x --tp x --pp): one server has {MOST_SESSIONS // 2:,} at most, and as "
            "many again while engines are restarted; plan for fewer"
        )
    lines = tuple(_lines(capacity, arena_bytes, prompt_tokens, link, workers))
    values: Values = {}
    for line in lines:
        values.setdefault(line.section, {})[line.key] = line.value.strip('"')
    settings = Settings(**nested(values))
    terms = terms_of(settings, workers)
    server = settings.server
    return PlannedFile(
        lines,
        settings,
        memlock_bytes=settings.pool.size,
        descriptors=most_used(http=MAX_CONNECTIONS, workers=server.max_sessions, clients=server.max_clients),
        window_bytes=terms.window_bytes,
        granted_bytes=limits_of(settings, settings.pool.size).max_granted_bytes,
    )


def _lines(
    capacity: Capacity, arena_bytes: int, prompt_tokens: int, link: LinkCost | None, workers: int
) -> Iterator[Line]:
    defaults = Settings()
    server, transfer, pool = defaults.server, defaults.transfer, defaults.pool
    prompt, loaded = capacity.prompt_bytes(prompt_tokens), capacity.load_bytes(prompt_tokens)
    layer = widest(capacity.stages, prompt_tokens)
    name, told = f"{prompt_tokens:,} tokens", f"{workers} worker{'s' if workers > 1 else ''}"

    sessions = max(server.max_sessions, 2 * workers)
    yield Line("server", "max_sessions", str(sessions), f"{told}, and as many again while engines are restarted")
    objects = capacity.step_objects(prompt_tokens)
    if 2 * objects > server.max_step_objects:
        most = f"a step that loads and saves one prompt has {2 * objects:,} objects"
        yield Line("server", "max_step_objects", str(4 * objects), most)
    if 2 * loaded > server.max_open_bytes:
        most = f"a worker moves {size_text(loaded)} of a prompt"
        yield Line("server", "max_open_bytes", f'"{format_size(_up(4 * loaded))}"', most)

    yield Line(
        "pool",
        "size",
        f'"{format_size(arena_bytes)}"',
        f"{capacity.tokens_in(arena_bytes):,} tokens: {capacity.prompts_in(arena_bytes, prompt_tokens):,} prompts of "
        f"{name}, {size_text(prompt)} each",
    )
    huge = arena_bytes >= _WORTH_HUGE_PAGES
    yield Line(
        "pool",
        "hugepages",
        str(huge).lower(),
        f"first sysctl vm.nr_hugepages={-(-arena_bytes // HUGE_PAGE_BYTES)}; pages of 4 KiB cost each GPU "
        f"{size_text(arena_bytes // 512)} of tables"
        if huge
        else f"tables for pages of 4 KiB take {size_text(max(1 << 20, arena_bytes // 512))} of each GPU: not worth it",
    )
    waiting = int(capacity.prompts_in(arena_bytes, prompt_tokens) * pool.lease_share)
    yield Line(
        "pool",
        "lease_share",
        f"{pool.lease_share:g}",
        f"{waiting:,} requests with whole hits may wait at once; the rest is for what is saved",
    )

    copy = _copy_bytes(link, transfer.max_transfer_bytes)
    yield Line(
        "transfer",
        "max_transfer_bytes",
        f'"{format_size(copy)}"',
        f"{copy / link.bandwidth * 1e3:.2g} ms of the link, which is what urgent work waits for; a prompt's layer is "
        f"{size_text(layer)}"
        if link
        else f"the default, as no --link is given; a prompt's layer on one worker is {_size(layer)}",
    )
    window = min(layer, copy)
    inflight = max(transfer.max_inflight_bytes, 2 * copy, _up(PLANNED_SHARE * sharers(workers) * 2 * window))
    yield Line(
        "transfer",
        "max_inflight_bytes",
        f'"{format_size(inflight)}"',
        f"a quarter over {told} is {_size(inflight // PLANNED_SHARE // sharers(workers))} for each: two "
        "copies, so that the link does not pause",
    )
    yield Line(
        "transfer",
        "prefetch_layers",
        "0",
        f"the window decides: it holds {inflight // PLANNED_SHARE // sharers(workers) / max(1, layer):.2g} layers of a "
        "prompt",
    )
    backlog = max(transfer.save_backlog_bytes, _up(2 * loaded))
    yield Line(
        "transfer",
        "save_backlog_bytes",
        f'"{format_size(backlog)}"',
        f"a worker saves {_size(loaded)} of a prompt; {backlog // max(1, loaded):,} may wait before saves are shed",
    )
    if link:
        seconds = loaded / link.bandwidth
        timeout = max(transfer.step_timeout_ms, int(_LOADS_IN_TIME * seconds * 1e3))
        if timeout > server.max_deadline_s * 1e3:
            raise ConfigError(
                f"--link: all of a prompt of {name} takes {seconds:,.3g} s of it, and {_LOADS_IN_TIME} times as long, "
                f"which a step would be given, is over server.max_deadline_s = {server.max_deadline_s:g} s; give a "
                "shorter --prompt"
            )
        why = f"all of a prompt takes {seconds * 1e3:,.3g} ms of the link; what has not come by then is computed"
    else:
        timeout, why = transfer.step_timeout_ms, "the default, as no --link is given"
    yield Line("transfer", "step_timeout_ms", str(timeout), why)
    yield Line(
        "transfer",
        "h2d_stagger_us",
        "0",
        "each rank has a link of its own; where ranks share one, try "
        + (f"{layer / link.bandwidth * 1e6:,.0f}, a layer's time" if link else "the time of a layer"),
    )


def _copy_bytes(link: LinkCost | None, default: int) -> int:
    """Return the largest power of two that the link moves within :data:`COPY_S`; the default where it is unknown."""
    if link is None:
        return default
    most = max(MIN_TRANSFER_BYTES, int(link.bandwidth * COPY_S))
    return min(1 << 28, max(4 << 20, 1 << most.bit_length() - 1))


def _up(nbytes: int) -> int:
    """`nbytes` rounded up to a power of two."""
    return 1 << max(0, nbytes - 1).bit_length()


def _size(nbytes: int) -> str:
    return size_text(nbytes) if nbytes >= 1 << 20 else f"{nbytes / 1024:.3g} KiB"
