"""Charts: points where the numbers say, sampling that is true to what it samples."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from gpuslice.profiler.charts import (
    Axis,
    Line,
    cumulative,
    duration,
    gantt,
    holders,
    line_chart,
    log_axis,
    time_axis,
)

UNIT = Axis("x", 0.0, 10.0, {0.0: "0", 10.0: "10"})


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (0.25, "0.25 s"), (90, "1.5 min"), (7200, "2 h"), (864_000, "10 d")]
)
def test_durations_in_the_unit_that_reads_best(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("end_s", [0.5, 40, 5000, 90_000, 5e6, 0])
def test_time_axes_have_a_handful_of_round_marks(end_s: float) -> None:
    marks = time_axis("time", end_s).marks
    assert 5 <= len(marks) <= 11
    assert max(marks) <= (end_s or 1)


def test_logarithmic_axes_hold_all_that_can_be_shown() -> None:
    axis = log_axis("rho", np.array([0.0, 0.5, 50.0, np.inf, np.nan]), times=False)
    assert (axis.low < 0.5, axis.high > 50) == (True, True)
    assert list(axis.marks.values()) == ["1", "10", "0.5", "2", "5", "20", "50"]
    places = axis.place(np.array([axis.low, np.sqrt(axis.low * axis.high), np.inf]), 100)
    assert places == pytest.approx([0, 50, 100])


def test_the_cumulative_share_of_values() -> None:
    line = cumulative("a", np.array([4.0, np.nan, 1.0, 2.0, 3.0]), points=5)
    assert line.x.tolist() == [1, 1, 2, 3, 4]
    assert line.y.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert cumulative("none", np.array([np.nan])).x.size == 0


def test_lines_go_where_their_points_are() -> None:
    line = Line("<a>", np.array([0.0, 10.0]), np.array([0.0, 1.0]))
    chart = ElementTree.fromstring(line_chart("t", UNIT, [line], width=156, height=148))
    (drawn,) = chart.iter("polyline")
    assert drawn.get("points") == "44.0,108.0 144.0,8.0"
    assert drawn[0].text == "<a>"


def test_more_lines_than_colours_are_told_apart_by_dashes() -> None:
    lines = [Line(str(i), np.array([0.0]), np.array([0.0])) for i in range(9)]
    drawn = list(ElementTree.fromstring(line_chart("t", UNIT, lines)).iter("polyline"))
    looks = {(line.get("stroke"), line.get("stroke-dasharray")) for line in drawn}
    assert len(looks) == 9


def test_holders_at_the_middle_of_each_stretch() -> None:
    spans = [(7, 0.0, 4.0, (0, 1)), (8, 4.0, 4.9, (0,)), (9, 4.0, 10.0, (1,))]
    assert holders(spans, 3, 5, 10.0).tolist() == [[7, 7, -1, -1, -1], [7, 7, 9, 9, 9], [-1] * 5]
    assert holders([], 1, 2, 0.0).tolist() == [[-1, -1]]


def test_a_gantt_has_one_path_per_holder_with_all_its_pieces() -> None:
    grid = np.array([[0, 0, 1, -1], [1, 0, 0, 1]])
    picture = ElementTree.fromstring(gantt("t", UNIT, grid, ["a", "<b>"], ("0", "1")))
    a, b = picture.iter("path")
    assert re.findall(r"M(\d) (\d).5h(\d)", a.get("d") or "") == [("0", "0", "2"), ("1", "1", "2")]
    assert re.findall(r"M(\d) (\d).5h(\d)", b.get("d") or "") == [
        ("2", "0", "1"),
        ("0", "1", "1"),
        ("3", "1", "1"),
    ]
    assert b[0].text == "<b>"
    assert a.get("stroke") != b.get("stroke")


def test_the_vertical_axis_may_show_something_else_than_shares() -> None:
    drawn = ElementTree.fromstring(line_chart("t", UNIT, [], levels={0.0: "1 ms", 0.5: "10 ms"}))
    labels = [text.text for text in drawn.iter("text") if text.get("text-anchor") == "end"]
    assert labels == ["1 ms", "10 ms"]
