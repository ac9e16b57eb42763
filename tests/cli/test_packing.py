"""Two real jobs on one slot of the host: packed where that pays, and taken apart where it does not."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gpuslice.client.client import Client
from gpuslice.verbs import EventInfo

from ..patience import PATIENCE_S
from .conftest import Shell
from .waiting import until

#: Trains for ever. A step waits for its data, by itself or in a line with all others that read the same;
#: who had to stand in line waits twice as long, so that two are slower than one after the other, however busy
#: the machine is.
TRAIN = """
import fcntl, sys, time, torch
from torch.utils.data import DataLoader

class Data(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            with open(sys.argv[1], "a") as line:
                if sys.argv[2] == "shared":
                    try:
                        fcntl.flock(line, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        fcntl.flock(line, fcntl.LOCK_EX)
                        time.sleep(0.06)
                time.sleep(0.06)
            time.sleep(0.002)
            yield torch.ones(1)

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader(Data()):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""
pytestmark = [pytest.mark.slow, pytest.mark.trainings]


def pair(shell: Shell, directory: Path, mode: str) -> tuple[Client, list[str]]:
    """Two jobs that read alike, on one slot of a scheduler that packs."""
    script = directory / "train.py"
    script.write_text(TRAIN, encoding="utf-8")
    shell("up", "--devices", "cpu:1", "--quantum", "1s", "--switch-share", "0", "--pack")
    client = shell.client()
    words = [str(script), str(directory / "line"), mode]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return client, [client.submit(words, device_memory_bytes=1 << 30, environ=environ) for _ in range(2)]


def verdict(client: Client, job: str) -> EventInfo:
    """What was found of ``job``, as soon as it is known."""
    seen: list[EventInfo] = []
    ends_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends_s:
        seen += client.events(seen[-1].number if seen else 0)
        found = [event for event in seen if event.what in ("packed", "unpacked") and event.job == job]
        if found:
            return found[0]
        client.wait(job, 0.05)  # for a moment, or until it ends
    raise AssertionError([event for event in seen if event.what in ("measured", "policy_failed")])


def test_jobs_that_wait_each_for_its_own_data_are_packed(shell: Shell, tmp_path: Path) -> None:
    client, jobs = pair(shell, tmp_path, "own")
    assert verdict(client, jobs[0]).what == "packed"
    shares = until(client, jobs[0], lambda info: info.slowdown_interval is not None and bool(info.devices))
    assert shares.shares_with == (jobs[1],)
    assert f"with {jobs[1]}, " in shell("ps", "--wide")
    shell("down")


def test_jobs_that_take_what_the_other_needs_are_taken_apart(shell: Shell, tmp_path: Path) -> None:
    client, jobs = pair(shell, tmp_path, "shared")
    found = verdict(client, jobs[0])
    assert found.what == "unpacked"
    low, total, high = (float(found.details[name] or 0) for name in ("total_low", "total", "total_high"))
    assert low <= total <= high
    assert total < 1.3
    alone = until(client, jobs[0], lambda info: bool(info.devices) and not info.shares_with)
    assert alone.slowdown is None
    shell("down")
