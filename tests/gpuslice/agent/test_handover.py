"""Two jobs that hand a device over: real processes, and a scheduler of the test's own that says as little as
it wants. ``b`` trains and is told to leave; ``a`` is parked and expects what ``b`` leaves."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import zmq

from gpuslice.wire import (
    PROTOCOL_VERSION,
    Bye,
    Declined,
    Expect,
    Forget,
    FromAgent,
    Hello,
    Overshot,
    Profiled,
    Progress,
    Refused,
    Resume,
    Resumed,
    Successor,
    Suspend,
    Suspended,
    ToAgent,
    Welcome,
    decode_from_agent,
    encode,
)

from ...patience import PATIENCE_MS, PATIENCE_S
from ..conftest import Workshop
from .scripted_scheduler import ENDLESS, TRAIN

_M = TypeVar("_M", bound=FromAgent)
EXPECT = Expect(epoch=2, device="cpu:0", predecessor="b")

#: Put before ``TRAIN``: what happens in the midst of b's second suspend, when a is to have its device.
MISHAP = """
import os, signal
from gpuslice.checkpoint.ramdisk.writer import SnapshotWriter
from gpuslice.errors import RamDiskFullError
publish, suspends = SnapshotWriter.publish, []
def mishap(self, *args, **named):
    suspends.append(1)
    if os.environ["GPUSLICE_JOB"] == "b" and len(suspends) == 1:
        WHAT
    return publish(self, *args, **named)
