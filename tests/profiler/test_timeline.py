"""Timelines as Chrome traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gpuslice.profiler.timeline import Flow, Mark, Span, Timeline

from . import trace_format


def example() -> Timeline:
    timeline = Timeline()
    timeline.track("devices", "cpu:0").spans.append(
        Span("a #1", "slice", 0.5, 1.75, "a", {"steps": 3, "share": 0.123456})
    )
    timeline.track("jobs", "a").spans.append(Span("a #1", "slice", 0.5, 1.75, "a"))
    timeline.track("jobs", "b").spans.append(Span("b <suspend>", "suspend", 1.75, 1.751, "b"))
    return timeline


def test_a_track_is_made_once() -> None:
    timeline = example()
    assert timeline.track("jobs", "a") is timeline.tracks[1]
    assert [track.name for track in timeline.tracks] == ["cpu:0", "a", "b"]


def test_spans_become_complete_events_in_microseconds_on_named_tracks() -> None:
    events = example().chrome_events()
    complete = [event for event in events if event["ph"] == "X"]
    assert [(event["ts"], event["dur"]) for event in complete] == [
        (500_000.0, 1_250_000.0),
        (500_000.0, 1_250_000.0),
        (1_750_000.0, 1_000.0),
    ]
    assert complete[0]["args"] == {"steps": 3, "share": 0.123456}
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert [names[event["pid"], event["tid"]] for event in complete] == ["cpu:0", "a", "b"]
    groups = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [groups[event["pid"]] for event in complete] == ["devices", "jobs", "jobs"]


def test_a_trace_is_json_and_compressed_on_request(tmp_path: Path) -> None:
    example().write_chrome(tmp_path / "t.json")
    example().write_chrome(tmp_path / "t.json.gz")
    plain = json.loads((tmp_path / "t.json").read_text())
    assert plain["displayTimeUnit"] == "ms"
    assert json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes())) == plain


def test_an_empty_timeline_ends_where_it_begins(tmp_path: Path) -> None:
    Timeline().write_chrome(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == []
    assert Timeline().end_s == 0.0


def test_marks_and_flows_are_bound_to_what_they_are_about() -> None:
    timeline = example()
    source, target = timeline.track("devices", "cpu:0"), timeline.track("jobs", "b")
    target.marks.append(Mark("succeeded", 2.0, {"code": 0}))
    timeline.flows.append(Flow("a moves", source, 1.0, target, 1.7505))
    events = timeline.chrome_events()
    trace_format.check(events)
    (mark,) = [event for event in events if event["ph"] == "i"]
    assert (mark["ts"], mark["s"], mark["args"]) == (2_000_000.0, "t", {"code": 0})
    begin, end = [event for event in events if event["ph"] in "sf"]
    assert trace_format.tracks(events)[begin["pid"], begin["tid"]] == ("devices", "cpu:0")
    assert trace_format.tracks(events)[end["pid"], end["tid"]] == ("jobs", "b")


@pytest.mark.parametrize("fault", ["overlap", "unbound", "nameless"])
def test_the_format_check_can_fail(fault: str) -> None:
    timeline = example()
    track = timeline.track("jobs", "a")
    if fault == "overlap":
        track.spans.append(Span("x", "slice", 1.0, 3.0))
    if fault == "unbound":
        timeline.flows.append(Flow("x", track, 0.1, track, 1.0))
    events = timeline.chrome_events()
    if fault == "nameless":
        events = [event for event in events if event["name"] != "thread_name"]
    with pytest.raises(AssertionError):
        trace_format.check(events)
