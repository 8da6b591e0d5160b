"""Where settings come from: the TOML file, the environment, overrides; and what users call them elsewhere.

Each source is brought to the same shape, ``{section: {key: value}}`` with layerflow's own names
(``pool.disk`` for the section in a section), before sources are merged: a flag under layerflow's name
then beats a file that uses an alias. A source keeps what it does not understand as problems, so that unknown
keys and wrong values are told together.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings

from layerflow.config.fields import marks, shown
from layerflow.errors import ConfigError

# What users of LMCache, of vLLM-Ascend's AscendStore and of SGLang's HiCache have in their files, and write here.
#
# Keys that mean the same under another name are :data:`layerflow.config.sources.ALIASES`; these are the others: the
# value is written in another way, or there is nothing to set.


_ENGINE_SIDE = "it belongs to the engine: write it into vLLM's kv_connector_extra_config (docs/vllm.md)"
_SIZE = 'write pool.size with its unit, "20GiB" (pool_size where vLLM embeds the server)'
_PEERS = "other hosts' servers are listed in peers.attach (docs/peers.md); remove this key"
_NO_PORT = "scheduler and workers meet at `endpoint`, the server's server.endpoint; remove this key"
_NO_CONTROLLER = "there is no controller; remove this key"
_PARTITIONS = "engines tell each other their pipeline stages, even or not (docs/pd.md); remove this key"
_SEGMENT_SIZE = 'write pool.mooncake.segment_size, "1GiB"'

FOREIGN = {
    # LMCache
    "chunk_size": "write chunk_tokens into vLLM's kv_connector_extra_config; by default it is about 256",
    "local_cpu": "the arena in this host's memory is always there; remove this key, and write pool.size",
    "max_local_cpu_size": _SIZE,
    "local_device": "the arena is in this host's memory; remove this key, and write pool.size",
    "local_disk": 'write pool.disk.path = "/var/lib/layerflow", without file://',
    "max_local_disk_size": 'write pool.disk.capacity with its unit, "100GiB"',
    "remote_url": 'write pool.backend, "redis" or "mooncake", and its address: pool.redis.url or pool.mooncake.master',
    "remote_serde": "objects are stored as the engine has them; remove this key",
    "save_unfull_chunk": "write transfer.discard_partial_chunks, which is the opposite",
    "enable_p2p": _PEERS,
    "enable_pd": "see docs/pd.md: vLLM's kv_role and `layerflow proxy` make it so; remove this key",
    "enable_nixl": 'write peers.link = "nixl" (docs/peers.md)',
    "enable_blending": "only prefixes are reused; remove this key",
    "enable_controller": _NO_CONTROLLER,
    "controller_url": _NO_CONTROLLER,
    "lmcache_instance_id": "engines name themselves; remove this key",
    "cache_policy": "eviction adapts itself (CAR); remove this key",
    "eviction_policy": "eviction adapts itself (CAR); remove this key",
    "l1_size_gb": _SIZE,
    "numa_mode": 'write pool.numa = "auto", "off" or the number of a node',
    "pipelined_backend": 'loads overlap compute in transfer.mode "layerwise" and "auto"; remove this key',
    "pre_caching_hash_algorithm": "equal tokens have equal keys on every host; remove this key",
    # AscendStore, and the mooncake.json that it reads
    "lookup_rpc_port": _NO_PORT,
    "mooncake_rpc_port": _NO_PORT,
    "layerwise_num_shared_buffers": f"all layers share one arena; {_SIZE}",
    "layerwise_independent_layers": "no layers share memory of the device; remove this key",
    "memcache_dp_init_barrier": "engines attach to one server and wait for no other; remove this key",
    "qos_priority": "copies have no priority of their own, transfer.h2d_stagger_us keeps ranks apart; remove this key",
    "prefill_pp_size": _PARTITIONS,
    "prefill_pp_layer_partition": _PARTITIONS,
    "local_hostname": "write pool.mooncake.hostname",
    "master_server_address": 'write pool.mooncake.master = "host:50051"',
    "global_segment_size": _SEGMENT_SIZE,
    "local_buffer_size": "the arena is the buffer; remove this key, and write pool.size",
    "device_name": "write pool.mooncake.devices",
    # HiCache
    "enable_hierarchical_cache": "the arena is always there; remove this key, and write pool.size",
    "hicache_ratio": f"the arena's size is given in bytes: {_SIZE}",
    "hicache_size": _SIZE,
    "hicache_write_policy": "what is computed is always stored, beside compute; remove this key",
    "hicache_io_backend": 'write transfer.copy_way = "auto", "ranges" or "kernel"',
    "hicache_mem_layout": "objects are stored layer by layer; remove this key",
    "hicache_storage_backend": 'write pool.backend, or pool.disk.path for "file"',
    "hicache_storage_backend_extra_config": "write the keys of [pool.NAME], the section of that backend",
    "hicache_storage_prefetch_policy": "write pool.lookup_timeout_ms and pool.fetch_timeout_ms",
    # Keys of layerflow's own connector
    "load_async": _ENGINE_SIDE,
    "consumer_is_to_load": _ENGINE_SIDE,
    "consumer_is_to_put": _ENGINE_SIDE,
    "chunk_tokens": _ENGINE_SIDE,
    "compressor_states": _ENGINE_SIDE,
    "lookup_wait_ms": _ENGINE_SIDE,
    "model_content": _ENGINE_SIDE,
    "kv_connector_extra_config": "that is vLLM's; `layerflow config` lists the settings of the server",
}


def what_to_write(key: str) -> str:
    """What to do with a key of another system, however it is spelled there; "" = no other system has it."""
    bare = key.lower().lstrip("-").replace("-", "_")
    return FOREIGN.get(bare) or FOREIGN.get(bare.removeprefix("lmcache_"), "")


ENV_PREFIX = "LAYERFLOW_"
Values = dict[str, dict[str, Any]]

# What the layerwise KV pool connectors of serving engines call these settings.
ALIASES = {
    "layerwise_prefetch_layers": ("transfer", "prefetch_layers"),
    "layerwise_max_transfer_blocks": ("transfer", "max_transfer_blocks"),
    "layerwise_max_transfer_bytes": ("transfer", "max_transfer_bytes"),
    "h2d_stagger_us": ("transfer", "h2d_stagger_us"),
    "discard_partial_chunks": ("transfer", "discard_partial_chunks"),
    "save_decode_cache": ("transfer", "save_decode_cache"),
    "backend": ("pool", "backend"),
}
LAYERWISE_MODES = {True: "layerwise", False: "bulk"}
"""``transfer.mode`` by ``use_layerwise``, the switch of other connectors."""
_ALIAS_TABLES = ("", "transfer")
_NEAR = 0.75
"""Least similarity (difflib) of a name that is proposed instead of an unknown one."""
_TOML_PLACE = re.compile(r"^(?P<what>.*) \(at line (?P<line>\d+), column \d+\)$")
_ASSIGNMENT = re.compile(r"\s*(?P<key>[\w.-]+)\s*=\s*(?P<value>[^#]*?)\s*(?:#.*)?")
_YAML_ADVICE = "that is YAML; TOML has key = value, and [section] above the keys of a section"
_YAML = re.compile(r"\s*(?:- )?[\w.-]+\s*:(?:\s.*|)")


class Source(NamedTuple):
    """What one source sets, and what in it is no setting: a line per problem, with the source's name."""

    values: Values
    problems: list[str]


