"""docs/operations.md lists every metric and every log event."""

import re
import time

from pages import ROOT, code, page, rows, sections

from layerflow.config.proxy import ProxySettings
from layerflow.connectors.vllm.worker.figures import FIGURES
from layerflow.observe.metrics import Metrics
from layerflow.proxy.context import BodyBudget, ProxyMetrics
from layerflow.proxy.instances import Registry
from layerflow.wire.rights import NEEDED, Role

TEXT = page("operations.md")


def exported() -> dict[str, str]:
    """Every metric's name, as Prometheus has it, and its type."""
    found = re.findall(r"^# TYPE (\S+) (\w+)$", Metrics().render().decode(), re.M)
    return dict(found)


def of_the_proxy() -> dict[str, str]:
    """The same of the proxy."""
    text = ProxyMetrics(Registry(ProxySettings(), time.monotonic), BodyBudget(1)).render(addresses=True).decode()
    return dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.M))


def test_every_metric_is_there_with_its_type_and_unit():
    table = rows(sections(TEXT)["Metrics"])
    assert table[0] == ["metric", "type", "unit", "meaning"]
    assert {code(cells[0]): cells[1] for cells in table[1:]} == exported()
    for name, _, unit, _ in table[1:]:
        for suffix, expected in (("bytes", "bytes"), ("seconds", "s"), ("objects", "objects"), ("tokens", "tokens")):
            if code(name).removesuffix("_total").endswith(f"_{suffix}"):
                assert unit == expected, name


def test_metrics_named_elsewhere_exist():
    known = {name.removesuffix("_total") for name in exported()} | {f"layerflow_vllm_{name}" for name in FIGURES}
    known |= {name.removesuffix("_total") for name in of_the_proxy()}
    for path in (ROOT / "docs").glob("*.md"):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"\blayerflow_(?!cli|engine|testing)\w+", re.sub(r"/\S*layerflow_\S*", "", text)):
            assert name.removesuffix("_total") in known, f"{path.name}: {name}"


def test_every_message_of_a_client_stands_behind_the_role_that_it_asks_for():
    roles = {"any": None, "none, this machine only": Role.LOCAL}
    told = {}
    for role, _, messages in (cells for cells in rows(sections(TEXT)["Who may do what"]) if len(cells) == 3):
        if role not in ("role", "door") and "`" in messages:
            for name in re.findall(r"`(\w+)`", messages):
                told[name] = roles[role] if role in roles else Role(code(role).partition("=")[0])
    assert told == {kind.__name__: role for kind, role in NEEDED.items()}


def test_every_log_event_is_explained():
    told = {name for cells in rows(sections(TEXT)["Log events"]) for name in re.findall(r"`(\w+)`", cells[0])}
    said = set()
    for room in ("server", "hosts", "agent", "pool", "ops", "device", "observe", "system", "connectors"):
        for path in (ROOT / "src/layerflow" / room).rglob("*.py"):
            said |= set(
                re.findall(
                    r'\b_?(?:log|level)\.?(?:info|warning|error|exception|critical)?\(\s*(?:level,\s*)?"([a-z_]+)"',
                    path.read_text(encoding="utf-8"),
                )
            )
    assert said - told == set()
    assert told - said == set()


def test_every_figure_of_the_vllm_connector_is_explained():
    told = set(re.findall(r"`layerflow_vllm_(\w+)_total`", page("vllm.md")))
    assert told == set(FIGURES)


def test_the_proxys_metrics_and_log_events_are_explained():
    text = page("proxy.md")
    table = rows(sections(text)["Metrics"])
    metrics = [cells for cells in table if cells[0].startswith("`layerflow_")]
    assert {code(cells[0]): cells[1] for cells in metrics} == of_the_proxy()
    told = {name for cells in table if len(cells) == 2 for name in re.findall(r"`(\w+)`", cells[0])}
    said = set()
    for path in (ROOT / "src/layerflow/proxy").rglob("*.py"):
        said |= set(re.findall(r'\b_?log(?:\.\w+)?\(\s*"([a-z_]+)"', path.read_text(encoding="utf-8")))
    assert said == told
