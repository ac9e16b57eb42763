"""The few bytes between a recorded job and whoever started it."""

from __future__ import annotations

from pathlib import Path

from gpuslice.launch.step_control import StepControl


def test_both_sides_see_what_the_other_says(tmp_path: Path) -> None:
    recording = tmp_path / "1.json"
    ours = StepControl.create(recording)
    jobs = StepControl.beside(recording)
    assert jobs is not None
    assert not jobs.passed(7)
    assert ours.intervals == 7
    ours.stop()
    assert jobs.passed(8)
    assert ours.intervals == 8


def test_a_job_that_nobody_watches_has_none(tmp_path: Path) -> None:
    assert StepControl.beside(tmp_path / "1.json") is None
