"""A timeline: spans on tracks, written as Chrome trace JSON, which Perfetto and chrome://tracing open.

The format: https://chromium.googlesource.com/catapult, "Trace Event Format"; times in it are microseconds.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """An activity with a duration.

    Attributes
    ----------
    name
        What the bar says.
    kind
        What sort of thing it is; bars of one kind look alike.
    start_s, end_s
        Seconds since the timeline's beginning.
    subject
        Whom it belongs to (a job); spans of one subject share a colour on every track.
    details
        Shown on demand.
    """

    name: str
    kind: str
    start_s: float
    end_s: float
    subject: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Mark:
    """An event at one moment."""

    name: str
    at_s: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Holding:
    """Memory that a subject (a job) held for a while.

    Attributes
    ----------
    start_s, end_s
        Seconds since the timeline's beginning.
    """

    subject: str
    start_s: float
    end_s: float
    nbytes: int


@dataclass(slots=True)
class Track:
    """One row: a device or a job.

    Attributes
    ----------
    holdings
        Device memory by subject, drawn as a strip under the row.
    """

    group: str
    name: str
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    holdings: list[Holding] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Flow:
    """An arrow from a span on one track to a span on another, for instance of a job that moved.

    Attributes
    ----------
    from_s, to_s
        A moment within the span at either end.
    """

    name: str
    source: Track
    from_s: float
    target: Track
    to_s: float


class Timeline:
    """Tracks in groups, in the order in which they were first named."""

    def __init__(self) -> None:
        self.tracks: list[Track] = []
        self.flows: list[Flow] = []

    def track(self, group: str, name: str) -> Track:
        """Return the track ``name`` of ``group``. Create it if it is new."""
        for track in self.tracks:
            if (track.group, track.name) == (group, name):
                return track
        self.tracks.append(Track(group, name))
        return self.tracks[-1]

    @property
    def end_s(self) -> float:
        """End of the last span; 0 without any."""
        return max((span.end_s for track in self.tracks for span in track.spans), default=0.0)

    def chrome_events(self) -> list[dict[str, Any]]:
        """Return all events: spans (``X``), marks (``i``), flows (``s``, ``f``), names and orders (``M``).

        A group is a process of the trace, a track a thread.
        """
        groups = list(dict.fromkeys(track.group for track in self.tracks))
        events: list[dict[str, Any]] = []
        places: dict[int, tuple[int, int]] = {}
        for pid, group in enumerate(groups, start=1):
            events.append(_metadata("process_name", pid, 0, {"name": group}))
            events.append(_metadata("process_sort_index", pid, 0, {"sort_index": pid}))
        for tid, track in enumerate(self.tracks, start=1):
            place = places[id(track)] = groups.index(track.group) + 1, tid
            events.append(_metadata("thread_name", *place, {"name": track.name}))
            events.append(_metadata("thread_sort_index", *place, {"sort_index": tid}))
            for span in track.spans:
                width = {"ph": "X", "dur": _microseconds(span.duration_s)}
                events.append(_event(span.name, span.kind, place, span.start_s, span.details, **width))
            for mark in track.marks:
                events.append(_event(mark.name, "mark", place, mark.at_s, mark.details, ph="i", s="t"))
        for number, flow in enumerate(self.flows, start=1):
            for track, at_s, end in (
                (flow.source, flow.from_s, {"ph": "s"}),
                (flow.target, flow.to_s, {"ph": "f", "bp": "e"}),  # the span around it, not the next one
            ):
                events.append(_event(flow.name, "flow", places[id(track)], at_s, {}, id=number, **end))
        return events

    def write_chrome(self, path: Path) -> None:
        """Write the trace to ``path``; compressed when its name ends in ``.gz``."""
        text = json.dumps({"traceEvents": self.chrome_events(), "displayTimeUnit": "ms"}, indent=None)
        data = text.encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _event(
    name: str, category: str, place: tuple[int, int], at_s: float, args: dict[str, Any], **more: object
) -> dict[str, Any]:
    """Return an event that begins at ``at_s`` on the track at ``place`` (process, thread)."""
    pid, tid = place
    begun_us = _microseconds(at_s)
    return {"name": name, "cat": category, "pid": pid, "tid": tid, "ts": begun_us, "args": args, **more}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