def env_name(section: str, key: str) -> str:
    """The environment variable that sets ``section.key``."""
    return f"{ENV_PREFIX}{section}__{key}".replace(".", "__").upper()


def sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The section classes of a settings class by dotted name, each before those inside it."""
    return dict(_sections(model, ""))


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for key, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield prefix + key, field.annotation
            yield from _sections(field.annotation, f"{prefix}{key}.")


def own_keys(section: type[BaseModel]) -> list[str]:
    """A section's keys, without the sections inside it."""
    inner = dict(_sections(section, ""))
    return [key for key in section.model_fields if key not in inner]


def known_keys(model: type[BaseModel]) -> list[str]:
    """Every ``section.key``."""
    return [f"{name}.{key}" for name, section in sections(model).items() for key in own_keys(section)]


def read_toml(model: type[BaseSettings], path: Path, content: bytes | None = None) -> Source:
    """The file's tables under layerflow's names.

    :param content: its bytes, where they have been read already.
    :raises ConfigError: if it cannot be read, or is not TOML.
    """
    if content is None and not path.is_file():
        raise ConfigError(f"{path}: {'is no file' if path.exists() else 'no such configuration file'}")
    try:
        text = (path.read_bytes() if content is None else content).decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}; save it as UTF-8") from None
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {_in_its_line(model, text, str(error))}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, hundreds of nested arrays
        raise ConfigError(f"{path}: not valid TOML: {str(error).partition(';')[0]}") from None
    if place := _overlong(raw):
        raise ConfigError(f"{path}: not valid TOML: {place} has an integer of more than 64 bits")
    return _canonical(model, raw, str(path))


