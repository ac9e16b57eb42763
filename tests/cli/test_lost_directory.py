"""A scheduler whose directory is gone from under it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ..patience import PATIENCE_S
from .conftest import Shell
from .waiting import until


@pytest.mark.parametrize("how", ["deleted", "emptied", "moved"])
def test_a_scheduler_that_nobody_can_reach_any_more_ends(shell: Shell, tmp_path: Path, how: str) -> None:
    options = ["--devices", "null:1", "--quantum", "100ms"]
    words = ["up", "--foreground", *options, "--state-dir", str(shell.directory)]
    with subprocess.Popen(
        [sys.executable, "-m", "gpuslice", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as scheduler:
        assert scheduler.stdout is not None
        assert "scheduling null:0" in scheduler.stdout.readline()
        job = shell.submit(10**6)
        until(shell.client(), job, lambda info: info.state == "running")
        processes = shell.processes_of(job)
        if how == "moved":
            shell.directory.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(shell.directory)
            if how == "emptied":
                shell.directory.mkdir(mode=0o700)
        _, said = scheduler.communicate(timeout=PATIENCE_S)
    assert scheduler.returncode == 3
    left = "they go on" if how == "moved" else "they are ended, too"
    assert re.match(f"gpuslice: the scheduler ends: its directory {shell.directory} was .*: {left}\n", said)
    if how == "moved":
        assert all(process.is_running() for process in processes)
        (tmp_path / "elsewhere").rename(shell.directory)
        shell.up()
        assert [one.id for one in shell.status().jobs] == [job]
        shell("down")
    psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not any(process.is_running() for process in processes)
