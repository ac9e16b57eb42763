"""Charts: points where the numbers say, sampling that is true to what it samples."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np

from gpuslice.profiler.axes import Axis, number_axis
from gpuslice.profiler.charts import Line, cumulative, gantt, holders, label_width, line_chart, line_key

UNIT = Axis("x", 0.0, 10.0, {0.0: "0", 10.0: "10"})


def test_the_cumulative_share_of_values() -> None:
    line = cumulative("a", np.array([4.0, np.nan, 1.0, 2.0, 3.0]), points=5)
    assert line.x.tolist() == [1, 1, 2, 3, 4]
    assert line.y.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert cumulative("none", np.array([np.nan])).x.size == 0


def test_lines_go_where_their_points_are() -> None:
    line = Line("<a>", np.array([0.0, 10.0]), np.array([0.0, 1.0]))
    chart = ElementTree.fromstring(line_chart("t", UNIT, [line], height=148))
    (drawn,) = chart.iter("polyline")
    assert drawn.get("points") == "0.0,100.0 1000.0,0.0"
    assert drawn[0].text == "<a>"


def test_points_beyond_the_axis_are_drawn_beyond_it() -> None:
    line = Line("a", np.array([5.0, 90.0]), np.array([0.5, 0.6]))
    (drawn,) = ElementTree.fromstring(line_chart("t", UNIT, [line])).iter("polyline")
    _, (across, _) = (point.split(",") for point in (drawn.get("points") or "").split())
    assert float(across) > 1000, "the line leaves the chart, it does not end at its edge"


def test_more_lines_than_colours_are_told_apart_by_dashes_in_chart_and_key() -> None:
    lines = [Line(str(i), np.array([0.0]), np.array([0.0])) for i in range(9)]
    for text, tag in ((line_chart("t", UNIT, lines), "polyline"), (line_key(lines), "path")):
        drawn = list(ElementTree.fromstring(text).iter(tag))
        looks = {(line.get("stroke"), line.get("stroke-dasharray")) for line in drawn}
        assert len(looks) == 9


def test_a_line_keeps_its_own_colour_and_dashes() -> None:
    line = Line("a", np.array([0.0]), np.array([0.0]), "#123456", dashed=True)
    (drawn,) = ElementTree.fromstring(line_chart("t", UNIT, [line])).iter("polyline")
    assert (drawn.get("stroke"), drawn.get("stroke-dasharray")) == ("#123456", "5 3")


def test_holders_at_the_middle_of_each_stretch() -> None:
    spans = [(7, 0.0, 4.0, (0, 1)), (8, 4.0, 4.9, (0,)), (9, 4.0, 10.0, (1,))]
    assert holders(spans, 3, 5, 10.0).tolist() == [[7, 7, -1, -1, -1], [7, 7, 9, 9, 9], [-1] * 5]
    assert holders([], 1, 2, 0.0).tolist() == [[-1, -1]]


def test_a_gantt_has_one_path_per_holder_with_all_its_pieces() -> None:
    grid = np.array([[0, 0, 1, -1], [1, 0, 0, 1]])
    picture = ElementTree.fromstring(gantt("t", UNIT, grid, ["a", "<b>"], {0: "n" * 30, 1: "1"}))
    a, b = picture.iter("path")
    assert re.findall(r"M(\d) (\d).5h(\d)", a.get("d") or "") == [("0", "0", "2"), ("1", "1", "2")]
    assert re.findall(r"M(\d) (\d).5h(\d)", b.get("d") or "") == [
        ("2", "0", "1"),
        ("0", "1", "1"),
        ("3", "1", "1"),
    ]
    assert b[0].text == "<b>"
    assert a.get("stroke") != b.get("stroke")
    names = [text.text for text in picture.iter("text") if text.get("text-anchor") == "end"]
    assert names == ["n" * 17 + "…", "1"]


def test_the_vertical_axis_has_its_unit_in_the_title_and_room_for_its_labels() -> None:
    up = number_axis("ms", 12_500.0)
    text = line_chart("t", UNIT, [], up=up)
    drawn = ElementTree.fromstring(text)
    assert drawn.findtext("h3") == "t, ms"
    labels = [text.text or "" for text in drawn.iter("text") if text.get("text-anchor") == "end"]
    assert labels == list(up.marks.values())
    assert f"margin-left:{label_width(labels):g}px" in text
    assert label_width(labels) > 7 * max(map(len, labels))
