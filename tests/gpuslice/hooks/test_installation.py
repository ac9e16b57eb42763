"""What a rank leaves behind when its script has ended: no thread of gpuslice's sees the interpreter go."""

from __future__ import annotations

import json

import pytest

from gpuslice.wire import Resume

from ..agent.scripted_scheduler import ScriptedScheduler, end, job, scheduler
from ..conftest import Workshop

__all__ = ["scheduler"]  # a fixture

#: Trains with all threads that a rank may have, and lists them in the midst of it and when all has ended:
#: an exit handler of before torch's import is called after all others.
SCRIPT = """
import atexit, json, os, sys, threading
def ours():
    return sorted({t.name for t in threading.enumerate() if t.name.startswith("gpuslice-")})
def at_the_end():
    with open(f"threads.{os.getpid()}", "w") as file:
        json.dump([amid, ours()], file)
amid = []
atexit.register(at_the_end)
import torch
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader
import gpuslice
def train(rank=0, world_size=1):
    if world_size > 1:
        meet = f"file://{os.getcwd()}/meet"
        torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=world_size)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.Adam(model.parameters())
    gpuslice.attach(model=model, optimizer=optimizer)
    for x in DataLoader(torch.ones(24, 256), batch_size=1):
        model(x).sum().backward()
        optimizer.step()
        for name in ours():
            if name not in amid:
                amid.append(name)
    if world_size > 1:
        torch.distributed.destroy_process_group()
def spawned():
    spawn(train, (2,), 2)
def failing():
    train()
    raise ValueError("the script's own")
def leaving():
    train()
    sys.exit(3)
def forking():
    train()
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
if __name__ == "__main__":
    torch.set_num_threads(1)
    {"ends": train, "fails": failing, "leaves": leaving, "forks": forking, "spawns": spawned}[sys.argv[1]]()
"""


def _threads(workshop: Workshop) -> tuple[set[str], list[list[str]]]:
    """Those of gpuslice's that were seen in the midst of it, and for every process those at its end."""
    found = [json.loads(file.read_text()) for file in workshop.directory.glob("threads.*")]
    return {name for amid, _ in found for name in amid}, [left for _, left in found]


@pytest.mark.parametrize(
    ("how", "code", "processes"),
    [
        ("fails", 1, 1),
        pytest.param("forks", 0, 2, marks=pytest.mark.slow),
        pytest.param("spawns", 0, 3, marks=pytest.mark.slow),
    ],
)
def test_no_thread_is_left_however_the_script_ends(
    quick_workshop: Workshop, how: str, code: int, processes: int
) -> None:
    quick_workshop.write("train.py", SCRIPT)
    flags = ("--suspend-every", "7", "--checkpoint-every", "5", "--job", "job", "--spill-dir", "spilled")
    done = quick_workshop.gpuslice_run(*flags, "train.py", how)
    assert done.returncode == code, done.stderr
    amid, left = _threads(quick_workshop)
    assert "gpuslice-watch" in amid
    assert left == [[]] * processes


def test_no_thread_of_a_scheduled_job_is_left(quick_workshop: Workshop, scheduler: ScriptedScheduler) -> None:
    with job(quick_workshop, scheduler, "leaves", script=SCRIPT) as process:
        scheduler.welcome()
        scheduler.grant(1)
        assert end(process)[0] == 3
    amid, left = _threads(quick_workshop)
    assert {"gpuslice-link", "gpuslice-watch"} <= amid
    assert left == [[]]


def test_no_thread_of_a_job_that_could_not_begin_is_left(
    quick_workshop: Workshop, scheduler: ScriptedScheduler
) -> None:
    with job(quick_workshop, scheduler, "ends", script=SCRIPT) as process:
        scheduler.welcome()
        scheduler.say(Resume(epoch=1, device="cuda:0"))  # there is none here
        code, _, err = end(process)
    assert code == 3, err
    assert _threads(quick_workshop) == (set(), [[]])
