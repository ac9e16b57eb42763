"""A job that obeys a scheduler: real scripts in their own processes, a real ROUTER socket here."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from unittest.mock import Mock

import pytest
import zmq

from gpuslice.agent.agent import Agent
from gpuslice.checkpoint.ramdisk.room_requests import request_room
from gpuslice.wire import (
    PROTOCOL_VERSION,
    Bye,
    Cancel,
    FromAgent,
    Hello,
    Overshot,
    Profiled,
    Progress,
    Refused,
    Resume,
    Resumed,
    Suspend,
    Suspended,
    ToAgent,
    Welcome,
    decode_from_agent,
    encode,
)

from ...patience import PATIENCE_MS, PATIENCE_S
from ..conftest import Workshop

_M = TypeVar("_M", bound=FromAgent)

TRAIN = """
import hashlib, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(64, 20), torch.randint(0, 3, (64,)))
print("started", flush=True)
epochs = 0
while epochs < int(sys.argv[1]) and not os.path.exists("enough"):
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    epochs += 1
digest = hashlib.sha256()
for value in model.state_dict().values():
    digest.update(value.numpy().tobytes())
print(epochs, digest.hexdigest())
"""
#: More epochs than any test waits for. A file called "enough" ends them.
ENDLESS = "1000000"


class Desk:
    """A scheduler of the test's own: says and hears single messages."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = f"ipc://{directory}/desk"
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(self.endpoint)

    def say(self, message: ToAgent, identity: str = "job:0") -> None:
        self._router.send_multipart([identity.encode(), encode(message)])

    def say_nonsense(self, identity: str = "job:0") -> None:
        self._router.send_multipart([identity.encode(), b"\xc1nonsense"])

    def hear(self, kind: type[_M], where: Callable[[_M], bool] = lambda message: True) -> _M:
        """The next message of this kind, which comes before any other but ``Progress``."""
        ends_s = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < ends_s, f"nothing but Progress, and no {kind.__name__}"
            identity, frame = self._router.recv_multipart()
            self.identity = identity.decode()
            message = decode_from_agent(frame)
            if isinstance(message, kind):
                if where(message):
                    return message
            else:
                assert isinstance(message, Progress | Profiled), message

    def welcome(self) -> Hello:
        hello = self.hear(Hello)
        self.say(Welcome(version=PROTOCOL_VERSION))
        return hello

    def grant(self, epoch: int, device: str = "cpu") -> Resumed:
        self.say(Resume(epoch=epoch, device=device))
        return self.hear(Resumed)

    def park(self, epoch: int) -> Suspended:
        """Stop the job a little ahead of where it is, as often as it takes."""
        return self.stop(epoch, self.hear(Progress, lambda progress: progress.boundary > 0).boundary + 1)

    def stop(self, epoch: int, stop_at: int, *, said: bool = False) -> Suspended:
        """Stop the job at ``stop_at``, or further on if it is past that."""
        ahead = 50
        while True:
            if not said:
                self.say(Suspend(epoch=epoch, stop_at=stop_at))
            said, answer = False, self.hear_either(Suspended)
            if isinstance(answer, Suspended):
                assert answer.boundary == stop_at
                return answer
            stop_at = answer.boundary + ahead
            ahead *= 2  # who is slow here has to look further ahead

    def stop_in_vain(self, epoch: int) -> Refused:
        """Tell the job to stop, which it refuses, at a boundary that it has not passed."""
        at, ahead = self.hear(Progress).boundary, 50
        while True:
            self.say(Suspend(epoch=epoch, stop_at=at + ahead))
            answer = self.hear_either(Refused)
            if isinstance(answer, Refused):
                return answer
            at, ahead = answer.boundary, 2 * ahead

    def hear_either(self, kind: type[_M]) -> _M | Overshot:
        """The next message of this kind, unless the job is past the boundary that it was told of."""
        while True:
            message = decode_from_agent(self._router.recv_multipart()[1])
            if isinstance(message, kind | Overshot):
                return message
            assert isinstance(message, Progress | Profiled), message

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.close()


@pytest.fixture
def workshop(warm_workshop: Workshop) -> Workshop:
    return warm_workshop