SnapshotWriter.publish = mishap
"""
#: Put before it, too: a job that ends by itself when it is asked to.
ENDS_ITSELF = """
import signal, sys
signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(7))
"""


#: Put before it where the host's slots shall be swapped as GPUs are: both ways at once.
BOTH_WAYS = """
import torch
from gpuslice.kernels.host.device import CpuDevice
CpuDevice.duplex = property(lambda self: True)
"""
at_once = pytest.mark.parametrize(
    "ways", ["", pytest.param(BOTH_WAYS, marks=pytest.mark.slow)], ids=["one by one", "both ways"]
)


class Duo:
    """Both jobs, and the scheduler's socket."""

    def __init__(self, workshop: Workshop, directory: Path) -> None:
        self.workshop = workshop
        self.processes: dict[str, subprocess.Popen[str]] = {}
        #: What a greeting may have been early or late for.
        self.said_again: tuple[type[FromAgent], ...] = (Progress, Profiled)
        self._endpoint = f"ipc://{directory}/desk"
        #: Whether b was told to leave, once, at whatever boundary.
        self._leaving = False
        self.open()

    def open(self) -> None:
        """A scheduler, the first or the next."""
        self._heard: dict[str, list[FromAgent]] = {"a": [], "b": []}
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(self._endpoint)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def say(self, job: str, message: ToAgent) -> None:
        self._router.send_multipart([f"{job}:0".encode(), encode(message)])

    def hear(self, job: str, kind: type[_M]) -> _M:
        """What ``job`` says next that is no heartbeat, which must be of this kind."""
        while True:
            while not self._heard[job]:
                self._take()
            message = self._heard[job].pop(0)
            if isinstance(message, kind):
                return message
            assert isinstance(message, self.said_again), message

    def _take(self) -> None:
        """Take in one message; b, where it is past the boundary at which it is to leave, gets another."""
        identity, frame = self._router.recv_multipart()
        job, message = identity.decode().partition(":")[0], decode_from_agent(frame)
        if self._leaving and isinstance(message, Overshot):
            self._order_to_leave(message.boundary)
        else:
            self._heard[job].append(message)

    def start(self, script: str) -> None:
        """a, parked, and b, which trains; both have been on cpu:0."""
        self.workshop.write("train.py", script)
        self.workshop.environ |= {"GPUSLICE_SOCKET": self._endpoint}
        for job in "ab":
            command = self.workshop.command("--job", job, "train.py", ENDLESS)
            pipe = subprocess.PIPE
            self.processes[job] = self.workshop.start(command, stdout=pipe, stderr=pipe)
        for job in "ab":
            self.hear(job, Hello)
            self.say(job, Welcome(version=PROTOCOL_VERSION))
        self.grant("a", 1)
        self.stop("a", 1)
        self.grant("b", 1)

    def grant(self, job: str, epoch: int) -> Resumed:
        self.say(job, Resume(epoch=epoch, device="cpu:0"))
        return self.hear(job, Resumed)

    def stop(self, job: str, epoch: int, successor: Successor | None = None) -> Suspended:
        """Suspend ``job`` a little ahead of where it is."""
        self._leaving = False
        while (at := self.hear(job, Progress).boundary) < 1:
            pass
        ahead = 50
        self.say(job, Suspend(epoch=epoch, stop_at=at + 1, successor=successor))
        while True:
            answer = self.hear(job, Suspended | Overshot)  # type: ignore[arg-type]
            if isinstance(answer, Suspended):
                return answer
            assert isinstance(answer, Overshot)
            self.say(job, Suspend(epoch=epoch, stop_at=answer.boundary + ahead, successor=successor))
            ahead *= 2  # who is slow here has to look further ahead

    def tell_to_leave(self) -> None:
        """b is to leave for a, at some boundary that it has not passed."""
        while (at := self.hear("b", Progress).boundary) < 1:
            pass
        self._leaving = True
        self._order_to_leave(at)

    def _order_to_leave(self, at: int) -> None:
        self.say("b", Suspend(epoch=1, stop_at=at + 200, successor=Successor(job="a", epoch=2)))

    def open_door(self) -> None:
        """a expects the device, and its listener is open."""
        self.say("a", EXPECT)
        self.until(lambda: bool(list(self.workshop.ramdisk.glob("a@*/swap"))))

    def until(self, so: Callable[[], bool]) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not so():
            assert time.monotonic() < until_s
            if self._router.closed:
                time.sleep(0.01)
            elif self._router.poll(10):
                self._take()

    def end(self, job: str) -> tuple[int, str, str]:
        process = self.processes[job]
        out, err = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out, err

    def end_as_undisturbed(self, *jobs: str) -> None:
        """Jobs that train end; so many epochs without a scheduler make the same models."""
        self.workshop.write("enough", "")
        found = []
        for job in jobs:
            self.hear(job, Bye)
            found.append(self.end(job))
        (self.workshop.directory / "enough").unlink()
        self.workshop.write("train.py", TRAIN)
        for code, out, _ in found:
            assert (code, out) == (0, self.workshop.python("train.py", out.split()[1]).stdout)


@pytest.fixture
def duo(warm_workshop: Workshop, tmp_path: Path) -> Iterator[Duo]:
    duo = Duo(warm_workshop, tmp_path)
    yield duo
    for process in duo.processes.values():
        process.kill()
        process.communicate()
    duo.close()


@pytest.mark.parametrize("ways", ["", BOTH_WAYS], ids=["one by one", "both ways"])
def test_the_successor_comes_without_a_word_of_the_scheduler(duo: Duo, ways: str) -> None:
    duo.start(ways + TRAIN)
    for predecessor, successor, epoch in (("b", "a", 2), ("a", "b", 3)):
        duo.say(successor, Expect(epoch=epoch, device="cpu:0", predecessor=predecessor))
        duo.stop(predecessor, epoch - 1, Successor(job=successor, epoch=epoch))
        assert duo.hear(successor, Resumed).epoch == epoch
        duo.say(successor, Resume(epoch=epoch, device="cpu:0"))  # changes nothing
    duo.grant("a", 4)
    duo.end_as_undisturbed("a", "b")


def test_an_successor_that_nobody_meets_is_resumed_or_declines(duo: Duo) -> None:
    duo.start(TRAIN)
    duo.open_door()
    duo.say("a", Forget(epoch=2))
    assert duo.hear("a", Declined).epoch == 2
    duo.say("a", EXPECT)  # one that is late: it has declined
    assert duo.hear("a", Declined).epoch == 2
    duo.stop("b", 1, Successor(job="a", epoch=2))
    duo.say("a", Expect(epoch=3, device="cpu:0", predecessor="b"))
    assert duo.grant("a", 4).epoch == 4
    duo.grant("b", 2)
    duo.end_as_undisturbed("a", "b")


