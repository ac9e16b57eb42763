"""A job that passes no boundary is named to whoever looks, and to whoever reads its output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..patience import PATIENCE_S
from .conftest import Shell
from .waiting import until

#: Nothing here that is a boundary: neither loader, nor optimizer, nor backward pass, nor module. One line is
#: where it is, whenever somebody looks. It is looked at sooner than others, as it uses up a core until then.
SCRIPT = """
import os, torch; from gpuslice.agent import boundary_watchdog; boundary_watchdog.PATIENCE_S = 1
from torch.nn.functional import normalize

def power_iteration(matrix):
    vector = torch.ones(200)
    while not os.path.exists("enough"): vector = normalize(matrix @ vector, dim=0)

power_iteration(torch.randn(200, 200))
"""
#: It waits for something; that concerns nobody until it is asked to park.
WAITING = """
import threading
import torch


def wait():
    threading.Event().wait()

wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("asked", [False, True])
def test_a_job_without_boundaries_is_named(shell: Shell, tmp_path: Path, asked: bool) -> None:
    script = tmp_path / "endless.py"
    script.write_text(WAITING if asked else SCRIPT)
    shell("up", "--devices", "cpu:1", "--policy", "fifo")
    client = shell.client()
    job = client.submit([str(script)])
    until(client, job, lambda info: info.state in ("starting", "running"))
    if asked:
        client.suspend(job)
    info = until(client, job, lambda info: info.stuck is not None)
    assert info.stuck is not None
    assert info.stuck.startswith(f"at {script}:7, in {'wait' if asked else 'power_iteration'}")
    assert f"no boundary at {script}:7" in shell("ps", "--wide")
    told = Path(client.logs(job).err).read_text(encoding="utf-8")
    assert ("was asked to park" if asked else "has computed for 1 s") in told
    assert "gpuslice.boundary()" in told
    client.cancel(job)
    client.wait(job, PATIENCE_S)
    shell("down")


@pytest.mark.slow
def test_a_script_of_gpuslice_run_is_named_though_no_suspend_was_asked_for(
    tmp_path: Path,
) -> None:
    script = tmp_path / "endless.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "gpuslice", "run", "--ramdisk-dir", str(tmp_path / "r"), str(script)]
    with subprocess.Popen(
        command, cwd=tmp_path, env=dict(os.environ), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            told = process.stderr.readline() + process.stderr.readline()
            (tmp_path / "enough").touch()
            assert process.communicate(timeout=PATIENCE_S)[1] == ""
        finally:
            process.kill()
    assert f"has computed for 1 s without a boundary: its main thread is at {script}:7" in told
    assert "gpuslice.boundary()" in told
    assert process.returncode == 0
