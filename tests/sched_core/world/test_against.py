"""Two trees of the product in the same worlds: equal ones do the same, and a changed one is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .against import PARTS, ROOT, core_at, report, scenarios

SEED, RUNS = 1, 1
_AIM = "max(1, *(rank.boundary for rank in job.ranks)) + 1"


def tree(path: Path) -> Path:
    """Return ``path``, where the product of today is, with a copy of the part that has the core."""
    for part in PARTS:
        if part == "sched_core":
            shutil.copytree(ROOT / part, path / part)
        else:
            (path / part).symlink_to(ROOT / part)
    return path


def compared(then: Path) -> int:
    with core_at(then, SEED, RUNS) as one, core_at(ROOT, SEED, RUNS) as other:
        return report(scenarios(SEED, RUNS), one, other)


def test_equal_trees_do_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(tree(tmp_path)) == 0
    assert capsys.readouterr().out == "2 worlds, 0 differences, 0 violations of today's core\n"


def test_a_core_that_stops_jobs_one_boundary_later_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = tree(tmp_path) / "sched_core" / "lifecycle" / "reconciliation.py"
    source = changed.read_text()
    assert source.count(_AIM) == 1
    changed.write_text(source.replace(_AIM, _AIM.replace("+ 1", "+ 2")))
    assert compared(tmp_path) == 0
    assert "past without faults" in capsys.readouterr().out