@contextmanager
def job(
    workshop: Workshop, desk: Desk, epochs: str, *flags: str, script: str = TRAIN
) -> Iterator[subprocess.Popen[str]]:
    workshop.write("train.py", script)
    workshop.environ |= {"GPUSLICE_SOCKET": desk.endpoint}
    command = workshop.command("--job", "job", *flags, "train.py", epochs)
    process = workshop.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def ends_as_undisturbed(workshop: Workshop, desk: Desk, process: subprocess.Popen[str]) -> str:
    """End a job that runs: as many epochs without a scheduler make the same model. What it said of itself."""
    enough = workshop.write("enough", "")
    boundaries = desk.hear(Bye).boundary
    code, out, err = end(process)
    epochs = out.split()[1]
    assert boundaries == int(epochs) * 9
    enough.unlink()
    assert (code, out) == (0, workshop.python("train.py", epochs).stdout)
    return err


def test_the_first_boundary_is_told_without_waiting_for_a_heartbeat(workshop: Workshop, desk: Desk) -> None:
    with job(workshop, desk, ENDLESS):
        desk.welcome()
        desk.grant(1)
        desk.hear(Progress, lambda progress: progress.boundary == 1)


def test_a_job_tells_once_what_its_optimizers_train(workshop: Workshop, desk: Desk) -> None:
    with job(workshop, desk, ENDLESS):
        desk.welcome()
        desk.grant(1)
        told = desk.hear(Profiled)
        sizes = [20 * 64, 64, 64, 64, 64 * 3, 3]
        assert (told.tensors, told.nbytes, told.largest_bytes) == (6, 4 * sum(sizes), 4 * sizes[0])
        parked = desk.park(1)
        assert (parked.route, parked.tensors > 6) == ("tensor", True)


def test_the_loss_that_a_script_reports_goes_with_its_heartbeats(workshop: Workshop, desk: Desk) -> None:
    plain = "nn.functional.cross_entropy(model(x), y).backward()"
    assert plain in TRAIN
    reporting = "loss = nn.functional.cross_entropy(model(x), y); loss.backward(); gpuslice.report(loss=loss)"
    script = "import gpuslice\n" + TRAIN.replace(plain, reporting)
    with job(workshop, desk, ENDLESS, script=script):
        desk.welcome()
        desk.grant(1)
        told = desk.hear(Progress, lambda progress: progress.loss is not None)
        assert told.loss is not None
        assert 0.0 < told.loss < 20.0
        desk.hear(Progress, lambda progress: progress.loss not in (None, told.loss))


@pytest.mark.slow
def test_who_waits_for_a_lease_imports_meanwhile_what_optimizers_need(workshop: Workshop, desk: Desk) -> None:
    script = "import sys, torch\nprint('torch._dynamo' in sys.modules)"
    with job(workshop, desk, "", script=script) as process:
        desk.welcome()
        for _ in range(8):  # heartbeats: four seconds
            desk.hear(Progress)
        desk.grant(1)
        desk.hear(Bye)
        code, out, _ = end(process)
    plain = workshop.python("train.py")
    assert (code, out, plain.stdout) == (0, "True\n", "False\n")


def test_a_job_is_moved_about_and_ends_with_the_same_digest(workshop: Workshop, desk: Desk) -> None:
    with job(workshop, desk, ENDLESS) as process:
        hello = desk.welcome()
        assert (hello.job, hello.rank, hello.world_size, hello.boundary) == ("job", 0, 1, 0)
        assert (desk.identity, hello.pid) == ("job:0", process.pid)
        desk.say(Suspend(epoch=0, stop_at=1))  # it has no lease: stale
        desk.say_nonsense()
        assert desk.grant(1, "cpu:0").boundary == 0
        parked = desk.park(1)
        assert parked.nbytes > 0
        assert set(parked.stages_s) >= {"quiesce_s", "copy_out_s", "publish_s", "free_s"}
        desk.say(Resume(epoch=0, device="cpu:1"))  # stale: it stays parked
        resumed = desk.grant(2, "cpu:1")
        assert (resumed.epoch, resumed.boundary) == (2, parked.boundary)
        further = desk.stop(2, resumed.boundary + 5).boundary + 9
        desk.say(Resume(epoch=2, device="cpu:1"))  # the gang stops further on: once more, same lease
        desk.say(Suspend(epoch=2, stop_at=further))
        assert desk.hear(Resumed).epoch == 2
        assert desk.stop(2, further, said=True).boundary >= further
        desk.grant(3)
        desk.say(Suspend(epoch=2, stop_at=10**9))  # of the former lease: nothing happens
        desk.say(Suspend(epoch=3, stop_at=1))
        assert desk.hear(Overshot).boundary >= resumed.boundary
        assert "dropped what the scheduler sent" in ends_as_undisturbed(workshop, desk, process)


