"""Torch's own ProcessGroupNCCL over a fake NCCL: communicators and timeouts of gangs that are suspended."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import cudasim
import pytest
import torch
import torch.distributed as dist

from gpuslice.checkpoint.switch.process_groups import ParkedGroups
from gpuslice.config import Settings
from gpuslice.errors import DeviceMemoryError, SuspendRefusedError
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.runtime import trainings
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.runtime import Runtime
from gpuslice.types import DeviceName

from ..gpuslice.conftest import Workshop, finish_ranks

MIB = 1 << 20
TIMEOUTS = Path(__file__).parents[1] / "gpuslice" / "parked_timeouts.py"
#: Trains by DDP, FSDP2, tensor parallelism and in a second group; says what it computed.
TRAIN = """
import datetime, hashlib, json, os, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
second = dist.new_group(timeout=datetime.timedelta(seconds=77), group_desc="the second")
alone = dist.new_subgroups(group_size=1)[0]
torch.manual_seed(0)
ddp, sharded, plain, parallel = (torch.nn.Linear(64, 64).cuda() for _ in range(4))
mesh = init_device_mesh("cuda", (2,))
fully_shard(sharded, mesh=mesh)
parallelize_module(parallel, mesh, ColwiseParallel(output_layouts=Replicate()), src_data_rank=None)
models = DistributedDataParallel(ddp, gradient_as_bucket_view=True), sharded, plain, parallel
optimizers = [torch.optim.Adam(model.parameters()) for model in models]
torch.manual_seed(rank)
for batch in DataLoader(torch.randn(48, 64), batch_size=4):
    for model, optimizer in zip(models, optimizers):
        model(batch.cuda()).square().mean().backward()
        if model is plain:
            dist.all_reduce(model.weight.grad, group=second)
            model.bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
digest = hashlib.sha256()
for weight in ddp.weight, sharded.weight.to_local(), plain.weight, parallel.weight.to_local():
    digest.update(weight.detach().cpu().numpy().tobytes())
with open(f"digest.{rank}", "w") as file:
    file.write(digest.hexdigest())
seen = []
for group in dist.group.WORLD, second, alone:
    options = group._get_backend(torch.device("cuda")).options
    ranks = dist.get_process_group_ranks(group)
    assert options.global_ranks_in_group in ([], ranks)
    seen.append([group.group_name, group.group_desc, options.group_name, ranks, str(options._timeout)])
with open(f"groups.{rank}", "w") as file:
    json.dump(seen, file)
dist.destroy_process_group()
"""


def digests(directory: Path) -> list[str]:
    """What both ranks have computed, and how their groups were in the end."""
    names = [f"{what}.{rank}" for what in ("digest", "groups") for rank in range(2)]
    return [directory.joinpath(name).read_text() for name in names]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("undisturbed")
    workshop = gang(Workshop(directory, directory / "ramdisk"))
    finish_ranks(workshop.start_ranks(2, [sys.executable, str(workshop.write("train.py", TRAIN))]))
    return digests(directory)


def gang(workshop: Workshop) -> Workshop:
    workshop.environ |= {
        "CUDASIM_ACCOUNT": str(workshop.directory / "account"),
        "CUDASIM_DELAY_US": "20",
        "CUDASIM_NCCL_LOG": str(workshop.directory / "verbs"),
        "XDG_RUNTIME_DIR": str(workshop.directory),
    }
    return workshop


def suspended(workshop: Workshop) -> list[dict[str, Any]]:
    """The switches of both ranks of a gang that is suspended at boundaries 3, 6, 9 and 12."""
    script = str(gang(workshop).write("train.py", TRAIN))
    flags = ("--device", "cuda", "--suspend-every", "3", "--report", "r.json")
    finish_ranks(workshop.start_ranks(2, workshop.command(*flags, script)))
    reports = [json.loads(file.read_text()) for file in workshop.directory.glob("r*.json")]
    assert [len(report["switches"]) for report in reports] == [4, 4]
    return [switch for report in reports for switch in report["switches"]]


@pytest.mark.slow
def test_communicators_are_released_while_a_gang_is_parked(
    workshop: Workshop, undisturbed: list[str]
) -> None:
    switches = suspended(workshop)
    assert digests(workshop.directory) == undisturbed
    for switch in switches:
        assert switch["bytes_communicators"] == 2 * 8 * MIB  # of both groups
        assert switch["held"]["communicators"] == 2 * 2 * MIB
    for rank in range(2):
        first, *switched, last = verbs(workshop, rank)
        assert switched == [("suspend", 2), ("resume", 2)] * 4
        assert (first[0], last[0]) == ("init", "destroy")


def verbs(workshop: Workshop, rank: int) -> list[tuple[str, int]]:
    """What happened to communicators, besides collectives: in order, and how often in a row."""
    noted = workshop.directory.joinpath(f"verbs.{rank}").read_text().split()
    return [(verb, len(list(same))) for verb, same in groupby(one for one in noted if one != "collective")]


@pytest.mark.slow
def test_an_older_nccl_keeps_its_memory(workshop: Workshop, undisturbed: list[str]) -> None:
    workshop.environ["CUDASIM_NCCL_VERSION"] = "22809"
    switches = suspended(workshop)
    assert digests(workshop.directory) == undisturbed
    assert {switch["bytes_communicators"] for switch in switches} == {0}
    assert not any("communicators" in switch["held"] for switch in switches)
    assert verbs(workshop, 0) == [("init", 2), ("destroy", 2)]


@pytest.mark.parametrize("version", ["22809", "22907"])
def test_neither_timeouts_nor_the_watchdog_fire_while_parked(warm_workshop: Workshop, version: str) -> None:
    """With communicators that stay the first rank waits in a collective, else in its resume."""
    warm_workshop.environ |= {
        "CUDASIM_NCCL_VERSION": version,
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1",
        "TORCH_NCCL_COORD_CHECK_MILSEC": "100",
    }
    done = warm_workshop.python(str(TIMEOUTS), str(warm_workshop.directory), "nccl")
    assert done.returncode == 0, done.stderr


#: The first rank finds no memory for its communicator at first, while the second one waits for it in NCCL.
RETRY = """
import os, torch
import torch.distributed as dist
import cudasim, gpuslice
from gpuslice.errors import DeviceMemoryError

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
weights = torch.ones(8, device="cuda")
dist.all_reduce(weights)
job = gpuslice.attach(weights=weights)
job.suspend()
if rank == 0:
    cudasim.fail("ncclCommResume", 2)
    try:
        job.resume()
    except DeviceMemoryError:
        pass
    else:
        raise AssertionError("it found memory")
