"""A world without processes for live packing: the core, its policy, the meter, and jobs of known rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuslice import wire
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Command,
    Event,
    Exited,
    Notice,
    RankGone,
    Reported,
    Submitted,
    Tell,
    WakeAt,
    Woken,
)
from gpuslice.sched_core.live.throughput_meter import ThroughputMeter
from gpuslice.sched_core.policies.registry import make_policy, policy_options

from .driver import PROGRAM, Driver

TICK_S = 0.1
REPORT_EVERY = 5


class World:
    """Jobs that train at the rates they are said to, alone and beside others.

    Parameters
    ----------
    rates
        By model: steps per second alone, and beside one other.
    """

    def __init__(
        self,
        rates: Mapping[str, tuple[float, float]],
        policy: str = "rr",
        devices: int = 1,
        *,
        pack: bool = True,
        options: Mapping[str, str] | None = None,
        **limits: Any,
    ) -> None:
        quantum = {"quantum_s": "2"} if "quantum_s" in policy_options(policy) else {}
        self.policy = make_policy(policy, {**quantum, **(options or {}), "pack": str(pack).lower()})
        self.driver = Driver(devices, self.policy, **limits)
        self.rates = rates
        self.meter = ThroughputMeter(self.driver.core)
        self.steps: dict[str, float] = {}
        self.notices: list[Notice] = []
        self.wake_s: float | None = None
        self.ticks = 0
        #: What each job tells that it has used.
        self.peaks: dict[str, int] = {}

    def submit(self, job: str, model: str, memory: int = 0) -> None:
        spec = JobSpec(id=job, submit_s=self.driver.now_s, model=model, device_memory_bytes=memory)
        self.steps[job] = 0.0
        self.do(Submitted(spec, PROGRAM))
        self.do(Reported(job, 0, wire.Hello(version=1, job=job, rank=0, world_size=1, pid=1)))

    def end(self, job: str) -> None:
        self.do(Exited(job, 0))
        self.do(RankGone(job, 0))

    def do(self, event: Event) -> None:
        """An event, and what the ranks make of what follows."""
        commands = self.driver.do(event)
        if (measured := self.meter.note(event, self.driver.now_s)) is not None:
            self.do(measured)
        for command in commands:
            self._obey(command)

    def _obey(self, command: Command) -> None:
        if isinstance(command, WakeAt):
            self.wake_s = command.when_s
        elif isinstance(command, Notice):
            self.notices.append(command)
        elif isinstance(command, Tell):
            self._rank(command.job, command.message)

    def _rank(self, job: str, message: object) -> None:
        epoch = self.driver.core.jobs[job].epoch
        if isinstance(message, wire.Resume):
            resumed = wire.Resumed(epoch=message.epoch, boundary=int(self.steps[job]), stages_s={})
            self.do(Reported(job, 0, resumed))
        elif isinstance(message, wire.Suspend) and message.stop_at < 2**60:
            self.steps[job] = max(self.steps[job], message.stop_at)
            step = int(self.steps[job])
            self.do(
                Reported(
                    job,
                    0,
                    wire.Suspended(epoch=epoch, boundary=step, step=step, nbytes=8, stages_s={}),
                )
            )

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.driver.now_s += TICK_S
            self.ticks += 1
            for job in list(self.driver.core.jobs.values()):
                if job.state is JobState.RUNNING:
                    beside = len(self.driver.core.state.occupants[job.lease[0]]) > 1
                    self.steps[job.id] += self.rates[job.spec.model][beside] * TICK_S
            if self.wake_s is not None and self.driver.now_s >= self.wake_s:
                self.wake_s = None
                self.do(Woken())
            if self.ticks % REPORT_EVERY == 0:
                self._report()

    def _report(self) -> None:
        for job in list(self.driver.core.jobs.values()):
            if job.state is JobState.RUNNING:
                step = int(self.steps[job.id])
                said = wire.Progress(
                    epoch=job.epoch, boundary=step, step=step, peak_bytes=self.peaks.get(job.id, 0)
                )
                self.do(Reported(job.id, 0, said))

    def said(self, *what: str) -> list[Notice]:
        return [notice for notice in self.notices if notice.what in what]

    def on(self, device: int = 0) -> set[str]:
        return set(self.driver.core.state.occupants[device])


COMPUTES = {"compute": (40.0, 20.0)}
WAITS = {"wait": (10.0, 9.7)}
