"""A real gang that moves onto one socket of the host's slots when a job leaves, and trains on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ..patience import PATIENCE_S
from .conftest import Shell
from .waiting import until

#: Trains until the file in its first argument is there; then writes what it ended with, by rank.
TRAIN = """
import os, sys, torch
from pathlib import Path
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
done = 0
while done < 40 or not Path(sys.argv[1]).exists():
    for batch in DataLoader(torch.ones(8, 4)):
        optimizer.zero_grad()
        model(batch).pow(2).sum().backward()
        optimizer.step()
        done += 1
"""
STEADY = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

pytestmark = [pytest.mark.slow, pytest.mark.gangs]


def test_a_gang_moves_onto_one_socket_when_a_job_leaves(shell: Shell, tmp_path: Path) -> None:
    script, end = tmp_path / "train.py", tmp_path / "end"
    script.write_text(TRAIN, encoding="utf-8")
    # Lying apart is stated to cost so much that a second of training is enough for the move to pay.
    settings = ("--set", "apart_sockets=1000")
    shell("up", "--devices", "cpu:4", "--sockets", "2", "--policy", "fifo", "--defragment", *settings)
    client = shell.client()
    single = client.submit([str(script), str(end)], environ=STEADY)
    until(client, single, lambda info: info.steps > 5)
    torchrun = ["--", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    gang = client.submit([*torchrun, str(script), str(end)], devices=2, environ=STEADY)
    # A gang is taken to train on for as long as it has trained.
    until(client, gang, lambda info: info.devices == ("cpu:1", "cpu:2") and info.executed_s > 1)
    client.cancel(single)
    moved = until(client, gang, lambda info: info.devices == ("cpu:1", "cpu:0"))
    until(client, gang, lambda info: info.steps > moved.steps)
    end.touch()
    ended = client.wait(gang, PATIENCE_S)
    assert ended is not None
    assert (ended.state, ended.slices) == ("succeeded", 2), ended
    switched = [event for event in client.events() if event.what == "switched" and event.job == gang]
    assert [event.details["migrated"] for event in switched] == [True]
    shell("down")