job.resume()
dist.all_reduce(weights)
assert weights.tolist() == [4.0] * 8
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_others_wait_for_a_rank_that_tries_again(workshop: Workshop) -> None:
    script = str(gang(workshop).write("retry.py", RETRY))
    finish_ranks(workshop.start_ranks(2, [sys.executable, script]))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Runtime]:
    """A rank of one, in this process."""
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30)
    )
    settings = Settings(ramdisk_dir=str(tmp_path / "ramdisk"), device="cuda:0")
    runtime = Runtime(settings, RankIdentity(), BoundaryCounter())
    torch.cuda.set_device(0)
    yield runtime
    trainings.close(runtime)
    dist.destroy_process_group()


def test_a_resume_without_room_for_a_communicator_can_be_tried_again(job: Runtime) -> None:
    weights = torch.arange(8.0, device="cuda:0")
    dist.all_reduce(weights)
    job.suspension.suspend(explicit=True)
    cudasim.fail("ncclCommResume", 2)
    with pytest.raises(DeviceMemoryError, match="NCCL could not resume"):
        job.suspension.resume()
    assert job.suspension.away
    record = job.suspension.resume()
    assert record.bytes_communicators == 8 * MIB
    dist.all_reduce(weights)
    assert weights.tolist() == list(map(float, range(8)))


def test_a_suspend_that_fails_leaves_the_communicators_alone(job: Runtime) -> None:
    weights = torch.ones(8, device="cuda:0")
    dist.all_reduce(weights)
    cudasim.fail("cudaMemcpyAsync", 2, nth=1)
    with cudasim.counting() as calls, pytest.raises(Exception, match="suspend failed"):
        job.suspension.suspend(explicit=True)
    assert "ncclCommSuspend" not in calls
    dist.all_reduce(weights)
    assert weights.tolist() == [1.0] * 8


def test_a_rank_that_cannot_park_has_the_others_keep_their_memory(job: Runtime) -> None:
    """Nobody waits for it: it has said so before they ask."""
    weights = torch.ones(8, device="cuda:0")
    dist.all_reduce(weights)
    other = ParkedGroups(lambda _callback: None)
    other.pass_by(job.boundaries.count, job.suspension.in_use.device)
    record = job.suspension.suspend(explicit=True)
    assert (record.bytes_communicators, record.held["communicators"]) == (0, 10 * MIB)
    job.suspension.resume()
    dist.all_reduce(weights)
    assert weights.tolist() == [1.0] * 8


def test_a_communicator_keeps_its_rank_on_its_gpu(job: Runtime) -> None:
    weights = torch.ones(8, device="cuda:0")
    job.suspension.suspend(explicit=True)
    assert not job.suspension.obstacle_to_moves(), "it has no communicator before its first collective"
    job.suspension.resume()
    dist.all_reduce(weights)
    job.suspension.suspend(explicit=True)
    assert "an NCCL communicator" in job.suspension.obstacle_to_moves()
    with pytest.raises(SuspendRefusedError, match="an NCCL communicator"):
        job.suspension.resume(DeviceName.parse("cuda:1"))
    job.suspension.resume()
    dist.all_reduce(weights)
    assert weights.tolist() == [1.0] * 8


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("CUDASIM_NCCL_VERSION", "22809", "this NCCL cannot release the memory of its communicators"),
        ("CUDASIM_NCCL_PERSISTENT_MIB", "300", "such as the buffers of NVLS: 300.00 MiB stay on cuda:0"),
        ("CUDASIM_NCCL_PERSISTENT_MIB", "3", ""),
    ],
)
def test_what_nccl_cannot_release_is_said_once(
    warm_workshop: Workshop, variable: str, value: str, said: str
) -> None:
    warm_workshop.environ[variable] = value
    script = str(warm_workshop.write("train.py", ALONE))
    done = warm_workshop.gpuslice_run("--device", "cuda:0", "--suspend-every", "2", script)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("while the job is parked") == bool(said), done.stderr
    assert said in done.stderr


#: A rank of one with a communicator.
ALONE = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
for batch in DataLoader(torch.ones(8, 4), batch_size=1):
    dist.all_reduce(batch.cuda())
dist.destroy_process_group()
"""
