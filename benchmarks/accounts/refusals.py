"""What policies choose when some suspends are refused: the core in virtual time, ranks with a record.

    python benchmarks/accounts/refusals.py [--refused 0.2]

Ten jobs of one rank and of different lengths arrive at two devices. A rank passes a boundary every half
second. Each of its suspends is refused with the same probability, drawn by job and by the number of the stop,
so that two cores meet the same refusals.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from math import inf
from statistics import mean

from gpuslice import wire
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.lifecycle.events import (
    Command,
    Event,
    Exited,
    RankGone,
    Reported,
    Submitted,
    Tell,
    Woken,
)
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.types import DeviceName

PROGRAM = Program(("python", "train.py"), "/")
POLICIES: dict[str, dict[str, object]] = {
    "las": {"quantum_s": 5.0},
    "2das": {"thresholds": (10.0, 40.0)},
    "themis": {"lease_s": 10.0},
}
DEVICES, JOBS, SEEDS = 2, 10, 20
STEP_S = 0.5
#: Service that a job may be ahead of one that waits before that is a wrong choice: a quantum and a boundary.
SLACK_S = 6.0


@dataclass
class Rank:
    """One job's process."""

    length_s: float
    arrives_s: float
    on: bool = False
    coming: bool = False
    boundary: int = 0
    stop_at: float = inf
    stops: int = 0
    trained_s: float = 0.0
    ended_s: float | None = None


@dataclass
class World:
    """One run."""

    policy: str
    seed: int
    refused: float
    now_s: float = 0.0
    ranks: dict[str, Rank] = field(default_factory=dict)
    wrong_s: float = 0.0
    refusals: int = 0
    #: How far the core's picture of attained service was off, by moment and job.
    errors_s: list[float] = field(default_factory=list)

    def run(self) -> None:
        draw = random.Random(self.seed)
        devices = [DeviceName("null", index) for index in range(DEVICES)]
        self.core = Core(devices, make_policy(self.policy, POLICIES[self.policy]))
        for number in range(JOBS):
            length_s = draw.choice([10.0, 20.0, 40.0, 80.0, 160.0])
            self.ranks[f"j{number}"] = Rank(length_s, number * draw.choice([1.0, 5.0, 10.0]))
        while any(rank.ended_s is None for rank in self.ranks.values()):
            self.now_s += STEP_S
            for name, rank in self.ranks.items():
                self.live(name, rank)
            self.tell(Woken())
            self.judge()

    def live(self, name: str, rank: Rank) -> None:
        if rank.ended_s is not None or self.now_s < rank.arrives_s:
            return
        if name not in self.core.jobs:
            spec = JobSpec(id=name, submit_s=self.now_s, expected_s=rank.length_s)
            self.tell(Submitted(spec, PROGRAM))
            version = wire.PROTOCOL_VERSION
            self.say(name, wire.Hello(version=version, job=name, rank=0, world_size=1, pid=1))
        elif rank.on:
            self.train(name, rank)
        epoch = self.core.jobs[name].epoch
        if rank.coming:
            rank.coming, rank.on = False, True
            self.say(name, wire.Resumed(epoch=epoch, boundary=rank.boundary, stages_s={}))
            if not rank.boundary:
                rank.boundary = 1
                self.say(name, wire.Progress(epoch=epoch, boundary=1, step=1))

    def train(self, name: str, rank: Rank) -> None:
        epoch = self.core.jobs[name].epoch
        rank.trained_s += STEP_S
        rank.boundary += 1
        if rank.trained_s >= rank.length_s:
            rank.ended_s, rank.on = self.now_s, False
            self.tell(RankGone(name, 0))
            self.tell(Exited(name, 0))
        elif rank.boundary >= rank.stop_at:
            rank.stops, rank.stop_at = rank.stops + 1, inf
            if random.Random(f"{self.seed} {name} {rank.stops}").random() < self.refused:
                self.refusals += 1
                error = wire.Refused(
                    epoch=epoch,
                    boundary=rank.boundary,
                    running=True,
                    error="no room",
                    remedy="",
                    retryable=True,
                )
                self.say(name, error)
            else:
                rank.on = False
                step = rank.boundary
                self.say(name, wire.Suspended(epoch=epoch, boundary=step, step=step, nbytes=8, stages_s={}))
        else:
            self.say(name, wire.Progress(epoch=epoch, boundary=rank.boundary, step=rank.boundary))

    def judge(self) -> None:
        """See how far the core's picture is off, and who trains though another has had less."""
        alive = {name: rank for name, rank in self.ranks.items() if name in self.core.jobs}
        alive = {name: rank for name, rank in alive.items() if rank.ended_s is None}
        for name, rank in alive.items():
            told_s = self.core.jobs[name].service_at(self.now_s)
            self.errors_s.append(abs(told_s - rank.trained_s))
        waiting = [rank.trained_s for rank in alive.values() if not rank.on and not rank.coming]
        least_s = min(waiting, default=inf)
        ahead = [rank for rank in alive.values() if rank.on and rank.trained_s > least_s + SLACK_S]
        self.wrong_s += STEP_S * len(ahead)

    def say(self, name: str, message: wire.FromAgent) -> None:
        self.tell(Reported(name, 0, message))

    def tell(self, event: Event) -> None:
        self.obey(self.core.handle(event, self.now_s))

    def obey(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Tell):
                rank = self.ranks[command.job]
                if isinstance(command.message, wire.Resume):
                    rank.coming, rank.stop_at = True, inf
                elif isinstance(command.message, wire.Suspend):
                    rank.stop_at = command.message.stop_at


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--refused", type=float, default=0.2)
    refused: float = parser.parse_args().refused
    print(
        "policy   refusals   mean JCT   last end   service off by mean, max   trains ahead of one that waits"
    )
    for policy in POLICIES:
        worlds = [World(policy, seed, refused) for seed in range(SEEDS)]
        for world in worlds:
            world.run()
        ranks = [list(world.ranks.values()) for world in worlds]
        jct_s = mean((rank.ended_s or 0.0) - rank.arrives_s for run in ranks for rank in run)
        end_s = mean(max(rank.ended_s or 0.0 for rank in run) for run in ranks)
        errors_s = [error_s for world in worlds for error_s in world.errors_s]
        refusals = mean(world.refusals for world in worlds)
        wrong_s = mean(world.wrong_s for world in worlds)
        print(
            f"{policy:8} {refusals:8.1f} {jct_s:8.1f} s {end_s:8.1f} s "
            f"{mean(errors_s):15.2f} s, {max(errors_s):.1f} s {wrong_s:22.1f} s"
        )


if __name__ == "__main__":
    main()
