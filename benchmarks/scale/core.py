"""What a decision of the live core takes with 10,000 devices and more and more jobs in line.

    python benchmarks/scale/core.py OUT.json [--waiting 0,1000] [--node-devices 8] [--policy las] ...

The core is the one that runs live; its shell is replaced by answers: every process says Hello at once,
and every resume succeeds. All devices are taken, N jobs wait, then jobs end and others arrive in turn.
Measured is ``Core.handle``, event by event, in processor time, without journal and sockets.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpuslice import wire
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.lifecycle.events import (
    Command,
    Event,
    Exited,
    Launch,
    Limited,
    RankGone,
    Reported,
    Submitted,
    Tell,
)
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.types import DeviceName

TURNS, PRESTART = 200, 16
PROGRAM = Program(("python", "train.py"), "/")


class OutOfTimeError(Exception):
    """The budget of processor time is used up."""


class Shell:
    """A core with processes that do at once what they are told."""

    def __init__(self, devices: Sequence[DeviceName], policy: str, budget_s: float) -> None:
        self.core = Core(devices, make_policy(policy))
        self.now_s = 0.0
        self.running: list[str] = []
        #: (kind of event, seconds of processor time).
        self.took_s: list[tuple[str, float]] = []
        self._submitted = 0
        self._until_s = time.process_time() + budget_s
        self.do(Limited(PRESTART))

    def do(self, event: Event) -> None:
        """Hand in ``event`` and what it leads to, until nothing is to be done."""
        pending = [event]
        while pending:
            event = pending.pop(0)
            if time.process_time() > self._until_s:
                raise OutOfTimeError
            began_s = time.thread_time()
            commands = self.core.handle(event, self.now_s)
            self.took_s.append((type(event).__name__, time.thread_time() - began_s))
            pending += [answer for command in commands for answer in self._answers(command)]

    def _answers(self, command: Command) -> list[Event]:
        if isinstance(command, Launch):
            hello = wire.Hello(version=1, job=command.job, rank=0, world_size=1, pid=1)
            return [Reported(command.job, 0, hello)]
        if isinstance(command, Tell) and isinstance(command.message, wire.Resume):
            self.running.append(command.job)
            resumed = wire.Resumed(epoch=command.message.epoch, boundary=0, stages_s={})
            progress = wire.Progress(epoch=command.message.epoch, boundary=1, step=1)
            return [Reported(command.job, 0, resumed), Reported(command.job, 0, progress)]
        return []

    def submit(self) -> None:
        self.now_s += 0.001
        name = f"job-{self._submitted}"
        self._submitted += 1
        self.do(Submitted(JobSpec(id=name, submit_s=self.now_s), PROGRAM))

    def end_one(self) -> None:
        """The job that has run for longest ends well."""
        self.now_s += 0.001
        name = self.running.pop(0)
        self.do(RankGone(name, 0))
        self.do(Exited(name, 0))


def decisions(devices: int, per_node: int, waiting: int, policy: str, budget_s: float) -> dict[str, Any]:
    """Times of single events with ``waiting`` jobs in line."""
    found: dict[str, Any] = {
        "devices": devices,
        "node_devices": per_node,
        "waiting": waiting,
        "policy": policy,
    }
    names = [DeviceName("null", index % per_node, _node(index // per_node)) for index in range(devices)]
    try:
        shell = Shell(names, policy, budget_s)
        for _ in range(devices + waiting):
            shell.submit()
    except OutOfTimeError:
        return {**found, "stopped": f"not set up within {budget_s:g} s of processor time"}
    assert len(shell.running) == devices, len(shell.running)
    shell.took_s.clear()
    try:
        for _ in range(TURNS):
            shell.end_one()
            shell.submit()
    except OutOfTimeError:
        found["stopped"] = f"after {len(shell.took_s)} events"
    for kind in ("Submitted", "Exited", "RankGone", "Reported"):
        took_ms = [took_s * 1e3 for name, took_s in shell.took_s if name == kind]
        if took_ms:
            p50, p99 = np.percentile(took_ms, (50, 99))
            found[kind] = {
                "p50_ms": round(float(p50), 3),
                "p99_ms": round(float(p99), 3),
                "events": len(took_ms),
            }
    found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000
    return found


def _node(number: int) -> str:
    """The name of a node; the first one is the scheduler's own."""
    return f"n{number}" if number else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--waiting", default="0,1000,10000,100000")
    parser.add_argument("--devices", default="10,100,1000,10000")
    parser.add_argument("--node-devices", type=int, default=0, help="of each node; 0: all are on one")
    parser.add_argument("--policy", default="2das")
    parser.add_argument(
        "--budget", type=float, default=120.0, help="seconds of processor time for one length"
    )
    asked = parser.parse_args()
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load_average": os.getloadavg()[0],
        "decisions": [],
    }
    for devices in map(int, asked.devices.split(",")):
        for waiting in map(int, asked.waiting.split(",")):
            per_node = asked.node_devices or devices
            result["decisions"].append(decisions(devices, per_node, waiting, asked.policy, asked.budget))
            print(result["decisions"][-1], flush=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