def _overlong(raw: Mapping[str, Any]) -> str:
    """The key of an integer beyond the 64 bits that TOML 1.0 gives to one; "" = there is none.

    Python reads hexadecimal ones of any length, and cannot print those of more than 4,300 decimal digits.
    """
    found: list[tuple[str, Any]] = list(raw.items())
    while found:
        place, value = found.pop()
        if isinstance(value, Mapping):
            found += [(f"{place}.{key}", inner) for key, inner in value.items()]
        elif isinstance(value, list):
            found += [(place, inner) for inner in value]
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            return place
    return ""


def _in_its_line(model: type[BaseModel], text: str, error: str) -> str:
    """The error of the parser with the line that it is about, and what to write there where that can be known.

    A secret is not told: the message may go to a log, and to the server's status.
    """
    place = _TOML_PLACE.match(error)
    if place is None:
        return error
    number = int(place["line"])
    above, line = ["", *text.split("\n")][number - 1 : number + 1]
    line = line.strip()
    assigned, secrets = _ASSIGNMENT.fullmatch(line), _secrets(model)
    if assigned is not None and assigned["key"].rpartition(".")[2] in secrets:
        line = f"{assigned['key']} = {'***' if assigned['value'] else ''}".rstrip()
    elif _names(line, secrets) or (assigned is None and _names(above, secrets)):
        what = _YAML_ADVICE if _YAML.fullmatch(line) else place["what"]
        return f"line {number}: {what} (the line is not shown: a secret may be in it)"
    return f"line {number}: {line}: {_mending(line) or place['what']}"


def _names(line: str, keys: Container[str]) -> bool:
    """Is one of these keys named anywhere in the line, however it is written?"""
    return any(word in keys for word in re.findall(r"\w+", line.lower()))


def _mending(line: str) -> str:
    """What is wrong with a line that is no TOML, and the line as it should be; "" where that is not known."""
    if _YAML.fullmatch(line):
        return _YAML_ADVICE
    found = _ASSIGNMENT.fullmatch(line)
    if found is None:
        return ""
    key, value = found["key"], found["value"]
    if not value:
        return f"no value; remove the line, or write {key} = and a value"
    if value in ("True", "False"):
        return f"write {key} = {value.lower()}"
    quoted = f'{key} = "{value.strip(chr(34) + chr(39))}"'
    return f"text needs quotes: {quoted}" if _is_toml(quoted) and not _is_toml(line) else ""


def _secrets(model: type[BaseModel]) -> set[str]:
    """Names of the keys whose values are not shown, in whatever section."""
    return {
        key for section in sections(model).values() for key in own_keys(section) if marks(section, key).get("secret")
    }


def _is_toml(line: str) -> bool:
    try:
        tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return False
    return True


def read_environment(model: type[BaseSettings]) -> Source:
    """The ``LAYERFLOW_SECTION__KEY`` variables under layerflow's names.

    A variable without the double underscore is not ours: Kubernetes sets ``LAYERFLOW_PORT`` and the
    like for a service of that name.
    """
    known = sections(model)
    found: dict[str, Any] = {}
    problems: list[str] = []
    for variable, value in os.environ.items():
        if not variable.upper().startswith(ENV_PREFIX):
            continue
        place = variable[len(ENV_PREFIX) :].lower().replace("__", ".")
        if place in known:
            problems.append(f"{variable}: {place} is a section; write {variable}__KEY=value")
        elif "." in place and place.partition(".")[0] not in known:
            problems.append(f"{variable}: {_unknown(model, place)}")
        elif "." in place:
            found[place] = value
    values, others = _canonical(model, found, "environment")
    return Source(values, problems + others)


def read_overrides(model: type[BaseSettings], overrides: Mapping[str, Any], called: str) -> Source:
    """Flags: ``{"section.key": value}`` or ``{"section": {"key": value}}``; None = not given.

    :param called: what messages call them.
    """
    return _canonical(model, {name: value for name, value in overrides.items() if value is not None}, called)


def merge(sources: Iterable[Values]) -> Values:
    """One set of values; later sources win key by key."""
    merged: Values = {}
    for source in sources:
        for section, table in source.items():
            merged.setdefault(section, {}).update(table)
    return merged


def nested(values: Values) -> dict[str, Any]:
    """`values` with the sections in sections where the settings classes have them."""
    tree: dict[str, Any] = {}
    for section, table in values.items():
        inner = tree
        for name in section.split("."):
            inner = inner.setdefault(name, {})
        inner.update(table)
    return tree


def explain(model: type[BaseModel], error: ValidationError, origin: Mapping[str, str] | None = None) -> str:
    """One line per problem: key, value, where it came from, what is wrong.

    :param origin: where a key's value was set, by ``section.key``.
    """
    lines = []
    for problem in error.errors(include_url=False):
        place = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(_unknown(model, place))
            continue
        message = problem["msg"].removeprefix("Value error, ").replace("Input should", "should")
        if problem["type"].startswith("bool_"):
            message = "should be true or false"
        if not place or not isinstance(problem["input"], str | int | float):
            lines.append(f"{place}: {message}" if place else message)
            continue
        where = f" (set by {origin[place]})" if origin and place in origin else ""
        value = "***" if place.rpartition(".")[2] in _secrets(model) else shown(problem["input"])
        lines.append(f"{place} = {value}{where}: {message}")
    return "\n".join(lines)


