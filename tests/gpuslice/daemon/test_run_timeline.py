"""A run as its journal tells it, drawn as a timeline."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpuslice.daemon import run_timeline
from gpuslice.daemon.scheduler_setup import Setup
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.journal.journal import Journal, JournalError
from gpuslice.sched_core.live.job_history import Phase

from ...profiler import trace_format
from ...sched_core.driver import QUANTUM_S, Driver, devices


def journal_of(driver: Driver, path: Path) -> Path:
    setup = Setup(tuple(devices(len(driver.core.devices))), "rr", {"quantum_s": str(QUANTUM_S)})
    with Journal(path) as journal:
        journal.introduce(msgspec.json.encode(setup))
        for event, now in driver.journal:
            journal.append(event, now, quiet=False)
    return path


def test_jobs_and_devices_have_a_track_each(tmp_path: Path) -> None:
    driver = Driver()
    driver.running_pair()
    driver.wake()
    driver.now_s += 0.25
    driver.parked("a", 11)
    driver.resumed("b")
    run = run_timeline.read(journal_of(driver, tmp_path / "j"))
    events = run_timeline.timeline(run).chrome_events()
    trace_format.check(events)
    assert list(trace_format.tracks(events).values()) == [("devices", "null:0"), ("jobs", "a"), ("jobs", "b")]
    on_device = trace_format.spans_of(events, "devices", "null:0")
    assert [(one["name"], one["cat"]) for one in on_device] == [
        ("a", "starting"),
        ("a", "running"),
        ("a", "suspending"),
        ("b", "starting"),
        ("b", "running"),
    ]
    suspending = on_device[2]
    assert suspending["dur"] == pytest.approx(0.25e6)
    assert suspending["args"]["bytes"] == 8
    states = [one["name"] for one in trace_format.spans_of(events, "jobs", "a")]
    assert states == ["queued", "starting", "running", "suspending", "suspended"]


def phase(
    job: str, state: JobState, devices: tuple[int, ...], epoch: int, since_s: float, until_s: float
) -> Phase:
    return Phase(job, state, devices, epoch, since_s, until_s)


def test_a_migration_is_an_arrow_from_device_to_device() -> None:
    running = JobState.RUNNING
    phases = (
        phase("g", running, (0, 1), 1, 10.0, 11.0),
        phase("g", JobState.SUSPENDED, (), 1, 11.0, 12.0),
        phase("g", running, (0, 2), 2, 12.0, 13.0),
        phase("g", JobState.SUCCEEDED, (), 2, 13.0, 14.0),
    )
    events = run_timeline.timeline(
        run_timeline.Run(("cuda:0", "cuda:1", "cuda:2"), phases, 10.0, 14.0)
    ).chrome_events()
    trace_format.check(events)
    names = trace_format.tracks(events)
    ends = [(event["name"], *names[event["pid"], event["tid"]]) for event in events if event["ph"] in "sf"]
    assert ends == [("g moves", "devices", "cuda:1"), ("g moves", "devices", "cuda:2")], "rank 0 stayed"
    (mark,) = [event for event in events if event["ph"] == "i"]
    assert (mark["name"], mark["ts"]) == ("succeeded", 3e6)


def test_jobs_that_share_a_device_lie_beside_each_other() -> None:
    phases = (
        phase("a", JobState.RUNNING, (0,), 1, 0.0, 5.0),
        phase("b", JobState.RUNNING, (0,), 1, 1.0, 2.0),
        phase("c", JobState.RUNNING, (0,), 1, 3.0, 6.0),
        phase("d", JobState.RUNNING, (0,), 1, 5.0, 6.0),
    )
    events = run_timeline.timeline(run_timeline.Run(("cuda:0",), phases, 0.0, 6.0)).chrome_events()
    trace_format.check(events)
    first, second = (
        [one["name"] for one in trace_format.spans_of(events, "devices", name)]
        for name in ("cuda:0", "cuda:0 (2)")
    )
    assert (first, second) == (["a", "d"], ["b", "c"])


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusableError, match="there is no journal"):
        run_timeline.read(tmp_path / "j")
    (tmp_path / "j").write_bytes(b"garbage" * 1000)
    with pytest.raises(JournalError):
        run_timeline.read(tmp_path / "j")


def test_a_run_without_jobs_is_an_empty_timeline(tmp_path: Path) -> None:
    run = run_timeline.read(journal_of(Driver(2), tmp_path / "j"))
    drawn = run_timeline.timeline(run)
    assert (drawn.end_s, [track.name for track in drawn.tracks]) == (0.0, ["null:0", "null:1"])