def make_room(workshop: Workshop) -> None:
    """Have the parked job's slot moved out of the RAM disk; it may just have said that it is parked."""
    ends_s = time.monotonic() + PATIENCE_S
    while not any(map(request_room, workshop.ramdisk.glob("job@*.r0"))):
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def test_a_parked_job_gives_its_room_away_and_goes_on_with_the_same_digest(
    workshop: Workshop, desk: Desk
) -> None:
    spill = workshop.directory / "spill"
    with job(workshop, desk, ENDLESS, "--spill-dir", str(spill)) as process:
        desk.welcome()
        assert desk.grant(1).stages_s == {}
        for epoch in (2, 3):
            desk.park(epoch - 1)
            make_room(workshop)
            assert list(spill.glob("*.gsnp"))
            assert not list(workshop.ramdisk.glob("*/*.gsnp"))
            assert desk.grant(epoch).stages_s["fetch_s"] > 0
            assert not list(spill.glob("*.gsnp"))
        ends_as_undisturbed(workshop, desk, process)


def test_a_snapshot_that_was_damaged_where_it_was_spilled_ends_the_job(
    workshop: Workshop, desk: Desk
) -> None:
    spill = workshop.directory / "spill"
    with job(workshop, desk, ENDLESS, "--spill-dir", str(spill)) as process:
        desk.welcome()
        desk.grant(1)
        desk.park(1)
        make_room(workshop)
        (path,) = spill.glob("*.gsnp")
        with path.open("r+b") as file:
            file.seek(5000)
            file.write(b"\xff\xfe")
        desk.say(Resume(epoch=2, device="cpu"))
        code, _, err = end(process)
    assert code == 4
    assert ".r0.A.gsnp: its header is damaged" in err


def test_the_scheduler_may_die_and_come_back(workshop: Workshop, desk: Desk, tmp_path: Path) -> None:
    with job(workshop, desk, ENDLESS) as process:
        desk.welcome()
        desk.grant(1)
        parked = desk.park(1)
        desk.close()
        second = Desk(tmp_path)
        try:
            assert second.welcome().boundary == parked.boundary
            assert second.hear(Suspended) == parked  # how it stands
            second.grant(2)
            running = second.hear(Progress, lambda progress: progress.boundary > parked.boundary)
            assert running.epoch == 2
        finally:
            second.close()
        third = Desk(tmp_path)
        try:
            assert third.welcome().boundary > parked.boundary  # it has run on meanwhile
            third.say(Cancel(epoch=2, reason="enough"))
            assert end(process)[0] == -signal.SIGTERM
        finally:
            third.close()


def test_a_parked_job_that_is_cancelled_runs_none_of_its_code(workshop: Workshop, desk: Desk) -> None:
    with job(workshop, desk, ENDLESS, "--report", "r.json") as process:
        desk.welcome()
        desk.grant(1)
        desk.park(1)
        desk.say(Cancel(epoch=1, reason="by the user"))
        code, out, err = end(process)
    assert (code, out) == (-signal.SIGTERM, "started\n")
    assert "gpuslice: cancelled: by the user" in err
    assert (workshop.directory / "r.json").is_file()


def test_ctrl_c_while_parked_gives_the_script_its_state_back(workshop: Workshop, desk: Desk) -> None:
    with job(workshop, desk, ENDLESS) as process:
        desk.welcome()
        desk.grant(1)
        desk.park(1)
        process.send_signal(signal.SIGINT)
        desk.hear(Bye)
        code, _, err = end(process)
    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in err


#: Put before the loop of ``TRAIN``: handlers that look at the model, which has no memory in a parked job.
HANDLERS = """
import os, signal
def look(signum, frame):
    whole = all(p.untyped_storage().nbytes() and bool(p.isfinite().all()) for p in model.parameters())
    print(signal.Signals(signum).name, whole, flush=True)
def leave(signum, frame):
    look(signum, frame)
    sys.exit(7)
signal.signal(signal.SIGUSR1, look)
signal.signal(signal.SIGHUP, look)
signal.signal(signal.SIGTERM, leave)
"""


