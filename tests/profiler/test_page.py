"""The page: well-formed, self-contained, and showing what the timeline says."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from gpuslice.profiler.html import Bad, Good, Table, render_table
from gpuslice.profiler.page import Paint, page, picture
from gpuslice.profiler.timeline import Holding, Span, Timeline

PAINTS = {"slice": Paint(), "suspend": Paint("#c62828", 0.5)}
VOID = {"meta"}


class Reader(HTMLParser):
    """Checks nesting and collects text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(document: str) -> Reader:
    reader = Reader()
    reader.feed(document)
    reader.close()
    assert reader.open == []
    return reader


def example_timeline() -> Timeline:
    timeline = Timeline()
    spans = timeline.track("devices", "cpu:0").spans
    spans.append(Span("<b> & #1", "slice", 0.0, 2.0, "<b> & ", {"steps": 3}))
    spans.append(Span("suspend", "suspend", 2.0, 2.0001, "<b> & "))
    return timeline


def example() -> str:
    table = Table("Results", ("job", "equal"), [("<b> & ", Good("yes")), ("-m c", Bad("NO"))])
    return page("A & <title>", ["Lead <paragraph>."], example_timeline(), PAINTS, [table])


def test_the_picture_by_itself_shows_the_same_bars() -> None:
    root = ElementTree.fromstring(picture(example_timeline(), PAINTS))
    svg = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{svg}svg"
    bars = [bar for bar in root.iter(f"{svg}rect") if bar.get("class") == "bar"]
    assert [bar.findtext(f"{svg}title") for bar in bars] == [
        "<b> & #1: 0.000 s to 2.000 s (2000.0 ms)\nsteps: 3",
        "suspend: 2.000 s to 2.000 s (0.1 ms)",
    ]
    assert [text.text for text in root.iter(f"{svg}text")][-1] == "suspend", "it names what looks otherwise"
    in_page = [attributes for tag, attributes in read(example()).tags if attributes.get("class") == "bar"]
    assert [bar.attrib for bar in bars] == in_page


def test_memory_is_a_strip_under_its_device_as_high_as_it_is_much() -> None:
    timeline = example_timeline()
    bare = ElementTree.fromstring(picture(timeline, PAINTS))
    track = timeline.track("devices", "cpu:0")
    track.holdings += [Holding("<b> & ", 0.0, 1.0, 200_000_000), Holding("<b> & ", 1.5, 2.0, 50_000_000)]
    root = ElementTree.fromstring(picture(timeline, PAINTS))
    svg = "{http://www.w3.org/2000/svg}"
    large, small = (one for one in root.iter(f"{svg}rect") if one.get("class") == "level")
    assert large.findtext(f"{svg}title") == "<b> & : 200.0 MB of device memory, 0.000 s to 1.000 s"
    x, y, width, height = (
        [float(one.get(name, "nan").rstrip("%")) for one in (large, small)]
        for name in ("x", "y", "width", "height")
    )
    assert height[0] == pytest.approx(4 * height[1])
    assert y[0] + height[0] == pytest.approx(y[1] + height[1])
    assert width[0] == pytest.approx(2 * width[1], abs=0.02)
    assert x[1] > x[0] + width[0]  # nothing is held in between
    bar = next(one for one in root.iter(f"{svg}rect") if one.get("class") == "bar")
    assert float(bar.get("y", "nan")) + float(bar.get("height", "nan")) < y[0]
    grown = [float(one.get("viewBox", "").split()[3]) for one in (bare, root)]
    assert grown[1] >= grown[0] + height[0]
    assert "to 200.0 MB" in [text.text for text in root.iter(f"{svg}text")]
    assert not [one for one in bare.iter() if one.get("class") == "level"]


def test_the_document_is_well_formed_and_says_everything() -> None:
    reader = read(example())
    assert any(text.startswith("<b> & #1: 0.000 s to 2.000 s (2000.0 ms)\nsteps: 3") for text in reader.text)
    for expected in ("A & <title>", "Lead <paragraph>.", "Results", "yes", "NO", "cpu:0", "devices"):
        assert expected in reader.text


def test_it_needs_no_network_and_no_script() -> None:
    document = example()
    assert not re.search(r"https?:|//|src=|url\(|<script|<link|@import", document)


def test_bars_lie_in_the_picture_and_can_be_seen() -> None:
    bars = [attributes for tag, attributes in read(example()).tags if attributes.get("class") == "bar"]
    _, short = bars
    assert {str(bar["x"])[-1] for bar in bars} == {"%"}, "so that they lie in it in every window"
    for bar in bars:
        assert float((bar["x"] or "").rstrip("%")) + float((bar["width"] or "").rstrip("%")) <= 100
    assert float((short["width"] or "").rstrip("%")) >= 0.1
    assert short["fill"] == "#c62828"


@pytest.mark.parametrize("end_s", [1e-4, 0.3, 7.0, 86_400.0])
def test_the_axis_has_a_handful_of_round_ticks(end_s: float) -> None:
    timeline = Timeline()
    timeline.track("jobs", "a").spans.append(Span("a", "slice", 0.0, end_s, "a"))
    *ticks, title = re.findall(r'text-anchor="middle">([^<]+)<', page("t", [], timeline, PAINTS, []))
    assert 3 <= len(ticks) <= 9
    assert ticks[0] == "0"
    assert title.startswith("time, ")


def test_nothing_to_show_is_no_error() -> None:
    read(page("t", [], Timeline(), PAINTS, []))


def test_the_key_has_whose_bars_are_whose_and_what_looks_otherwise() -> None:
    (key,) = re.findall(r'<ul class="key">.*?</ul>', example())
    assert re.findall(r"</svg>([^<]*)<", key) == ["&lt;b&gt; &amp; ", "suspend"]


def test_memory_of_several_devices_is_to_one_scale() -> None:
    timeline = example_timeline()
    for device, nbytes in (("cpu:0", 200_000_000), ("cpu:1", 50_000_000)):
        timeline.track("devices", device).holdings.append(Holding("<b> & ", 0.0, 1.0, nbytes))
    root = ElementTree.fromstring(picture(timeline, PAINTS))
    levels = [one for one in root.iter("{http://www.w3.org/2000/svg}rect") if one.get("class") == "level"]
    large, small = (float(one.get("height", "nan")) for one in levels)
    assert large == pytest.approx(4 * small)


def test_columns_of_numbers_are_aligned_on_the_right() -> None:
    rows = [("a", "1.50", "0.2 to 0.3", "1"), ("b", "–", "–", "x")]
    drawn = render_table(Table("t", ("job", "ms", "interval", "mixed"), rows, "What it <means>."))
    assert re.findall(r"<th( [^>]*)?>", drawn) == ["", ' class="number"', ' class="number"', ""]
    assert '<td class="number">0.2 to 0.3</td>' in drawn
    assert "What it &lt;means&gt;." in drawn


def test_long_names_may_be_broken() -> None:
    name = "examples/language_model/train.py --lr 1"
    assert "examples/<wbr>language_<wbr>model/<wbr>train.py" in render_table(Table("t", ("job",), [(name,)]))


def test_only_cells_that_are_said_to_be_news_have_a_colour() -> None:
    rows = [("-m pkg.train", Good("+yes")), ("+1", Bad("-NO"))]
    drawn = render_table(Table("Results", ("job", "equal"), rows))
    assert '<tr><td>-m pkg.train</td><td class="good">+yes</td></tr>' in drawn
    assert '<tr><td>+1</td><td class="bad">-NO</td></tr>' in drawn
