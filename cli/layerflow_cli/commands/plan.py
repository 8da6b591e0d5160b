"""``layerflow plan``: what a model's cache takes, and a file of settings for it, before an engine has run."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerflow.errors import ConfigError
from layerflow_cli.machine import (
    ActiveParams,
    Engines,
    Flops,
    KvDtype,
    LayerTime,
    LinkLatency,
    LinkRate,
    ModelFolder,
    TensorRanks,
    layer_cost,
    link_cost,
)
from layerflow_cli.options import JsonFile, finite, refuse_foreign, with_unit

if TYPE_CHECKING:
    from layerflow.sizing import Capacity, PlannedFile, Race

_HOUR_S = 3600
_HEADER_WIDTH = 78
"""Of a line behind its "# "."""


def plan(
    context: typer.Context,
    model: ModelFolder = None,
    tp: TensorRanks = 1,
    pp: Annotated[int, typer.Option(min=1, metavar="N", help="Pipeline stages of one engine.")] = 1,
    engines: Engines = 1,
    ram: Annotated[str, typer.Option(metavar="SIZE", help="Memory that the arena may take, e.g. 1TiB.")] = "64GiB",
    prompt: Annotated[str, typer.Option(metavar="TOKENS", help="A long prompt, e.g. 32k (32,768 tokens).")] = "32k",
    link: LinkRate = None,
    link_latency_us: LinkLatency = 0,
    flops: Flops = None,
    active_params: ActiveParams = None,
    layer_us: LayerTime = None,
    traffic: Annotated[
        float | None,
        typer.Option(
            min=1, max=1e15, callback=finite, metavar="N", help="New tokens a second that all engines together store."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="NAME", help="What the model computes in, as vLLM's --dtype; float32 is halved.")
    ] = "auto",
    kv_dtype: KvDtype = "auto",
    state_dtype: Annotated[
        str, typer.Option(metavar="NAME", help="Of recurrent states, as vLLM's --mamba-ssm-cache-dtype.")
    ] = "auto",
    block_size: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Of the engine; vLLM-Ascend has 128.")] = 16,
    chunk_tokens: Annotated[
        int, typer.Option(min=0, metavar="TOKENS", help="Tokens stored together; 0 = as the connector chooses them.")
    ] = 0,
    compressor_states: Annotated[
        str, typer.Option(metavar="all|read", help="Of DeepSeek-V4: the connector's setting of this name.")
    ] = "all",
    like: Annotated[
        str, typer.Option(metavar="TYPE", help="Take a model that is not known for one of this model_type.")
    ] = "",
    table: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='Instead of --model: a Markdown table of models, {"NAME": {"config": ...}}.'),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Print a TOML file for a model, a reason behind each line, and above it what the model's KV cache takes.

    The model is read from its config.json; no weights, no engine and no device are needed. A model whose caches are
    not known is refused.

    \b
    Examples:
      layerflow plan --model /models/Qwen3-235B-A22B --tp 8 --ram 1TiB --link 25GB/s > layerflow.toml
      layerflow plan --model /models/Qwen3-8B --ram 64GiB --link 25GB/s --flops 400e12 --active-params 7e9
    """
    from layerflow.config.fields import parse_size  # noqa: PLC0415 - `--help` stays quick
    from layerflow.sizing import capacity_of, planned_file, race, read_config, shape_of  # noqa: PLC0415
    from layerflow_cli.output import write_json  # noqa: PLC0415

    with_unit("--ram", ram)
    arena_bytes, tokens = parse_size(ram), parse_size(prompt)
    if tokens < 1:
        raise ConfigError(f"--prompt {prompt}: at least one token")
    if (model is None) == (table is None):
        raise ConfigError("give a model's folder with --model, or a file of models with --table")
    told = {"state_dtype": state_dtype, "dtype": dtype, "compressor_states": compressor_states}
    if table is not None:
        foreign = ("engines", "link", "link_latency_us", "flops", "active_params", "layer_us", "traffic", "like")
        refuse_foreign(context, "--table prints Markdown, and no file", *foreign, "chunk_tokens", "json_file")
        rows = [
            (
                name,
                entry,
                capacity_of(
                    shape_of(entry["config"], kv_dtype, **told),
                    tp=tp,
                    pp=pp,
                    block_tokens=block_size,
                ),
            )
            for name, entry in _models(table).items()
        ]
        typer.echo(_markdown(rows, arena_bytes, tokens))
        return
    assert model is not None
    shape = shape_of(read_config(model), kv_dtype, like, **told)
    if not shape.compressor_states:
        refuse_foreign(context, f"a model of type {shape.model_type} has no compressor states", "compressor_states")
    capacity = capacity_of(shape, tp=tp, pp=pp, block_tokens=block_size, chunk_tokens=chunk_tokens)
    speed = link_cost(link, link_latency_us)
    file = planned_file(capacity, arena_bytes=arena_bytes, prompt_tokens=tokens, link=speed, engines=engines)
    compute = layer_cost(capacity, flops, active_params, layer_us)
    if compute is not None and speed is None:
        raise ConfigError("a break-even length needs a link too: give --link, e.g. --link 25GB/s")
    found = None
    if compute is not None and speed is not None:
        found = race(capacity, speed, compute, tokens, file.settings.transfer.byte_cap)
    if write_json(json_file, _result(capacity, file, found, tokens, traffic)):
        return
    header = list(
        _header(capacity, file, found, tokens, traffic, name=(model if model.is_dir() else model.parent).resolve().name)
    )
    typer.echo(file.toml(header), nl=False)


