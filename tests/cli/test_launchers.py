"""Gangs whose ranks a script starts itself, under a scheduler: they wait, park and come back together."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ..patience import PATIENCE_S
from .conftest import Shell
from .waiting import until

SCRIPT = Path(__file__).parents[1] / "gpuslice" / "launched.py"
#: The script goes slowly after 100 steps until it has been parked.
EPOCHS, STEPS = "60", 360
STEADY = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

pytestmark = [pytest.mark.slow, pytest.mark.gangs]


def test_a_gang_that_starts_itself_parks_whole(shell: Shell, tmp_path: Path) -> None:
    shell("up", "--devices", "cpu:2", "--policy", "fifo")
    client = shell.client()
    parked = tmp_path / "parked"
    job = client.submit(
        [str(SCRIPT), "lightning", str(tmp_path), EPOCHS, str(parked)], devices=2, environ=STEADY
    )
    until(client, job, lambda info: info.steps > 20)
    client.suspend(job)
    until(client, job, lambda info: info.state == "suspended")
    parked.touch()
    client.resume(job)
    ended = client.wait(job, PATIENCE_S)
    assert ended is not None
    assert (ended.state, ended.slices, ended.steps) == ("succeeded", 2, STEPS), ended
    digests = {(tmp_path / f"digest.{rank}").read_text() for rank in (0, 1)}
    assert len(digests) == 1
    shell("down")


def test_the_only_rank_of_a_launcher_parks(shell: Shell, tmp_path: Path) -> None:
    shell("up", "--devices", "cpu:1", "--policy", "fifo")
    client = shell.client()
    parked = tmp_path / "parked"
    job = client.submit([str(SCRIPT), "alone", str(tmp_path), EPOCHS, str(parked)], environ=STEADY)
    until(client, job, lambda info: info.steps > 20)
    client.suspend(job)
    until(client, job, lambda info: info.state == "suspended")
    parked.touch()
    client.resume(job)
    ended = client.wait(job, PATIENCE_S)
    assert ended is not None
    told = Path(client.logs(job).err).read_text(encoding="utf-8")
    assert (ended.state, ended.slices, ended.steps) == ("succeeded", 2, STEPS), told
    assert "rejected" not in told
    assert (tmp_path / "digest.0").exists()
    shell("down")


#: Written for torchrun: it does not know how many ranks there are, nor who else is one.
FOR_TORCHRUN = """
import gc, json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
told = {name: os.environ[name] for name in names}
Path(sys.argv[1], f"told.{told['RANK']}").write_text(json.dumps(told))
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.Adam(model.parameters())
for x in torch.utils.data.DataLoader(torch.randn(200, 8), batch_size=2):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
del model, optimizer  # as in launched.py
gc.collect()
dist.destroy_process_group()
"""


def test_ranks_are_started_for_a_script_that_takes_its_rank_from_its_launcher(
    shell: Shell, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(FOR_TORCHRUN)
    shell("up", "--devices", "cpu:2", "--policy", "fifo")
    client = shell.client()
    job = client.submit([str(script), str(tmp_path)], devices=2, environ=STEADY)
    ended = client.wait(job, PATIENCE_S)
    assert ended is not None
    assert (ended.state, ended.steps) == ("succeeded", 100), Path(client.logs(job).err).read_text()
    told = [json.loads((tmp_path / f"told.{rank}").read_text()) for rank in (0, 1)]
    assert [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in told] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    assert told[0]["MASTER_PORT"] == told[1]["MASTER_PORT"]
    shell("down")


def test_a_group_of_more_ranks_than_devices_is_refused(shell: Shell, tmp_path: Path) -> None:
    shell("up", "--devices", "cpu:2", "--policy", "fifo")
    client = shell.client()
    job = client.submit([str(SCRIPT), "lightning", str(tmp_path), "1"], devices=1, environ=STEADY)
    ended = client.wait(job, PATIENCE_S)
    assert ended is not None
    assert ended.state == "failed"
    told = Path(client.logs(job).err).read_text(encoding="utf-8")
    assert "a process group of 2 ranks, but its job has 1 device" in told
    assert "--devices 2" in told
    shell("down")