@contextmanager
def job_with_handlers(workshop: Workshop, desk: Desk) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A job that is parked, and the boundary it is parked at."""
    begin = 'print("started", flush=True)'
    assert begin in TRAIN
    with job(workshop, desk, ENDLESS, script=TRAIN.replace(begin, HANDLERS + begin)) as process:
        assert process.stdout is not None
        desk.welcome()
        desk.grant(1)
        assert process.stdout.readline() == "started\n"
        yield process, desk.park(1).boundary


def test_a_handler_waits_for_the_lease_that_brings_the_state_back(workshop: Workshop, desk: Desk) -> None:
    with job_with_handlers(workshop, desk) as (process, boundary):
        assert process.stdout is not None
        process.send_signal(signal.SIGUSR1)
        for _ in range(2):
            assert desk.hear(Progress).boundary == boundary
        desk.grant(2)
        assert process.stdout.readline() == "SIGUSR1 True\n"
        desk.hear(Progress, lambda progress: progress.boundary > boundary)


def test_a_script_that_is_asked_to_end_while_parked_can_do_so_with_its_state(
    workshop: Workshop, desk: Desk
) -> None:
    with job_with_handlers(workshop, desk) as (process, _):
        process.send_signal(signal.SIGTERM)
        desk.hear(Bye)
        code, out, _ = end(process)
    assert (code, out) == (7, "SIGTERM True\n")


def test_a_script_that_goes_on_parks_at_its_next_boundary(workshop: Workshop, desk: Desk) -> None:
    with job_with_handlers(workshop, desk) as (process, boundary):
        assert process.stdout is not None
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "SIGHUP True\n"
        desk.hear(Progress, lambda progress: progress.boundary == boundary + 1)
        for _ in range(2):
            assert desk.hear(Progress).boundary == boundary + 1
        assert desk.grant(2).boundary == boundary + 1
        desk.hear(Progress, lambda progress: progress.boundary > boundary + 1)


def test_a_cancelled_parked_job_runs_its_handler_for_sigterm(workshop: Workshop, desk: Desk) -> None:
    with job_with_handlers(workshop, desk) as (process, _):
        desk.say(Cancel(epoch=1, reason="by the user"))
        desk.hear(Bye)
        code, out, err = end(process)
    assert (code, out) == (7, "SIGTERM True\n")
    assert "gpuslice: cancelled: by the user" in err


def test_a_refused_suspend_is_reported_and_the_job_runs_on(workshop: Workshop, desk: Desk) -> None:
    with job(workshop, desk, ENDLESS, "--ramdisk-limit", "1k"):
        desk.welcome()
        desk.grant(1)
        refused = desk.stop_in_vain(1)
        assert (refused.running, refused.retryable) == (True, True)
        assert "RAM disk" in refused.error
        desk.hear(Progress, lambda progress: progress.boundary > refused.boundary)


def test_a_tenant_s_limit_is_a_reason_to_refuse(workshop: Workshop, desk: Desk) -> None:
    workshop.environ |= {"GPUSLICE_TENANT": "vision", "GPUSLICE_TENANT_RAMDISK": "20k"}
    with job(workshop, desk, ENDLESS):
        desk.welcome()
        desk.grant(1)
        refused = desk.stop_in_vain(1)
        assert (refused.running, refused.retryable) == (True, True)
        assert refused.error.startswith("tenant vision has no room in the RAM disk")
        assert "--tenant-ramdisk vision=" in refused.remedy
        desk.hear(Progress, lambda progress: progress.boundary > refused.boundary)


def test_a_scheduler_that_comes_when_the_script_has_ended_hears_that_too() -> None:
    """The greeting replaces what was on its way to the last one, the Bye among it."""
    runtime = Mock()
    runtime.settings.socket, runtime.settings.job, runtime.identity.rank = "ipc://nowhere", "job", 0
    runtime.identity.world_size, runtime.boundaries.count, runtime.boundaries.steps = 1, 9, 8
    agent = Agent(runtime)
    agent._link.close()
    agent._link = Mock(silent=False)
    assert [type(message) for message in agent._greeting()] == [Hello]
    agent.finish()
    bye = Bye(epoch=0, boundary=9, step=8)
    assert [type(agent._greeting()[0]), *agent._greeting()[1:]] == [Hello, bye]
    agent._link.send.assert_called_once_with(bye)
