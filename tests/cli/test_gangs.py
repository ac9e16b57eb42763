"""A gang of every kind of parallel training under a scheduler: parked and moved (gang.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..patience import PATIENCE_S
from .conftest import Shell
from .waiting import until

SCRIPT = Path(__file__).parents[1] / "gpuslice" / "gang.py"
EPOCHS = "16"
RANKS = 2
#: How long a collective may take, once all ranks train; the gang is parked for longer.
TIMEOUT_S, PARKED_S = 8.0, 9.0

pytestmark = [pytest.mark.slow, pytest.mark.gangs]


def digests(directory: Path) -> dict[str, dict[str, str]]:
    return {file.name: json.loads(file.read_text()) for file in directory.glob("digests.*")}


def test_a_gang_that_is_parked_and_moved_ends_as_an_undisturbed_one(shell: Shell, tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("undisturbed", "ours")]
    for directory in directories:
        directory.mkdir()
    undisturbed, ours = directories
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GANG_TIMEOUT_S": str(TIMEOUT_S)}
    words = (str(RANKS), EPOCHS, "0", "0")
    shell("up", "--devices", "cpu:4", "--policy", "fifo")
    client = shell.client()
    command = [sys.executable, str(SCRIPT), str(undisturbed), *words]
    subprocess.run(command, env=environ, check=True, timeout=PATIENCE_S)
    fast = tmp_path / "fast"  # slow until then, as it must not end before it is moved
    environ["GANG_SLOW_UNTIL"] = str(fast)
    job = client.submit([str(SCRIPT), str(ours), *words], devices=RANKS, environ=environ)

    until(client, job, lambda info: info.steps > 10)
    client.suspend(job)
    until(client, job, lambda info: info.state == "suspended")
    assert client.wait(job, PARKED_S) is None
    client.resume(job)
    info = until(client, job, lambda info: info.state == "running")
    assert set(info.devices) == {f"cpu:{number}" for number in range(RANKS)}
    others = tuple(f"cpu:{number}" for number in reversed(range(RANKS, 2 * RANKS)))
    client.migrate(job, others)
    info = until(client, job, lambda info: info.state == "running" and others[0] in info.devices)
    assert info.devices == others
    fast.touch()
    ended = client.wait(job, PATIENCE_S)
    assert ended is not None
    told = Path(client.logs(job).err).read_text(encoding="utf-8")
    assert ended.state == "succeeded", told
    assert digests(ours) == digests(undisturbed)
    shell("down")
