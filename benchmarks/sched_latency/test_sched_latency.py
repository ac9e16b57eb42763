"""How long the scheduler takes: handing a device over, deciding among many jobs, listening to many ranks.

Everything beside the round trip of the same kind of sockets between the same two processes.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from gpuslice import wire
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.lifecycle.events import (
    Event,
    Exited,
    RankGone,
    Reported,
    Submitted,
    Tell,
    WakeAt,
    Woken,
)
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.types import DeviceName

from .crowd import SOCKET, Rank, Sockets, scheduler

HANDOFFS = 400
QUANTUM_S = 0.025
REST_S = 0.01
AGENTS, RANKS_PER_JOB, DEVICES = 1000, 8, 960
LISTEN_S = 20.0
DECISIONS = 3000


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gpuslice-bench-") as name:
        yield Path(name) / "s"


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    with Sockets(2 * AGENTS) as found:
        yield found


def note_quantiles(benchmark: Any, values_s: list[float]) -> None:
    """Median, 99th percentile and maximum, in milliseconds."""
    ordered = sorted(values_s)
    for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99), ("max_ms", 1.0)):
        benchmark.extra_info[name] = ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3


def rest(duration_s: float) -> None:
    """Sleep, or not even give the core away."""
    if duration_s:
        time.sleep(duration_s)


@pytest.mark.parametrize("rest_s", [0.0, REST_S])
def test_raw_round_trip(benchmark: Any, sockets: Sockets, tmp_path: Path, rest_s: float) -> None:
    path = tmp_path / "echo.sock"
    frame = wire.encode(wire.Progress(epoch=1, boundary=1, step=1))
    words = [sys.executable, str(Path(__file__).with_name("echo.py")), f"ipc://{path}"]
    echo = subprocess.Popen(words, start_new_session=True)  # like a scheduler in the background
    try:
        dealer = sockets.dealer(path)

        def once() -> None:
            dealer.send(frame)
            dealer.recv()

        benchmark.pedantic(
            once,
            setup=lambda: rest(rest_s),
            rounds=HANDOFFS if rest_s else 5 * HANDOFFS,
            warmup_rounds=50,
        )
    finally:
        echo.kill()
        echo.wait()
    note_quantiles(benchmark, benchmark.stats.stats.data)


@pytest.mark.parametrize("rest_s", [0.0, REST_S])
def test_handoff(benchmark: Any, sockets: Sockets, directory: Path, rest_s: float) -> None:
    """From one rank's ``Suspended``, as it leaves, to the other's ``Resume``, as it arrives.

    A rank obeys at once, or after as long as a suspend takes, when everything has come to rest.
    """
    often = ("--quantum", f"{QUANTUM_S}s", "--switch-share", "0")
    with scheduler(directory, "--devices", "null:1", *often) as client:
        jobs = [client.submit(["--", "sleep", "infinity"]) for _ in range(2)]
        ranks = [Rank(sockets.dealer(directory / SOCKET), jobs[0])]
        on = ranks[0]
        on.resumed(on.await_order(wire.Resume))
        ranks.append(Rank(sockets.dealer(directory / SOCKET), jobs[1]))
        poller = zmq.Poller()
        for rank in ranks:
            poller.register(rank.socket, zmq.POLLIN)
        lease: list[wire.Resume] = []
        stop: list[wire.Suspend] = []

        def live_through_a_slice() -> None:
            for order in lease:
                on.resumed(order)
            stop[:] = [on.await_order(wire.Suspend)]
            rest(rest_s)

        def hand_over() -> None:
            nonlocal on
            on.park(stop[0])
            # The same again, where so slow a machine lets a whole slice pass meanwhile.
            ready = dict(poller.poll())
            on = next(rank for rank in ranks if rank.socket in ready)
            lease[:] = [on.await_order(wire.Resume)]

        benchmark.pedantic(hand_over, setup=live_through_a_slice, rounds=HANDOFFS, warmup_rounds=10)
    note_quantiles(benchmark, benchmark.stats.stats.data)


def test_a_thousand_agents(benchmark: Any, sockets: Sockets, directory: Path) -> None:
    """The share of a core that the scheduler takes for 1,000 ranks reporting once a second; 40 only wait."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8 * AGENTS), hard))
    try:
        with scheduler(directory, "--devices", f"null:{DEVICES}", "--policy", "fifo") as client:
            process = psutil.Process(client.status().pid)
            ranks = []
            for _ in range(AGENTS // RANKS_PER_JOB):
                job = client.submit(["--", "sleep", "infinity"], devices=RANKS_PER_JOB)
                ranks += [
                    Rank(sockets.dealer(directory / SOCKET), job, rank, RANKS_PER_JOB)
                    for rank in range(RANKS_PER_JOB)
                ]
            for rank in ranks[:DEVICES]:
                rank.resumed(rank.await_order(wire.Resume))
            report_for(ranks, 2.0)
            busy_s = sum(process.cpu_times()[:2])
            benchmark.pedantic(report_for, args=(ranks, LISTEN_S), rounds=1)
            busy_s = sum(process.cpu_times()[:2]) - busy_s
            assert {job.state for job in client.jobs()} == {"running", "queued"}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    benchmark.extra_info["share_of_a_core"] = busy_s / benchmark.stats.stats.data[0]
    benchmark.extra_info["reports_per_s"] = AGENTS * LISTEN_S / benchmark.stats.stats.data[0]


def report_for(ranks: list[Rank], duration_s: float) -> None:
    """One report a second of each, evenly spread."""
    begin_s = time.monotonic()
    for number in range(int(duration_s * len(ranks))):
        due_s = begin_s + number / len(ranks)
        if (wait_s := due_s - time.monotonic()) > 0:
            time.sleep(wait_s)
        ranks[number % len(ranks)].heartbeat()


class World:
    """Obedient jobs around a core; every call of it is timed.

    What counts is processor time: deciding waits for nothing, and what other programs take is not its own.
    """

    def __init__(self, policy: str, job_count: int) -> None:
        devices = [DeviceName("null", index) for index in range(8)]
        options = {"quantum_s": 1.0} if policy == "rr" else {"thresholds": (2.0, 20.0)}
        self.core = Core(devices, make_policy(policy, options))
        self.now_s = 0.0
        self.wake_s: float | None = None
        self.spent_s: list[float] = []
        self.number = 0
        self.pending: list[Event] = []
        for _ in range(job_count):
            self.arrive()
        self.spent_s.clear()

    def arrive(self) -> None:
        """A job is submitted, and ready at once."""
        name = f"j{self.number}"
        self.number += 1
        self.do(Submitted(JobSpec(id=name, submit_s=self.now_s), Program(("true",), "/")))
        hello = wire.Hello(version=1, job=name, rank=0, world_size=1, pid=self.number)
        self.do(Reported(name, 0, hello))

    def leave(self, name: str) -> None:
        """A job that runs comes to its end."""
        rank = self.core.jobs[name].ranks[0]
        boundary = rank.boundary + 1
        bye = wire.Bye(epoch=self.core.jobs[name].epoch, boundary=boundary, step=boundary)
        for event in (Reported(name, 0, bye), RankGone(name, 0), Exited(name, 0)):
            self.do(event)

    def do(self, event: Event) -> None:
        """One event, and what ranks answer to what follows from it."""
        self.pending.append(event)
        while self.pending:
            event = self.pending.pop(0)
            begin_s = time.thread_time()
            commands = self.core.handle(event, self.now_s)
            self.spent_s.append(time.thread_time() - begin_s)
            for command in commands:
                if isinstance(command, WakeAt):
                    self.wake_s = command.when_s
                elif isinstance(command, Tell) and not isinstance(command.message, wire.Withdraw):
                    self.pending.append(self.answer(command))  # who trains does not withdraw

    def answer(self, command: Tell) -> Event:
        """What a rank says to an order."""
        job, order = self.core.jobs[command.job], command.message
        boundary = job.ranks[0].boundary
        message: wire.FromAgent
        if isinstance(order, wire.Resume):
            message = wire.Resumed(epoch=order.epoch, boundary=boundary, stages_s={})
        else:
            assert isinstance(order, wire.Suspend)
            message = wire.Suspended(
                epoch=order.epoch, boundary=order.stop_at, step=order.stop_at, nbytes=1, stages_s={}
            )
        return Reported(command.job, 0, message)

    def live(self, decisions: int) -> None:
        """Slices end, ranks report, and now and then a job ends and another arrives."""
        while len(self.spent_s) < decisions:
            assert self.wake_s is not None
            self.now_s = max(self.now_s, self.wake_s)
            self.do(Woken())
            running = [name for occupants in self.core.state.occupants for name in occupants]
            for name in running:
                job = self.core.jobs[name]
                boundary = job.ranks[0].boundary + 1
                self.do(Reported(name, 0, wire.Progress(epoch=job.epoch, boundary=boundary, step=boundary)))
            self.leave(running[0])
            self.arrive()


@pytest.mark.parametrize("policy", ["rr", "2das"])
@pytest.mark.parametrize("job_count", [1000, 10_000])
def test_decision(benchmark: Any, policy: str, job_count: int) -> None:
    """Processor time of one event, for a core with so many unfinished jobs on 8 devices."""
    world = World(policy, job_count)
    benchmark.pedantic(world.live, args=(DECISIONS,), rounds=1)
    note_quantiles(benchmark, world.spent_s)
