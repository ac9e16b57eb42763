"""A rank that cannot make its process group anew after a resume: the gang goes on from its snapshot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ..cli.waiting import until
from ..gpuslice.conftest import Workshop, finish_ranks
from ..patience import PATIENCE_S
from .test_jobs import Site, site  # noqa: F401

pytestmark = pytest.mark.simulated

#: After a few steps rank 1 will fail once to make a communicator; steps are slow until there is a file.
TRAIN = """
import hashlib, os, sys, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import cudasim, gpuslice

slow_until, failed = sys.argv[1:]
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 16).cuda())
optimizer = torch.optim.Adam(model.parameters())
job = gpuslice.attach(model=model, optimizer=optimizer)
for epoch in job.epochs(1):
    for number in job.batches(range(60)):
        if rank == 1 and number == 4 and not os.path.exists(failed):
            open(failed, "w").close()
            cudasim.fail("ncclCommInitRankConfig", 2)
        model(torch.randn(4, 16, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not os.path.exists(slow_until):
            time.sleep(0.2)
digest = hashlib.sha256(model.module.weight.detach().cpu().numpy().tobytes())
with open(f"digest.{rank}", "w") as file:
    file.write(digest.hexdigest())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_gang_is_started_again_as_after_a_death(
    site: Site,  # noqa: F811
    workshop: Workshop,
    tmp_path: Path,
) -> None:
    fast, failed = tmp_path / "fast", tmp_path / "failed"
    script = workshop.write("lost.py", TRAIN)
    workshop.environ["CUDASIM_ACCOUNT"] = str(tmp_path / "alone")
    there = str(script)
    finish_ranks(workshop.start_ranks(2, [sys.executable, there, there, there]))
    digests = [workshop.directory / f"digest.{rank}" for rank in range(2)]
    undisturbed = [file.read_text() for file in digests]
    for file in digests:
        file.unlink()

    client = site.up("cuda:0,cuda:1", "--policy", "fifo")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = client.submit(
        ["--", *torchrun, there, str(fast), str(failed)],
        devices=2,
        environ=site.environ | {"OMP_NUM_THREADS": "1"},
        directory=workshop.directory,
        max_restarts=1,
        recreate_groups=True,
    )
    until(client, job, lambda info: info.steps > 8)
    client.suspend(job)
    until(client, job, lambda info: info.state == "suspended")
    fast.touch()
    client.resume(job)
    ended = client.wait(job, PATIENCE_S)
    told = Path(client.logs(job).err).read_text(encoding="utf-8")
    assert ended is not None, told
    assert (ended.state, ended.restarts) == ("succeeded", 1), told
    assert "process group '0' could not be made anew" in told
    (went_on,) = [event for event in client.events() if event.what == "went_on"]
    assert went_on.details["boundary"] > 4
    assert [file.read_text() for file in digests] == undisturbed
    site.shell("down")