def _models(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--table {path}: cannot be read: {error}") from None
    if not isinstance(found, dict) or not all(
        isinstance(entry, dict) and isinstance(entry.get("config"), dict) for entry in found.values()
    ):
        raise ConfigError(f'--table {path}: should be {{"NAME": {{"config": {{...}}, "source": "where it is from"}}}}')
    return found


def _caches(capacity: Capacity) -> Iterator[tuple[str, float]]:
    """Each cache group in words, and bytes of one of its tokens."""
    for size in capacity.groups:
        group = size.group
        words = [f"{size.layers} {group.kind}"]
        words += [f"window {group.window:,}"] if group.window else []
        words += [f"1:{group.ratio}"] if group.ratio > 1 else []
        words += [f"one each {group.block_size:,} tokens"] if group.rules.exact else []
        words += [" + ".join(plane.name for plane in group.planes)]
        yield ", ".join(words), size.chunk_bytes / capacity.chunk_tokens


def _header(
    capacity: Capacity, file: PlannedFile, found: Race | None, tokens: int, traffic: float | None, *, name: str
) -> Iterator[str]:
    from layerflow.findings import size_text  # noqa: PLC0415

    shard, size = capacity.stages[0].shard, file.settings.pool.size
    yield f"Planned by `layerflow plan` for {name}."
    ranks = f"tensor size {shard.tp_size}, pipeline size {shard.pp_size}"
    yield f"{capacity.shape.model_type}, {capacity.shape.layers} layers, {ranks}."
    for note in capacity.shape.notes:
        yield from textwrap.wrap(note, _HEADER_WIDTH)
    yield ""
    yield f"Cache: {_kib(capacity.token_bytes)} a token, each part stored once, in chunks of {capacity.chunk_tokens}:"
    for words, nbytes in _caches(capacity):
        yield f"  {_kib(nbytes):>12}  {words}"
    prompt, loaded = capacity.prompt_bytes(tokens), capacity.load_bytes(tokens)
    yield f"A prompt of {tokens:,} tokens takes {size_text(prompt)}; each worker loads {size_text(loaded)} of it."
    held = capacity.tokens_in(size)
    lasts = held / traffic / _HOUR_S if traffic else 0.0
    shown = f"{lasts:,.0f}" if lasts >= 100 else f"{lasts:.3g}"
    hours = f": {shown} hours of {traffic:,.0f} new tokens a second" if traffic else ""
    yield f"The arena holds {held:,} tokens{hours}."
    if found is not None:
        times = found.longest
        border = f"from {found.tokens:,} tokens on" if found.tokens else "at no length up to this one"
        quickest, computed = min(times.layerwise, times.bulk) * 1e3, times.recompute * 1e3
        yield f"Loading is quicker than computing {border};"
        yield f"  at {tokens:,} tokens: {quickest:,.4g} ms against {computed:,.4g} ms."
    yield f"Limits: `ulimit -l` (LimitMEMLOCK=) {size_text(file.memlock_bytes)} for server and engines,"
    yield f"  `ulimit -n` (LimitNOFILE=) {file.descriptors:,} for the server; see `layerflow doctor`."
    yield f"Shares: each worker {size_text(file.window_bytes)} of loads in flight by plans; all together"
    yield f"  {size_text(file.granted_bytes)} of other loads and saves, of which saves get half."


def _kib(nbytes: float) -> str:
    return f"{nbytes / 1024:,.4g} KiB"


def _result(
    capacity: Capacity, file: PlannedFile, found: Race | None, tokens: int, traffic: float | None
) -> dict[str, Any]:
    """The plan for machines. Sizes in bytes, times in seconds."""
    held = capacity.tokens_in(file.settings.pool.size)
    return {
        "model_type": capacity.shape.model_type,
        "layers": capacity.shape.layers,
        "chunk_tokens": capacity.chunk_tokens,
        "token_bytes": capacity.token_bytes,
        "notes": list(capacity.shape.notes),
        "groups": [
            {
                "kind": size.group.kind,
                "layers": size.layers,
                "window": size.group.window,
                "ratio": size.group.ratio,
                "block_tokens": size.group.block_size,
                "planes": [plane.name for plane in size.group.planes],
                "copies": size.copies,
                "chunk_bytes": size.chunk_bytes,
            }
            for size in capacity.groups
        ],
        "prompt": {
            "tokens": tokens,
            "bytes": capacity.prompt_bytes(tokens),
            "loaded_bytes_per_worker": capacity.load_bytes(tokens),
            "lookup_objects": capacity.prompt_objects(tokens),
        },
        "arena": {
            "bytes": file.settings.pool.size,
            "tokens": held,
            "prompts": capacity.prompts_in(file.settings.pool.size, tokens),
            "hours": held / traffic / _HOUR_S if traffic else None,
        },
        "break_even": None
        if found is None
        else {
            "tokens": found.tokens,
            "layerwise_s": found.longest.layerwise,
            "bulk_s": found.longest.bulk,
            "recompute_s": found.longest.recompute,
        },
        "memlock_bytes": file.memlock_bytes,
        "descriptors": file.descriptors,
        "window_bytes": file.window_bytes,
        "granted_bytes": file.granted_bytes,
        "settings": [dataclasses.asdict(line) | {"value": line.value.strip('"')} for line in file.lines],
    }


def _markdown(rows: list[tuple[str, Mapping[str, Any], Capacity]], arena_bytes: int, tokens: int) -> str:
    from layerflow.config.fields import format_size  # noqa: PLC0415
    from layerflow.findings import size_text  # noqa: PLC0415

    lines = [
        f"| model | caches | a token | {tokens:,} tokens | loaded of it | prompts in {format_size(arena_bytes)} |",
        "|---|---|---|---|---|---|",
    ]
    for name, entry, capacity in rows:
        prompt = capacity.prompt_bytes(tokens)
        caches = "<br>".join(words for words, _ in _caches(capacity))
        told = f"[{name}](https://huggingface.co/{entry['source']})" if entry.get("source") else name
        lines.append(
            f"| {told} | {caches} | {_kib(capacity.token_bytes)} | {size_text(prompt)} | "
            f"{size_text(capacity.load_bytes(tokens))} | {capacity.prompts_in(arena_bytes, tokens):,} |"
        )
    return "\n".join(lines)
