"""Trainings in child processes: suspended at their boundaries, they change no bit."""

from __future__ import annotations

from pathlib import Path

from .conftest import Workshop

SCRIPT = Path(__file__).with_name("training_children.py")


def test_a_child_that_trains_is_suspended_and_its_parent_is_not(quick_workshop: Workshop) -> None:
    plain = quick_workshop.python(str(SCRIPT))
    done = quick_workshop.gpuslice_run("--suspend-every", "2", str(SCRIPT))
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    summaries = [line for line in done.stderr.splitlines() if "boundaries" in line]
    # 9 boundaries each; the first two are over when it is known that it trains.
    assert ["4 switches at 9" in line or "3 switches at 9" in line for line in summaries[:2]] == [True] * 2
    assert "no switch at 0 boundaries" in summaries[2]
