"""A gang goes on from the newest snapshot that all of its ranks have."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from gpuslice.errors import UsageError
from gpuslice.runtime.common_snapshots import agree, newest_common

from ..patience import PATIENCE_S
from .conftest import Workshop, finish_ranks
from .warm.process import Servers

#: Rank 1 kills itself where rank 0 goes on to the next suspend, once each has left a snapshot. If DIES_FIRST
#: is set, rank 0 kills itself in its suspend; rank 1 comes to that only when rank 0 has gone, with the store.
TRAIN = """
import hashlib, os, signal, sys, time
import psutil, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
import gpuslice
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.switch.capture_plan import CapturePlan
from gpuslice.config import load
from gpuslice.runtime.current import runtime

dist.init_process_group("gloo")
rank, deadly = dist.get_rank(), int(sys.argv[1])
pid = torch.tensor(os.getpid())
dist.broadcast(pid, 0)
dies_first = int(os.environ.get("DIES_FIRST", "0"))
if dies_first and rank == 0:
    CapturePlan.copy_out = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

def has_died(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

def main():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rows = torch.randn(48, 4)
    sampler = DistributedSampler(rows)
    loader = DataLoader(rows, batch_size=4, sampler=sampler)
    job = gpuslice.attach(model=model, optimizer=optimizer)
    done = 0
    for epoch in job.epochs(2):
        sampler.set_epoch(epoch)
        for batch in job.batches(loader):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            done += 1
            if done == dies_first:
                while not runtime().common_snapshots.listen():
                    time.sleep(0.01)
                dist.barrier()
                while rank == 1 and not has_died(int(pid)):
                    time.sleep(0.01)
            if rank == 1 and done == deadly:
                disk = RamDisk.from_settings(load())
                while not all(disk.boundaries("gang", each) for each in (0, 1)):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    # One write, so that the ranks' lines stay whole.
    os.write(1, f"rank {rank} did {done}, {hashlib.sha256(weights).hexdigest()}\\n".encode())

main()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("boundaries", "expected"),
    [([[3, 6], [3, 6]], 6), ([[3, 6], [3]], 3), ([[6, 9], [3, 6]], 6), ([[3], []], None), ([[]], None)],
)
def test_newest_common(boundaries: list[list[int]], expected: int | None) -> None:
    assert newest_common(boundaries) == expected


def test_ranks_that_cannot_talk_are_told_how() -> None:
    with pytest.raises(UsageError, match="init_process_group before"):
        agree([3], world_size=2)


def torchrun(workshop: Workshop) -> tuple[str, ...]:
    script: Path = workshop.write("train.py", TRAIN)
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))


def ranks(told: str) -> list[tuple[str, str, str]]:
    """Of each rank its number, how many batches it did, and the digest of its model."""
    return sorted(re.findall(r"rank (\d) did (\d+), (\w+)", told))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, servers: Servers) -> list[tuple[str, str, str]]:
    directory = tmp_path_factory.mktemp("undisturbed")
    alone = Workshop(directory, directory / "ramdisk", servers)
    alone.environ["GPUSLICE_RAMDISK_DIR"] = str(alone.ramdisk)
    script = alone.write("train.py", TRAIN)
    return ranks("".join(finish_ranks(alone.start_ranks(2, [sys.executable, str(script), "0"]))))


def check_went_on_together(told: str, undisturbed: list[tuple[str, str, str]]) -> None:
    after = ranks(told)
    assert [(rank, digest) for rank, _, digest in after] == [
        (rank, digest) for rank, _, digest in undisturbed
    ]
    # Both ranks went on from the same batch: after boundary 3 or 6, whichever both had reached.
    assert len({done for _, done, _ in after}) == 1
    assert int(after[0][1]) < int(undisturbed[0][1])


@pytest.mark.slow
@pytest.mark.gangs
def test_a_gang_whose_ranks_died_apart_goes_on_together(
    quick_workshop: Workshop, undisturbed: list[tuple[str, str, str]]
) -> None:
    drill = ("--job", "gang", "--continue-anyway", "--suspend-every", "3", *torchrun(quick_workshop))
    killed = quick_workshop.gpuslice_run(*drill, "5")
    assert "exitcode  : -9" in killed.stderr
    finished = quick_workshop.gpuslice_run(*drill, "0")
    assert finished.returncode == 0, finished.stderr
    check_went_on_together(finished.stdout, undisturbed)


@pytest.mark.slow
@pytest.mark.gangs
def test_so_it_does_from_checkpoints_whoever_starts_its_ranks(
    warm_workshop: Workshop, undisturbed: list[tuple[str, str, str]]
) -> None:
    warm_workshop.write("train.py", TRAIN)
    drill = warm_workshop.command("--job", "gang", "--continue-anyway", "--checkpoint-every", "3", "train.py")
    survivor, killed = warm_workshop.start_ranks(2, [*drill, "5"])
    killed.communicate(timeout=PATIENCE_S)
    assert killed.returncode == -signal.SIGKILL
    survivor.kill()
    survivor.communicate(timeout=PATIENCE_S)
    told = finish_ranks(warm_workshop.start_ranks(2, [*drill, "0"]))
    check_went_on_together("".join(told), undisturbed)


@pytest.mark.slow
@pytest.mark.gangs
def test_so_it_does_if_the_rank_with_the_store_is_killed_before_others_are_suspended(
    warm_workshop: Workshop, undisturbed: list[tuple[str, str, str]]
) -> None:
    warm_workshop.write("train.py", TRAIN)
    drill = warm_workshop.command("--job", "gang", "--checkpoint-every", "3", "train.py", "0")
    suspended = warm_workshop.command(
        "--job", "gang", "--checkpoint-every", "3", "--suspend-every", "8", "train.py", "0"
    )
    warm_workshop.environ["DIES_FIRST"] = "6"
    killed, survivor = warm_workshop.start_ranks(2, suspended)
    told = killed.communicate(timeout=PATIENCE_S)[1]
    assert killed.returncode == -signal.SIGKILL, told
    told = survivor.communicate(timeout=PATIENCE_S)[1]
    assert survivor.returncode != 0
    assert "the store of the process group is not available" in told, told
    del warm_workshop.environ["DIES_FIRST"]
    check_went_on_together("".join(finish_ranks(warm_workshop.start_ranks(2, drill))), undisturbed)
