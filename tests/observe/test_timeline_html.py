from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from layerflow.observe.timeline import mib, ms, render
from layerflow.observe.trace import WHOLE_STEP, StepTrace

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Fails on a tag closed out of order; collects bars and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.bars: list[dict[str, str | None]] = []
        self.numbers: list[dict[str, str | None]] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.stack == [], f"never closed: {self.stack}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert len(given) == len(attrs), f"<{tag}> repeats an attribute"
        self.attributes.extend((tag, name, value) for name, value in attrs)
        if tag not in VOID:
            self.stack.append(tag)
        names = (given.get("class") or "").split()
        if tag == "rect" and "bar" in names:
            self.bars.append(given)
        if tag == "text" and "num" in names:
            self.numbers.append(given)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack[-1] == tag, f"</{tag}> closes {self.stack[-3:]}"
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] not in ("script", "style"):
            self.text += data


def step(label: str = "GQA: layer-wise load", layers: int = 6, emulated: bool = False) -> StepTrace:
    trace = StepTrace(step=9, session=4, label=label)
    for layer in range(layers):
        trace.add("load", layer, layer * 0.010, layer * 0.010 + 0.008, nbytes=8 << 20, blocks=128, emulated=emulated)
        trace.add("wait", layer, layer * 0.012, layer * 0.012 + 0.000003)
        trace.add("compute", layer, layer * 0.012 + 0.001, layer * 0.012 + 0.012)
        trace.add("save", layer, layer * 0.012 + 0.012, layer * 0.012 + 0.016, nbytes=1 << 20, blocks=16)
    return trace


def test_well_formed_and_self_contained() -> None:
    page = render([step(), step("bulk", emulated=True)], "title", ["a note"])
    parsed = Page(page)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", page, re.IGNORECASE)
    assert not [found for found in parsed.attributes if found[1] in ("src", "href", "srcset", "action", "data")]
    assert not [found for found in parsed.attributes if found[0] == "link"]
    assert "$" not in page, "a placeholder was left"


def test_every_span_appears_once() -> None:
    traces = [step(), step("bulk"), step("cold")]
    traces[1].spans.reverse()
    traces[2].add("link", 2, 0.0, 0.5, nbytes=10)
    traces[2].add("load", WHOLE_STEP, 0.3, 0.3)
    parsed = Page(render(traces, "t"))
    drawn = sorted((bar["data-name"] or "") for bar in parsed.bars)
    expected = sorted(
        f"{span.lane}, " + ("all layers" if span.layer == WHOLE_STEP else f"layer {span.layer}")
        for trace in traces
        for span in trace.spans
    )
    assert drawn == expected
    assert all(float((bar["width"] or "").rstrip("%")) > 0 for bar in parsed.bars), "SVG hides a width of 0"


def test_traces_share_one_time_scale_and_start_at_zero() -> None:
    short, long = StepTrace(1, 1, "short"), StepTrace(2, 1, "long")
    short.add("compute", 0, 500.0, 500.1)
    long.add("compute", 0, 7.0, 7.4)
    first, second = Page(render([short, long], "t")).bars
    assert (first["x"], second["x"]) == ("0.0000%", "0.0000%")
    ratio = float((second["width"] or "").rstrip("%")) / float((first["width"] or "").rstrip("%"))
    assert ratio == pytest.approx(4, rel=1e-3)


def test_bars_stay_inside_the_plot() -> None:
    for bar in Page(render([step()], "t")).bars:
        left, width = (float((bar[name] or "").rstrip("%")) for name in ("x", "width"))
        assert left >= 0
        assert left + width <= 100


def test_tooltip_fields_have_units() -> None:
    trace = StepTrace(1, 1, "t")
    trace.add("load", 3, 10.0, 10.004, nbytes=8 << 20, blocks=1280, emulated=True)
    trace.add("compute", 3, 10.001, 10.002)
    load = next(bar for bar in Page(render([trace], "t")).bars if "load" in (bar["class"] or ""))
    assert load["data-start"] == "0 ms"
    assert load["data-duration"] == "4.00 ms"
    assert load["data-bytes"] == "8.0 MiB in 1,280 blocks"
    assert load["data-rate"] == "2.10 GB/s"
    assert load["data-link"] == "emulated"


def test_emulated_link_is_said_only_where_it_is() -> None:
    assert "emulated link" in Page(render([step(emulated=True)], "t")).text
    assert "emulated link" not in Page(render([step()], "t")).text


def test_numbers_hide_where_they_do_not_fit() -> None:
    trace = StepTrace(1, 1, "t")
    trace.add("compute", 11, 0.0, 1.0)
    trace.add("compute", 12, 1.0, 1.0001)
    wide, narrow = Page(render([trace], "t")).numbers
    assert wide["class"] == "num"
    assert narrow["class"] == "num off"


def test_labels_title_and_notes_are_escaped() -> None:
    evil = "<script>alert('x')</script> & \"q\" $title ${x}"
    parsed = Page(render([step(evil)], evil, [evil]))
    assert parsed.text.count(evil) >= 4, "title, heading, note, table and section show the text itself"
    assert ("svg", "aria-label", evil) in parsed.attributes


def test_figures_are_in_the_table() -> None:
    trace = StepTrace(1, 1, "case")
    trace.add("load", 0, 0.0, 0.010, nbytes=1 << 20)
    trace.add("wait", 0, 0.0, 0.002)
    trace.add("compute", 0, 0.002, 0.030)
    text = Page(render([trace], "t")).text
    for said in ("80.0%", "10.0", "2.00", "8.00", "transfer ms", "rate GB/s"):
        assert said in text


def test_without_traces_or_spans() -> None:
    Page(render([], "empty"))
    parsed = Page(render([StepTrace(1, 1, "idle")], "t"))
    assert "nothing moved" in parsed.text
    assert parsed.bars == []


def test_many_parallel_spans_become_thin_rows() -> None:
    trace = StepTrace(1, 1, "threads")
    for lane in range(5):
        trace.add("load", lane, 0.0, 1.0)
    bars = Page(render([trace], "t")).bars
    assert len({bar["y"] for bar in bars}) == 5


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.004, "0.004"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_milliseconds(value: float, text: str) -> None:
    assert ms(value) == text


def test_mebibytes() -> None:
    assert [mib(1 << 10), mib(3 << 20), mib(2048 << 20)] == ["0.001", "3.0", "2,048"]
