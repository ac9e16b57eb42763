"""The timeline of a scheduler's whole run, made from its journal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuslice.daemon.replay import JournalReplay
from gpuslice.profiler.timeline import Flow, Mark, Span, Timeline, Track
from gpuslice.sched_core.jobs.states import HOLDING
from gpuslice.sched_core.live.job_history import JobHistory, Phase

DEVICES, JOBS = "devices", "jobs"


@dataclass(frozen=True)
class Run:
    """A scheduler's whole run, as its journal has it.

    Attributes
    ----------
    devices
        Their names.
    phases
        What the jobs went through, in the order in which it ended.
    begin_s, end_s
        First and last event, on the scheduler's clock.
    """

    devices: tuple[str, ...]
    phases: tuple[Phase, ...]
    begin_s: float
    end_s: float


def read(path: Path) -> Run:
    """Read a run from the journal at ``path``.

    Raises
    ------
    EnvironmentUnusableError
        If there is none.
    JournalError
        If it cannot be read.
    """
    with JournalReplay(path) as replay:
        job_history = JobHistory(replay.core)
        phases: list[Phase] = []
        times: list[float] = []
        for event, now, commands in replay.advance():
            phases += job_history.note(event, now, commands)
            times = [times[0] if times else now, now]
        begin_s, end_s = times or (0.0, 0.0)
        phases += job_history.open_phases(end_s)
        return Run(tuple(map(str, replay.core.devices)), tuple(phases), begin_s, end_s)


def timeline(run: Run) -> Timeline:
    """Return a timeline: tracks of devices and jobs, and an arrow for each migration."""
    drawn = Timeline()
    for name in run.devices:
        drawn.track(DEVICES, name)
    lanes = _Lanes(drawn, run.devices)
    for phase in sorted(run.phases, key=lambda phase: phase.since_s):
        _draw_job(drawn.track(JOBS, phase.job), phase, run)
        if phase.devices:
            lanes.draw(phase, _span(phase, run, phase.job))
    drawn.flows += lanes.moves
    return drawn


def _span(phase: Phase, run: Run, name: str) -> Span:
    until_s = run.end_s if phase.until_s is None else phase.until_s
    details = {
        "job": phase.job,
        "state": phase.state.value,
        "epoch": phase.epoch,
        "devices": ", ".join(run.devices[device] for device in phase.devices),
        **phase.details,
    }
    return Span(
        name, phase.state.value, phase.since_s - run.begin_s, until_s - run.begin_s, phase.job, details
    )


def _draw_job(track: Track, phase: Phase, run: Run) -> None:
    span = _span(phase, run, phase.state.value)
    if not phase.state.ended:
        track.spans.append(span)
    elif not track.marks:
        track.marks.append(Mark(phase.state.value, span.start_s, span.details))


class _Lanes:
    """The device tracks of a timeline: each slice is put on the first track that is free then."""

    def __init__(self, drawn: Timeline, devices: Sequence[str]) -> None:
        self._drawn = drawn
        self._devices = devices
        self.moves: list[Flow] = []
        #: By job and rank: the track of its slice, its lease, its device, and the slice's last span.
        self._last: dict[tuple[str, int], tuple[Track, int, int, Span]] = {}

    def draw(self, phase: Phase, span: Span) -> None:
        for rank, device in enumerate(phase.devices):
            former = self._last.get((phase.job, rank))
            if former is not None and former[1:3] == (phase.epoch, device):
                track = former[0]
            else:
                track = self._free(device, span.start_s)
            track.spans.append(span)
            self._last[phase.job, rank] = (track, phase.epoch, device, span)
            if former is not None and former[2] != device and phase.state in HOLDING:
                name = f"{phase.job} moves"
                self.moves.append(Flow(name, former[0], _inside(former[3]), track, _inside(span)))

    def _free(self, device: int, start_s: float) -> Track:
        number = 1
        while True:
            name = self._devices[device] + (f" ({number})" if number > 1 else "")
            track = self._drawn.track(DEVICES, name)
            if not track.spans or track.spans[-1].end_s <= start_s:
                return track
            number += 1


def _inside(span: Span) -> float:
    return (span.start_s + span.end_s) / 2
