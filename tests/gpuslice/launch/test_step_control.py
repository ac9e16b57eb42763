"""The few bytes between a recorded job and whoever started it."""

from __future__ import annotations

import threading
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


def test_a_job_waits_for_its_turn(tmp_path: Path) -> None:
    recording = tmp_path / "1.json"
    ours = StepControl.create(recording, takes_turns=True)
    jobs = StepControl.of_turns(recording)
    assert jobs is not None
    assert (jobs.away, ours.suspended) == (False, False)
    ours.withdraw()
    assert jobs.away
    waiting = threading.Thread(target=jobs.await_turn)
    waiting.start()
    while not ours.suspended:
        pass
    ours.grant()
    waiting.join()
    assert (jobs.away, ours.suspended, jobs.passed(1)) == (False, False, False)
    ours.close()
    jobs.close()


def test_a_job_whose_turns_nobody_gives_any_more_ends(tmp_path: Path) -> None:
    recording = tmp_path / "1.json"
    ours = StepControl.create(recording, takes_turns=True)
    jobs = StepControl.of_turns(recording)
    assert jobs is not None
    ours.withdraw()
    ours.close()
    jobs.await_turn()
    assert (jobs.away, jobs.passed(1)) == (False, True)
    jobs.close()


def test_only_jobs_that_take_turns_have_them(tmp_path: Path) -> None:
    StepControl.create(tmp_path / "1.json")
    assert StepControl.of_turns(tmp_path / "1.json") is None


def test_a_job_that_nobody_watches_has_none(tmp_path: Path) -> None:
    assert StepControl.beside(tmp_path / "1.json") is None
