"""Checkpoints end to end: killed while one is being copied, and started again."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections.abc import Collection
from pathlib import Path
from typing import cast

import pytest
import torch

from gpuslice.checkpoint.format.reader import open_snapshot
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.switch.background_snapshot import BackgroundSnapshot
from gpuslice.errors import GpusliceError, RamDiskFullError
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.checkpoints import Checkpoints, Schedule
from gpuslice.runtime.run_report import Report

from ..conftest import Workshop
from ..warm.process import Servers

# Weights and moments that wait for the optimizer's step, statistics and averages that do not. The copy in the
# background is slowed down and says when it is half done. With "broken" the step waits for nothing, and the
# copy for the step. KILLED_AFTER is "copies,lines": so many lines after so many copies said so it is killed.
TRAIN = """
import hashlib, os, signal, sys, threading, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import gpuslice
from gpuslice.checkpoint.switch.background_snapshot import BackgroundSnapshot
from gpuslice.kernels.host.device import CpuDevice

copy_out, steps, said = CpuDevice.copy_out, 0, []
copies, lines = map(int, os.environ.get("KILLED_AFTER", "0,0").split(","))

def say(line):
    os.write(1, f"{line}\\n".encode())
    said.append(line)
    if copies and said.count("copying") >= copies:
        at = [number for number, one in enumerate(said) if one == "copying"][copies - 1]
        if len(said) > at + lines:
            os.kill(os.getpid(), signal.SIGKILL)

def slowly(device, pairs, *rest):
    if threading.current_thread() is threading.main_thread() or not pairs:
        return copy_out(device, pairs, *rest)
    copy_out(device, pairs[:1], *rest)
    before, until_s = steps, time.monotonic() + (2.0 if "broken" in sys.argv else 0.1)
    say("copying")
    while time.monotonic() < until_s and ("broken" not in sys.argv or steps == before):
        time.sleep(0.01)
    copy_out(device, pairs[1:], *rest)

CpuDevice.copy_out = slowly
if "broken" in sys.argv:
    check = BackgroundSnapshot.check
    def no_check(snapshot):
        snapshot._watched.clear()
        if threading.current_thread() is threading.main_thread() and not stepping:
            check(snapshot)
    BackgroundSnapshot.check = no_check
stepping = False

