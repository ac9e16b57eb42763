"""What a process said last is heard before its end, however late the scheduler gets round to it."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gpuslice import wire
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Command, Event, Tell
from gpuslice.sched_core.live.scheduler import Scheduler
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.types import DeviceName

from ...patience import PATIENCE_S

STEPS = 150
#: Each says more than the scheduler reads at once. Words: how many ranks, and how they end.
RANKS = """
import os, signal, sys, zmq
from gpuslice import wire
world = int(sys.argv[1])
for rank in range(world):
    if os.fork() == 0:
        break
else:
    sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(world)))
with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
    dealer.connect(os.environ["GPUSLICE_SOCKET"])
    job = os.environ["GPUSLICE_JOB"]
    hello = wire.Hello(version=wire.PROTOCOL_VERSION, job=job, rank=rank, world_size=world, pid=os.getpid())
    dealer.send(wire.encode(hello))
    while not isinstance(order := wire.decode_to_agent(dealer.recv()), wire.Resume):
        pass
    dealer.send(wire.encode(wire.Resumed(epoch=order.epoch, boundary=0, stages_s={})))
    for step in range(1, 151):
        dealer.send(wire.encode(wire.Progress(epoch=order.epoch, boundary=step, step=step)))
    if sys.argv[2:] == ["held open"] and os.fork() == 0:
        signal.pause()
    if sys.argv[2:] == ["held open"]:
        os._exit(0)
    if not sys.argv[2:]:
        dealer.send(wire.encode(wire.Bye(epoch=order.epoch, boundary=step, step=step)))
"""


#: As after a restart of the scheduler: the rank ends before it has greeted the next one, and cannot say Bye.
SILENT = """
import os, sys, time, zmq
from gpuslice import wire
children = []
for rank in range(2):
    children.append(os.fork())
    if children[-1] == 0:
        break
else:
    sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in children))
with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
    dealer.connect(os.environ["GPUSLICE_SOCKET"])
    job = os.environ["GPUSLICE_JOB"]
    hello = wire.Hello(version=wire.PROTOCOL_VERSION, job=job, rank=rank, world_size=2, pid=os.getpid())
    dealer.send(wire.encode(hello))
    while not isinstance(order := wire.decode_to_agent(dealer.recv()), wire.Resume):
        pass
    dealer.send(wire.encode(wire.Resumed(epoch=order.epoch, boundary=0, stages_s={})))
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


class Ending:
    """A scheduler that looks away while the ranks of its job say all they have to say, and end."""

    def __init__(self, directory: Path) -> None:
        self.core = Core([DeviceName("null", index) for index in range(2)], RoundRobin(quantum_s=60.0))
        self.resumes = 0
        self.scheduler = Scheduler(self.core, directory, observer=self._observe)

    def _observe(self, event: Event, now: float, commands: Sequence[Command]) -> None:
        self.core.check()
        self.resumes += sum(
            isinstance(one, Tell) and isinstance(one.message, wire.Resume) for one in commands
        )

    def end(self, ranks: int, *words: str) -> JobState:
        program = Program((sys.executable, "-c", RANKS, str(ranks), *words), "/", dict(os.environ))
        self.scheduler.submit(JobSpec(id="a", submit_s=0.0, devices=ranks), program)
        assert self.scheduler.run(lambda: self.resumes == ranks, timeout_s=PATIENCE_S)
        command = self.scheduler.local.processes.descriptors[0]
        assert select.select([command], [], [], PATIENCE_S)[0], "ranks and launcher are gone now"
        job = self.core.jobs["a"]
        assert self.scheduler.run(lambda: job.state.ended and job.processes_gone, timeout_s=PATIENCE_S)
        return job.state

    @property
    def steps(self) -> int:
        return self.core.jobs["a"].steps


@pytest.fixture
def ending(tmp_path: Path) -> Iterator[Ending]:
    made = Ending(tmp_path / "s")
    yield made
    made.scheduler.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_that_ranks_said_is_heard_before_their_end(ending: Ending, ranks: int) -> None:
    assert ending.end(ranks) is JobState.SUCCEEDED
    assert ending.steps == STEPS


def test_a_rank_that_ended_without_bye_is_dead_whatever_else_it_said(ending: Ending) -> None:
    assert ending.end(2, "no bye") is JobState.FAILED
    assert ending.steps == STEPS


def test_a_child_that_holds_a_rank_s_connection_open_is_not_waited_for(ending: Ending) -> None:
    assert ending.end(2, "held open") is JobState.FAILED


def test_a_rank_that_ends_before_it_has_greeted_the_next_scheduler_does_not_fail_its_gang(
    tmp_path: Path,
) -> None:
    enough, lived = tmp_path / "enough", list[tuple[Event, float]]()
    devices = [DeviceName("null", index) for index in range(2)]

    def serve(*, keep: bool) -> Scheduler:
        core = Core(devices, RoundRobin(quantum_s=60.0))
        return Scheduler(
            core,
            tmp_path / "s",
            keep_jobs=keep,
            observer=lambda event, now, _: lived.append((event, now)),
        )

    with serve(keep=True) as first:
        program = Program((sys.executable, "-c", SILENT, str(enough)), "/", dict(os.environ))
        first.submit(JobSpec(id="a", submit_s=0.0, devices=2), program)
        job = first.core.jobs["a"]
        assert first.run(lambda: job.state is JobState.RUNNING, timeout_s=PATIENCE_S)
    with serve(keep=False) as second:
        second.take_over((event, now, second.core.handle(event, now)) for event, now in list(lived))
        enough.touch()
        job = second.core.jobs["a"]
        assert second.run(lambda: job.state.ended and job.processes_gone, timeout_s=PATIENCE_S)
        assert (job.state, job.verdict.reason) == (JobState.SUCCEEDED, "")
    while first.local.processes.descriptors:  # it never learned of their end
        first.local.processes.wait(PATIENCE_S)
