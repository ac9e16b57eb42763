"""``gpuslice submit --file job.toml``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..test_documents import ROOT
from .conftest import Shell

SCRIPT = "import os, sys; print(*sys.argv[1:], os.environ['OMP_NUM_THREADS'])"


def example() -> str:
    """The job of the page that explains the file."""
    found = re.search(r"```toml\n(.*?)```", (ROOT / "docs" / "submit.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_of_the_page_runs_and_what_is_given_beside_it_wins(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shell.up()
    Path("train.py").write_text(SCRIPT)
    Path("job.toml").write_text(example())
    assert shell("submit", "--file", "job.toml") == "mnist\n"
    shell("wait", "mnist")
    assert shell("logs", "mnist") == "--lr 0.1 2\n"
    (job,) = shell.status().jobs
    assert (job.memory_bytes, job.deadline_s, job.max_restarts) == (3 * 10**9, 7200.0, 2)

    given = [
        "--name",
        "other",
        "--memory",
        "1G",
        "--env",
        "OMP_NUM_THREADS=1",
        "--",
        "python",
        "train.py",
        "x",
    ]
    assert shell("submit", "--file", "job.toml", *given) == "other\n"
    shell("wait", "other")
    assert shell("logs", "other") == "x 1\n"
    assert (shell.status().jobs[1].memory_bytes, shell.status().jobs[1].max_restarts) == (10**9, 2)

    Path("job.toml").write_text("max_restart = 1")
    told = shell("submit", "--file", "job.toml", "train.py", code=2)
    assert "job.toml, line 1: max_restart is not a key of a job" in told
    assert "did you mean 'max_restarts'?" in told
    assert "cannot read nothing.toml" in shell("submit", "--file", "nothing.toml", code=2)