def _unknown(model: type[BaseModel], place: str) -> str:
    """`place` is no setting: what it is called here, or what its section has."""
    section, _, bare = place.rpartition(".")
    if advice := what_to_write(bare):
        return f"{place} is not a setting: {advice}"
    if close := _closest(model, section, bare):
        return f"{place} is not a setting; did you mean {close}?"
    tables = sections(model)
    if section in tables:
        return f"{place} is not a setting; [{section}] has {', '.join(own_keys(tables[section]))}"
    return f"{place} is not a setting; `layerflow config` lists every key"


def _closest(model: type[BaseModel], section: str, bare: str) -> str:
    """The setting or section that ``section.bare`` may mean; "" = none is close.

    A key of the same section comes first, then the same key elsewhere, then a section, then a similar key elsewhere.
    """
    tables = sections(model)
    by_key: dict[str, list[str]] = {}
    for key in known_keys(model):
        by_key.setdefault(key.rpartition(".")[2], []).append(key)
    for old, new in ALIASES.items():
        by_key.setdefault(old, []).append(".".join(new))
    by_table = {name.rpartition(".")[2]: name for name in tables} | {name: name for name in tables}
    place = f"{section}.{bare}" if section else bare

    def near(name: str, names: Iterable[str]) -> str:
        return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=_NEAR)), "")

    if section in tables and (found := near(bare, own_keys(tables[section]))):
        return f"{section}.{found}"
    if bare not in by_key and (found := near(place, by_table)) and by_table[found] != section:
        return by_table[found]
    same = by_key.get(bare) or by_key.get(near(bare, by_key), [])
    return max(same, key=lambda key: difflib.SequenceMatcher(None, place, key).ratio(), default="")


def _flat(known: Container[str], raw: Mapping[str, Any], table: str = "") -> Iterator[tuple[str, Any]]:
    """``section.key`` and value of everything in `raw`; a mapping that is no section stays a value."""
    for name, value in raw.items():
        place = f"{table}.{name}" if table else name
        if place in known and isinstance(value, Mapping):
            yield from _flat(known, value, place)
        else:
            yield place, value


MOST_PROBLEMS = 100
"""Of one source, whose unknown keys are told; the first ones are enough to begin with."""


def _canonical(model: type[BaseModel], raw: Mapping[str, Any], origin: str) -> Source:
    """Rename aliases, and keep out what layerflow does not have."""
    known = {name: own_keys(section) for name, section in sections(model).items()}
    values: Values = {}
    problems: list[str] = []

    def put(place: str, section: str, key: str, value: Any) -> None:
        if key in values.setdefault(section, {}):
            problems.append(f"{place} and {section}.{key} are the same setting; keep one of them")
        values[section][key] = value

    flat = [(*place.rpartition(".")[::2], value) for place, value in dict(_flat(known, raw)).items()]
    # A section's own keys first, so that an alias finds what it repeats.
    flat.sort(key=lambda item: item[1] not in known.get(item[0], ()))
    for table, key, value in flat:
        place = f"{table}.{key}" if table else key
        if key in known.get(table, ()):
            put(place, table, key, value)
        elif place in known:
            problems.append(f"{place} is a section; write [{place}] and its keys below it")
        elif table in _ALIAS_TABLES and key in ALIASES:
            put(place, *ALIASES[key], value)
        elif table in _ALIAS_TABLES and key == "use_layerwise":
            _use_layerwise(values.setdefault("transfer", {}), place, value, problems)
        elif len(problems) < MOST_PROBLEMS:  # looking for what was meant takes a millisecond each
            problems.append(_unknown(model, place))
    return Source(values, [f"{origin}: {problem}" for problem in problems])


def _use_layerwise(transfer: dict[str, Any], place: str, value: Any, problems: list[str]) -> None:
    """Set the mode by the switch of other connectors: true is "layerwise", false "bulk"."""
    switch = {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())
    if switch is None:
        problems.append(f"{place} = {shown(value)}: should be true or false")
        return
    mode = LAYERWISE_MODES[switch]
    if transfer.setdefault("mode", mode) != mode:
        problems.append(
            f"{place} = {str(switch).lower()} is mode = {mode!r} and contradicts transfer.mode = "
            f"{transfer['mode']!r}; keep mode"
        )
