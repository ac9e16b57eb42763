"""A job that passes no boundary is named to whoever looks, and to whoever reads its output."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Shell
from .waiting import until

#: Nothing here that is a boundary: neither loader, nor optimizer, nor backward pass, nor module.
SCRIPT = """
import torch

def power_iteration(matrix):
    vector = torch.ones(200)
    while True:
        vector = torch.nn.functional.normalize(matrix @ vector, dim=0)

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
    assert f"no boundary at {script}:7" in shell("ps")
    told = Path(client.logs(job).err).read_text(encoding="utf-8")
    assert ("was asked to park" if asked else "has computed for 10 s") in told
    assert "gpuslice.boundary()" in told
    client.cancel(job)
    client.wait(job, 60.0)
    shell("down")