def main():
    global stepping, steps
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(160, 160), torch.nn.BatchNorm1d(160), torch.nn.Dropout(0.2), torch.nn.Linear(160, 160)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = torch.optim.swa_utils.AveragedModel(model)
    loader = DataLoader(TensorDataset(torch.randn(40, 160)), batch_size=4, shuffle=True)
    job = gpuslice.attach(model=model, optimizer=optimizer, average=average, loader=loader)
    for epoch in job.epochs(2):
        for number, (x,) in enumerate(job.batches(loader)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            stepping = True
            optimizer.step()
            stepping = False
            steps += 1
            average.update_parameters(model)
            say("batch")
            if "explicit" in sys.argv and number % 3 == 1:
                assert job.checkpoint()
    found = hashlib.sha256()
    for tensor in [*model.state_dict().values(), *average.state_dict().values(), torch.rand(1)]:
        found.update(tensor.detach().numpy().tobytes())
    print("digest", found.hexdigest())

main()
"""


@pytest.fixture
def workshop(warm_workshop: Workshop) -> Workshop:
    return warm_workshop


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory, servers: Servers) -> str:
    """The last line of an undisturbed run."""
    directory = tmp_path_factory.mktemp("undisturbed")
    workshop = Workshop(directory, directory / "ramdisk", servers)
    done = workshop.python(str(workshop.write("train.py", TRAIN)))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def until_killed(workshop: Workshop, command: list[str], *, copies: int, lines: int) -> None:
    """Run until SIGKILL in the middle of a copy, after so many of them and so many lines more."""
    workshop.environ["KILLED_AFTER"] = f"{copies},{lines}"
    done = workshop.execute(command)
    assert done.returncode == -signal.SIGKILL, done.stderr
    del workshop.environ["KILLED_AFTER"]


@pytest.mark.parametrize(
    ("how", "kills", "saved"), [("every", 1, 1), pytest.param("explicit", 1, 2, marks=pytest.mark.slow)]
)
def test_killed_while_a_checkpoint_is_copied(
    workshop: Workshop, digest: str, how: str, kills: int, saved: int
) -> None:
    script = str(workshop.write("train.py", TRAIN))
    options = ["--checkpoint-every", "2"] if how == "every" else []
    command = workshop.command("--job", "k", *options, script, how)
    choose = random.Random(how)
    for _ in range(kills):
        until_killed(workshop, command, copies=choose.randrange(2, 4), lines=choose.randrange(2))
    for info in RamDisk(workshop.ramdisk).listing():
        assert info.snapshot is not None
        assert info.restartable
        with open_snapshot(Path(info.snapshot)) as snapshot:
            snapshot.verify()
    last = workshop.execute(command)
    assert last.returncode == 0, last.stderr
    assert last.stdout.splitlines()[-1] == digest
    # Each life went on from what the one before had saved: at its second boundary, one batch in, at least.
    assert last.stdout.count("batch") <= 20 - saved
    assert not list(workshop.ramdisk.glob("k.*"))


def test_a_step_that_does_not_wait_would_be_seen(workshop: Workshop, digest: str) -> None:
    script = str(workshop.write("train.py", TRAIN))
    command = workshop.command("--job", "k", "--checkpoint-every", "2", script, "broken")
    until_killed(workshop, command, copies=3, lines=0)
    last = workshop.execute(command)
    assert last.returncode == 0, last.stderr
    assert last.stdout.count("batch") < 20
    assert last.stdout.splitlines()[-1] != digest


def test_the_report_counts_checkpoints(workshop: Workshop) -> None:
    script = str(workshop.write("train.py", TRAIN))
    report = workshop.directory / "report.json"
    done = workshop.gpuslice_run("--job", "k", "--checkpoint-every", "5", "--report", str(report), script)
    assert done.returncode == 0, done.stderr
    totals = json.loads(report.read_bytes())["totals"]
    assert (totals["boundaries"], totals["checkpoints"]) == (22, 4)
    assert totals["checkpoint_bytes"] > 4 * 3 * 4 * 160 * 160
    assert totals["checkpoint_blocked_s"] > 0


class Starts:
    """Stands in for a runtime that starts checkpoints; ``results`` are what happens each time."""

    def __init__(self, *results: GpusliceError | None) -> None:
        self.results = list(results)
        self.boundaries = BoundaryCounter()
        self.at: list[int] = []
        self.obstacle: str | None = None
        Schedule(
            Checkpoints(Report(None)),
            self.boundaries,
            every=3,
            obstacle=lambda: self.obstacle,
            start=self.start,
        )

    def start(self, hasty: Collection[str]) -> BackgroundSnapshot | None:
        assert not hasty
        self.at.append(self.boundaries.count)
        result = self.results.pop(0)
        if result is not None:
            raise result
        return None

    def cross(self, count: int) -> None:
        for _ in range(count):
            self.boundaries.fetching()


def test_where_no_restart_is_possible_the_next_boundary_takes_its_place() -> None:
    job = Starts(None, None, RamDiskFullError("full", "make room"), RamDiskFullError("full", "make room"))
    job.cross(8)
    # From boundary 3 on it tries, fails to find room at 5, and leaves it at that until 6.
    assert job.at == [3, 4, 5, 6]


def test_a_full_ram_disk_is_said_and_the_training_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    job = Starts(RamDiskFullError("the RAM disk is full", "make room"))
    job.cross(5)
    assert job.at == [3]
    assert capsys.readouterr().err == "gpuslice: the RAM disk is full\ngpuslice: make room\n"


def test_why_there_are_no_checkpoints_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    job = Starts()
    job.obstacle = "no checkpoints: because"
    job.cross(10)
    assert (job.at, capsys.readouterr().err) == ([], "gpuslice: no checkpoints: because\n")


class Interrupted:
    """Stands in for a snapshot during whose every step Ctrl-C comes; ``done`` are those that were ended."""

    boundary, nbytes, error, changed = 1, 0, None, ()

    def __init__(self) -> None:
        self.done: list[str] = []

    def start(self, hasty: Collection[str]) -> BackgroundSnapshot:
        self.step("start")
        return cast("BackgroundSnapshot", self)

    def step(self, name: str) -> None:
        signal.raise_signal(signal.SIGINT)
        self.done.append(name)

    def check(self) -> None:
        self.step("check")

    def publish_soon(self) -> None:
        self.step("publish")

    def settle(self, *, keep: bool) -> None:
        self.step("settle")


def test_ctrl_c_waits_for_every_step_of_a_checkpoint() -> None:
    snapshot, checkpoints = Interrupted(), Checkpoints(Report(None))
    with pytest.raises(KeyboardInterrupt):
        checkpoints.begin(snapshot.start)
    assert checkpoints.under_way
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    with pytest.raises(KeyboardInterrupt):
        checkpoints.settle()
    assert snapshot.done == ["start", "check", "publish", "settle"]
    assert not checkpoints.under_way


def test_a_step_in_another_thread_waits_for_the_copy_too() -> None:
    snapshot, checkpoints = Interrupted(), Checkpoints(Report(None))
    snapshot.step = snapshot.done.append  # type: ignore[method-assign]
    checkpoints.begin(snapshot.start)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    thread.join()
    checkpoints.settle()
    assert snapshot.done == ["start", "check", "publish", "settle"]
