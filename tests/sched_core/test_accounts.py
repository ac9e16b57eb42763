"""What jobs' time has gone to, in drawn runs with refusals, kills, held jobs and late parks.

The ranks of this world keep a record of their own: when they were on a device, and from when on they trained.
What the core has booked, what policies see and what `ps` shows must be the same, and must add up to the age
of each job.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

import msgspec
import pytest

from gpuslice import wire
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.accounts import SETUP_AT_MOST_S
from gpuslice.sched_core.lifecycle.events import (
    Cancelled,
    Command,
    Event,
    Exited,
    Held,
    Kill,
    Launch,
    RankGone,
    Released,
    Reported,
    Submitted,
    Tell,
)
from gpuslice.sched_core.live.status import Overview
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policy import Plan, Policy, View

from .driver import PROGRAM, Driver, refused, suspended

LATE_S = 20.0
POLICIES: dict[str, dict[str, object]] = {
    "las": {"quantum_s": 3.0},
    "2das": {"thresholds": (4.0, 15.0), "promote": 4.0},
    "gittins": {"thresholds": (4.0, 15.0)},
    "themis": {"lease_s": 3.0},
    "rr": {"quantum_s": 3.0},
    "gandiva": {},
}
#: ``GPUSLICE_ENDS`` is the first seed; ``./x soak ends`` lives through others, and more of them.
FIRST = int(os.environ.get("GPUSLICE_ENDS", "0"))
SEEDS, STEPS = 6 if "GPUSLICE_ENDS" in os.environ else 3, 250


@dataclass
class Process:
    """One rank: where it is, as it knows itself."""

    where: str = "off"  # "off", "coming", "refused" (told to come again later) or "on"
    boundary: int = 0
    stop_at: float = inf
    #: Boundaries to stop at that it was told and has not read.
    unread: list[int] = field(default_factory=list)


@dataclass
class Record:
    """One job, by its own account."""

    ranks: list[Process]
    devices: int
    held: bool = False
    ended: bool = False
    starts: bool = False
    sums: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("waited", "held", "switching", "setup", "trained"), 0.0)
    )
    #: Set-up of the present attempt.
    setup_s: float = 0.0

    def doing(self) -> str:
        places = {rank.where for rank in self.ranks}
        if places <= {"off"}:
            return "held" if self.held else "waited"
        if places != {"on"}:
            return "switching"
        return "trained" if any(rank.boundary for rank in self.ranks) else "setup"

    def pass_time(self, seconds: float) -> None:
        doing = self.doing()
        if self.ended:
            return
        if doing == "setup":
            setup_s = min(seconds, SETUP_AT_MOST_S - self.setup_s)
            self.setup_s += setup_s
            self.sums["setup"] += setup_s
            self.sums["trained"] += seconds - setup_s
        else:
            self.sums[doing] += seconds


class Watching:
    """A policy that compares what it is shown with the record."""

    def __init__(self, inner: Policy, world: World) -> None:
        self.inner, self.world = inner, world
        self.name, self.needs_durations = inner.name, inner.needs_durations

    def plan(self, view: View) -> Plan:
        for job in view.jobs.values():
            record = self.world.records[job.id]
            assert job.executed_at(view.now_s) == pytest.approx(record.sums["trained"])
            assert job.service_at(view.now_s) == pytest.approx(record.sums["trained"] * record.devices)
            assert job.progress_at(view.now_s) == job.executed_at(view.now_s)
            if job.running and job.since_s <= view.now_s:
                gained = job.service_at(view.now_s) - job.service_at(job.since_s)
                assert gained == pytest.approx((view.now_s - job.since_s) * record.devices)
        return self.inner.plan(view)

    def __deepcopy__(self, memo: object) -> Policy:
        return self.world.policy()


class World:
    """A few devices and jobs of one or two ranks."""

    def __init__(self, name: str, seed: int) -> None:
        self.random = random.Random(f"{name} {seed}")
        self.name = name
        self.records: dict[str, Record] = {}
        self.driver = Driver(self.random.choice([1, 2, 3]), Watching(self.policy(), self))
        self.quiet: list[bool] = []

    def policy(self) -> Policy:
        return make_policy(self.name, POLICIES[self.name])

    def live(self) -> None:
        acts = [
            *[self.somebody_works] * 12,
            *[self.time_passes] * 6,
            self.somebody_arrives,
            *[self.owners_ask] * 2,
            *[self.somebody_dies] * (self.random.random() < 0.5),
        ]
        for _ in range(STEPS):
            self.random.choice(acts)()
            self.check()

    # What may happen.

    def somebody_arrives(self) -> None:
        if len(self.records) >= 6:
            return
        name = f"j{len(self.records)}"
        ranks = self.random.randint(1, min(2, len(self.driver.core.devices)))
        self.records[name] = Record([Process() for _ in range(ranks)], ranks)
        spec = JobSpec(
            id=name,
            submit_s=self.driver.now_s,
            devices=ranks,
            max_restarts=2,
            boundary_timeout_s=LATE_S,
            expected_s=self.random.choice([10.0, 60.0]),
        )
        self.tell_core(Submitted(spec, PROGRAM))

    def time_passes(self) -> None:
        seconds = self.random.choice([0.1, 0.7, 1.0, 3.0, 3.0, LATE_S])
        if self.random.random() < 0.02:
            seconds = SETUP_AT_MOST_S
        for record in self.records.values():
            record.pass_time(seconds)
        self.carry_out(self.driver.wake(seconds), quiet=False)

    def owners_ask(self) -> None:
        name, record = self.anybody()
        if record is None or record.ended:
            return
        if self.random.random() < 0.05:
            self.tell_core(Cancelled(name, "enough"))
            record.ended = self.driver.core.jobs[name].state.ended
        elif record.held:
            record.held = False
            self.tell_core(Released(name))
        elif self.random.random() < 0.3:
            record.held = True
            self.tell_core(Held(name))

    def somebody_dies(self) -> None:
        name, record = self.anybody()
        if record is None or record.ended or record.starts or self.random.random() < 0.7:
            return
        self.end(name, -9)

    def somebody_works(self) -> None:
        name, record = self.anybody()
        if record is None or record.ended:
            return
        if record.starts:
            record.starts = False
            self.greet(name, record)
            return
        number = self.random.randrange(len(record.ranks))
        rank, epoch = record.ranks[number], self.driver.core.jobs[name].epoch
        if rank.where == "coming":
            if self.random.random() < 0.05:
                rank.where = "refused"
                self.say(name, number, refused(epoch, rank.boundary, running=False))
            else:
                rank.where = "on"
                self.say(name, number, wire.Resumed(epoch=epoch, boundary=rank.boundary, stages_s={}))
        elif rank.where == "on":
            self.train(name, number, rank, epoch)

    def train(self, name: str, number: int, rank: Process, epoch: int) -> None:
        if rank.unread and self.random.random() < 0.6:
            rank.stop_at = rank.unread.pop(0)
        if rank.boundary > rank.stop_at:
            self.overshoot(name, number, rank, epoch)
        elif rank.boundary < rank.stop_at:
            rank.boundary += 1
            message = wire.Progress(epoch=epoch, boundary=rank.boundary, step=rank.boundary)
            self.say(name, number, message)
        elif self.random.random() < 0.2:
            rank.stop_at = inf
            self.say(name, number, refused(epoch, rank.boundary, running=True))
        else:
            rank.where, rank.stop_at = "off", inf
            self.say(name, number, suspended(epoch, rank.boundary))

    def overshoot(self, name: str, number: int, rank: Process, epoch: int) -> None:
        rank.stop_at = inf
        self.say(name, number, wire.Overshot(epoch=epoch, boundary=rank.boundary))

    # What that is made of.

    def anybody(self) -> tuple[str, Record | None]:
        name = self.random.choice(sorted(self.records)) if self.records else ""
        return name, self.records.get(name)

    def greet(self, name: str, record: Record) -> None:
        for number in range(len(record.ranks)):
            hello = wire.Hello(version=1, job=name, rank=number, world_size=len(record.ranks), pid=1)
            self.say(name, number, hello)

    def say(self, name: str, number: int, message: wire.FromAgent) -> None:
        self.tell_core(Reported(name, number, message))

    def tell_core(self, event: Event) -> None:
        quiet = isinstance(event, Reported) and isinstance(event.message, wire.Progress)
        self.carry_out(self.driver.do(event), quiet=quiet)

    def carry_out(self, commands: list[Command], *, quiet: bool) -> None:
        self.quiet.append(quiet and not commands)
        for command in commands:
            if isinstance(command, Tell):
                self.obey(self.records[command.job].ranks[command.rank], command.message)
            elif isinstance(command, Launch):
                record = self.records[command.job]
                record.ranks = [Process() for _ in record.ranks]
                record.starts, record.setup_s, record.ended = True, 0.0, False
        for command in commands:
            if isinstance(command, Kill):
                self.end(command.job, -15)

    def obey(self, rank: Process, message: wire.ToAgent) -> None:
        if isinstance(message, wire.Resume):
            rank.where, rank.stop_at = "coming", inf
            rank.unread.clear()
        elif isinstance(message, wire.Suspend):
            rank.unread.append(message.stop_at)

    def end(self, name: str, code: int) -> None:
        """All of its processes end at once."""
        record, job = self.records[name], self.driver.core.jobs[name]
        if record.ended or not job.command.launched:
            record.ended = job.state.ended
            return
        record.ended = True  # unless it is started again at this very moment
        for number in range(len(record.ranks)):
            if not record.starts and job.ranks[number].phase.value not in ("absent", "gone"):
                self.tell_core(RankGone(name, number))
        if job.command.exit_code is None and job.command.launched:
            self.tell_core(Exited(name, code))
        if not job.state.ended:
            record.ended, record.ranks = False, [Process() for _ in record.ranks]

    # What must hold.

    def check(self) -> None:
        now_s = self.driver.now_s
        overview = Overview(self.driver.core, self.driver.job_history, policy=self.name, pid=1)
        for name, record in self.records.items():
            job = self.driver.core.jobs[name]
            shown = overview.job(job, now_s)
            found = {
                "waited": shown.waited_s,
                "held": shown.held_s,
                "switching": shown.switching_s,
                "setup": shown.setup_s,
                "trained": shown.executed_s,
            }
            assert found == pytest.approx(record.sums), (name, record.doing(), list(job.history))
            assert shown.service_s == pytest.approx(record.sums["trained"] * record.devices)
            assert sum(found.values()) == pytest.approx(shown.age_s)
            assert shown.fair_share_delay_s + shown.fragmentation_delay_s <= shown.waited_s + 1e-6

    def journal(self) -> Iterator[tuple[Event, float]]:
        """The events as a journal has them: without the heartbeats that another of the same rank follows."""
        late: dict[tuple[str, int], tuple[Event, float]] = {}
        for (event, now_s), quiet in zip(self.driver.journal, self.quiet, strict=True):
            if quiet:
                assert isinstance(event, Reported)
                late.pop((event.job, event.rank), None)
                late[event.job, event.rank] = event, now_s
                continue
            yield from late.values()
            late.clear()
            yield event, now_s

    def replayed(self) -> Core:
        core = Core(self.driver.core.devices, self.policy())
        for event, now_s in self.journal():
            core.handle(msgspec.json.decode(msgspec.json.encode(event), type=Event), now_s)
        return core


@pytest.mark.parametrize("name", POLICIES)
def test_all_time_is_accounted_for_as_it_has_passed(name: str) -> None:
    totals: dict[str, float] = {}
    told: set[str] = set()
    for seed in range(FIRST, FIRST + SEEDS):
        world = World(name, seed)
        world.live()
        replayed, now_s = world.replayed(), world.driver.now_s
        for job_name, job in world.driver.core.jobs.items():
            again = replayed.jobs[job_name]
            assert again.stretch == job.stretch
            for sum_of in ("waited_s", "held_s", "switching_s", "setup_s", "executed_s", "service_s"):
                assert getattr(again, sum_of) == getattr(job, sum_of), "to the last bit"
            assert again.service_at(now_s) == job.service_at(now_s)
            assert (again.preemptions, again.migrations) == (job.preemptions, job.migrations)
            told |= {what for _, what in job.history}
            for key, seconds in world.records[job_name].sums.items():
                totals[key] = totals.get(key, 0.0) + seconds
    assert min(totals.values()) > 0.0, "each activity was put to the test"
    assert {"suspend refused -> resuming", "late: reached no boundary"} <= told
