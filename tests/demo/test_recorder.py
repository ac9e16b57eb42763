"""What the recorder and the screens make of a story told by the core."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from gpuslice import wire
from gpuslice.demo.recorder import Recorder
from gpuslice.demo.screen import Lines, Picture
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.lifecycle.events import Event, Exited, RankGone, Reported, Submitted, Woken
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.types import DeviceName


def story() -> Iterator[tuple[float, Event]]:
    """Job a trains from 1.0 to 2.1 and is suspended for b; b ends at 3.0; a comes back and ends at 4.0."""
    for job in "ab":
        yield 0.5, Submitted(JobSpec(id=job, submit_s=0.5), Program(("true",), "/"))
        hello = wire.Hello(version=1, job=job, rank=0, world_size=1, pid=1)
        yield 0.9, Reported(job, 0, hello)
    yield 1.0, Reported("a", 0, wire.Resumed(epoch=1, boundary=0, stages_s={}))
    yield 1.0, Reported("a", 0, wire.Progress(epoch=1, boundary=1, step=0))
    yield 2.0, Woken()
    stages_s = {"find_s": 0.03, "copy_out_s": 0.01}
    parked = wire.Suspended(epoch=1, boundary=5, step=5, nbytes=10**6, stages_s=stages_s)
    yield 2.14, Reported("a", 0, parked)
    yield 2.15, Reported("b", 0, wire.Resumed(epoch=1, boundary=0, stages_s={}))
    yield 2.9, Reported("b", 0, wire.Bye(epoch=1, boundary=9, step=9))
    yield 3.0, RankGone("b", 0)
    yield 3.0, Exited("b", 0)
    back = wire.Resumed(epoch=2, boundary=5, stages_s={"parked_s": 0.86, "copy_in_s": 0.01})
    yield 3.02, Reported("a", 0, back)
    yield 3.9, Reported("a", 0, wire.Bye(epoch=2, boundary=20, step=20))
    yield 4.0, RankGone("a", 0)
    yield 4.0, Exited("a", 0)


def tell(recorder: Recorder, *screens: Lines | Picture, until_s: float = 9.0) -> None:
    core = Core([DeviceName("cpu", 0)], RoundRobin(quantum_s=2.0))
    for now_s, event in story():
        if now_s > until_s:
            return
        commands = core.handle(event, now_s)
        recorder.observe(event, now_s, commands)
        for screen in screens:
            screen.observe(event, now_s, commands)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(0.0)


def test_blackout_is_suspend_plus_handoff_plus_resume(recorder: Recorder) -> None:
    tell(recorder)
    first, second = recorder.switches
    assert (first.leaving, first.coming, first.nbytes) == ("a", "b", 10**6)
    assert first.at_s == pytest.approx(2.1)
    assert first.blackout_s == pytest.approx(0.04 + 0.0 + 0.01)
    assert (second.suspend_s, second.coming) == (0.0, "a")
    assert second.blackout_s == pytest.approx(0.02)
    assert recorder.share_lost == pytest.approx(0.07 / 3.0)


def test_slices_know_their_steps_and_how_they_ended(recorder: Recorder) -> None:
    tell(recorder)
    a, b = recorder.jobs["a"], recorder.jobs["b"]
    assert [(one.first_step, one.last_step, one.ended) for one in a.slices] == [(0, 5, False), (5, 20, True)]
    assert [(one.first_step, one.last_step, one.ended) for one in b.slices] == [(0, 9, True)]
    assert (len(a.suspends), len(b.suspends), a.exit_code) == (1, 0, 0)
    assert recorder.holders == {}


def test_spans_never_overlap_on_a_track(recorder: Recorder) -> None:
    tell(recorder)
    timeline = recorder.timeline()
    assert [track.name for track in timeline.tracks] == ["cpu:0", "a", "b"]
    for track in timeline.tracks:
        for before, after in zip(track.spans, track.spans[1:], strict=False):
            assert before.end_s <= after.start_s + 1e-9
    assert [span.kind for span in timeline.track("jobs", "a").spans] == [
        *("waiting", "slice", "suspend"),
        *("parked", "resume", "slice"),
    ]
    assert "parked ms" not in timeline.track("jobs", "a").spans[4].details


def test_a_suspend_frees_the_memory_that_the_picture_shows(recorder: Recorder) -> None:
    tell(recorder)
    timeline = recorder.timeline()
    held = timeline.track("devices", "cpu:0").holdings
    first, second = recorder.jobs["a"].slices
    # b ended without a suspend, so nobody said how much it had.
    assert [(one.subject, one.start_s, one.end_s, one.nbytes) for one in held] == [
        ("a", 1.0, first.parked_s, 10**6),
        ("a", second.granted_s, second.parked_s, 10**6),
    ]
    assert held[0].end_s < held[1].start_s
    assert not timeline.track("jobs", "a").holdings


def test_plain_lines_tell_the_story(recorder: Recorder) -> None:
    output = io.StringIO()
    tell(recorder, Lines(Console(file=output, width=120), recorder, {"a": 20, "b": 9}))
    lines = [" ".join(line.split()[3:]) for line in output.getvalue().splitlines()]
    assert lines == [
        "a step 0/20 begins",
        "a step 5/20 suspended in 40.0 ms, 1.0 MB moved",
        "b step 0/9 begins",
        "b step 9/9 ended with exit code 0",
        "a step 5/20 resumed in 20.0 ms",
        "a step 20/20 ended with exit code 0",
    ]


@pytest.mark.parametrize(
    ("until_s", "expected"),
    [
        (0.6, "no job on the device"),
        (1.5, "cpu:0: a"),
        (2.5, "cpu:0: b"),
        (2.5, "40.0 ms"),
        (3.5, "20.0 ms"),
        (9.0, "done"),
    ],
)
def test_the_picture_shows_who_holds_the_device(recorder: Recorder, until_s: float, expected: str) -> None:
    output = io.StringIO()
    console = Console(file=output, width=120, force_terminal=True, color_system=None)
    picture = Picture(console, recorder, {"a": 20, "b": 9}, lambda: until_s)
    tell(recorder, picture, until_s=until_s)
    console.print(picture.render())
    assert expected in output.getvalue()