@at_once
def test_a_predecessor_that_stays_says_so_to_both(duo: Duo, ways: str) -> None:
    duo.start(ways + MISHAP.replace("WHAT", "raise RamDiskFullError('no room today')") + TRAIN)
    duo.open_door()
    duo.tell_to_leave()
    assert duo.hear("b", Refused).running
    assert "no room today" in duo.hear("a", Declined).error
    duo.stop("b", 1)
    duo.grant("a", 3)
    duo.grant("b", 2)
    duo.end_as_undisturbed("a", "b")


@at_once
def test_the_successor_comes_when_the_predecessor_dies_in_the_midst_of_it(duo: Duo, ways: str) -> None:
    duo.start(ways + MISHAP.replace("WHAT", "os.kill(os.getpid(), signal.SIGKILL)") + TRAIN)
    duo.open_door()
    duo.tell_to_leave()
    assert duo.hear("a", Resumed).epoch == 2
    assert duo.end("b")[0] == -signal.SIGKILL
    duo.end_as_undisturbed("a")


def test_an_successor_does_not_wait_for_a_predecessor_that_is_stopped(duo: Duo) -> None:
    duo.start(MISHAP.replace("WHAT", "os.kill(os.getpid(), signal.SIGSTOP)") + TRAIN)
    duo.open_door()
    duo.tell_to_leave()
    state = Path(f"/proc/{duo.processes['b'].pid}/stat")
    duo.until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
    duo.say("a", Forget(epoch=2))
    duo.hear("a", Declined)
    duo.processes["b"].send_signal(signal.SIGCONT)
    duo.hear("b", Suspended)
    duo.grant("b", 2)
    duo.stop("b", 2)
    duo.grant("a", 3)
    duo.grant("b", 3)
    duo.end_as_undisturbed("a", "b")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nobody_waits_for_an_successor_that_has_died_at_its_door(duo: Duo, number: signal.Signals) -> None:
    duo.start(TRAIN)
    duo.open_door()
    duo.processes["a"].send_signal(number)
    assert duo.end("a")[0] == -number
    duo.stop("b", 1, Successor(job="a", epoch=2))
    duo.grant("b", 2)
    duo.end_as_undisturbed("b")


def test_an_successor_that_is_asked_to_end_leaves_its_door_first(duo: Duo) -> None:
    duo.start(ENDS_ITSELF + TRAIN)
    duo.open_door()
    duo.processes["a"].send_signal(signal.SIGTERM)
    assert "asks the script to end" in duo.hear("a", Declined).error
    duo.hear("a", Bye)
    assert duo.end("a")[0] == 7
    duo.stop("b", 1, Successor(job="a", epoch=2))
    duo.grant("b", 2)
    duo.end_as_undisturbed("b")


def test_a_handover_needs_no_scheduler(duo: Duo) -> None:
    wait = "open('leaving', 'x').close()\n        while not os.path.exists('go'): pass"
    duo.start(MISHAP.replace("WHAT", wait) + TRAIN)
    duo.open_door()
    duo.tell_to_leave()
    duo.until(lambda: (duo.workshop.directory / "leaving").exists())
    duo.close()
    duo.workshop.write("go", "")
    duo.until(lambda: not list(duo.workshop.ramdisk.glob("a@*/swap")))
    duo.open()
    duo.said_again = (Progress, Profiled, Suspended, Resumed)
    assert duo.hear("b", Hello).parked
    assert duo.hear("b", Suspended).epoch == 1
    hello = duo.hear("a", Hello)
    come = duo.hear("a", Resumed) if hello.parked else hello
    assert come.epoch == 2
    duo.grant("b", 2)
    duo.end_as_undisturbed("a", "b")
