"""What a Chrome trace must be for Perfetto to show it as meant."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Place = tuple[int, int]
_COMMON = {"ph", "name", "pid", "tid"}
_NEEDED = {
    "M": {"args"},
    "X": {"ts", "dur", "args"},
    "i": {"ts", "s", "args"},
    "s": {"ts", "id", "cat"},
    "f": {"ts", "id", "cat", "bp"},
}


def load(path: Path) -> list[Event]:
    """The events of a trace file, checked."""
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    assert isinstance(document["traceEvents"], list)
    check(document["traceEvents"])
    return list(document["traceEvents"])


def check(events: list[Event]) -> None:
    """Raise ``AssertionError`` for what Perfetto would drop or draw wrongly."""
    spans: dict[Place, list[Event]] = defaultdict(list)
    for event in events:
        assert set(event) >= _COMMON | _NEEDED[event["ph"]], event
        if event["ph"] != "M":
            assert event["ts"] >= 0, event
            assert (event["pid"], event["tid"]) in tracks(events), "a track without a name"
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            spans[event["pid"], event["tid"]].append(event)
    for track in spans.values():
        track.sort(key=lambda event: event["ts"])
        for former, later in pairwise(track):
            # Times are rounded to nanoseconds, each on its own.
            assert former["ts"] + former["dur"] <= later["ts"] + 0.002, ("overlap", former, later)
    _check_flows([event for event in events if event["ph"] in "sf"], spans)


def _check_flows(ends: list[Event], spans: dict[Place, list[Event]]) -> None:
    by_id: dict[int, list[Event]] = defaultdict(list)
    for end in ends:
        by_id[end["id"]].append(end)
        around = spans[end["pid"], end["tid"]]
        assert any(one["ts"] <= end["ts"] <= one["ts"] + one["dur"] for one in around), ("unbound", end)
    for pair in by_id.values():
        assert [end["ph"] for end in pair] == ["s", "f"]
        assert pair[0]["ts"] <= pair[1]["ts"], "an arrow back in time"
        assert pair[0]["name"] == pair[1]["name"]


def tracks(events: list[Event]) -> dict[Place, tuple[str, str]]:
    """Group and name of each track."""
    groups = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    return {
        (event["pid"], event["tid"]): (groups[event["pid"]], event["args"]["name"])
        for event in events
        if event["name"] == "thread_name"
    }


def spans_of(events: list[Event], group: str, name: str) -> list[Event]:
    """The spans on one track."""
    places = {place for place, track in tracks(events).items() if track == (group, name)}
    return [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) in places]
