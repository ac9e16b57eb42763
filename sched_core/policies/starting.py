"""Policies that never take devices away: whenever some are free, choose whom to start next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping

from gpuslice.errors import ConfigError
from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.placement.one_node import choose_devices, kind_of
from gpuslice.sched_core.placement.placement import Count, Placement
from gpuslice.sched_core.policy import Decision, Plan, Start, View

#: A job to start and the devices it gets.
Choice = tuple[Job, tuple[int, ...]]


class StartingPolicy(ABC):
    """Base of the policies without preemption: ``choose`` names the jobs to start, one by one.

    Parameters
    ----------
    placement
        Where jobs go; any devices if not given.
    """

    name = "starting"
    needs_durations = False

    def __init__(self, placement: Placement | None = None) -> None:
        self.placement: Placement = Count() if placement is None else placement
        self.free: FreeDevices
        #: In order of arrival.
        self.waiting: dict[str, Job] = {}

    @abstractmethod
    def choose(self, view: View) -> Choice | None:
        """Return the next of ``waiting`` to start, and its devices. Return None to start no more."""

    def reset(self, view: View) -> None:  # noqa: B027
        """Forget everything. ``began`` is called afterwards for every running job."""

    def came(self, job: Job, view: View) -> None:  # noqa: B027
        """Note that ``job`` waits from now on."""

    def left(self, job: Job) -> None:  # noqa: B027
        """Note that ``job`` does not wait any more."""

    def began(self, job: Job, devices: tuple[int, ...]) -> None:  # noqa: B027
        """Note that ``job`` runs on ``devices``."""

    def ended(self, job: Job) -> None:  # noqa: B027
        """Note that ``job`` has given ``job.placement`` back."""

    def relocated(self, moves: Mapping[Job, tuple[int, ...]]) -> None:
        """Note that jobs were moved; see ``defragmenting.policy.Relocatable``."""
        for job in moves:
            self.free.give(job.placement)
            self.ended(job)
        for job, devices in moves.items():
            self.free.take(devices)
            self.began(job, devices)

    def plan(self, view: View) -> Plan:
        """Start jobs until ``choose`` returns None."""
        self._follow(view)
        decisions: list[Decision] = []
        while self.waiting and self.free.total and (choice := self.choose(view)) is not None:
            job, devices = choice
            del self.waiting[job.id]
            self.left(job)
            self.free.take(devices)
            self.placement.placed(job, devices)
            self.began(job, devices)
            decisions.append(Start(job.id, devices))
        return Plan(decisions)

    def offers(self, jobs: Iterable[Job]) -> Iterator[Choice]:
        """Yield each of ``jobs`` that the placement has devices for now, with these devices.

        The placement is asked once per kind.
        """
        found: dict[tuple[int, str], tuple[int, ...] | None] = {}
        for job in jobs:
            if job.demand > self.free.total:
                continue
            kind = (job.demand, kind_of(self.placement, job))
            if kind not in found:
                found[kind] = choose_devices(self.placement, job, self.free)
            devices = found[kind]
            if devices is not None:
                yield job, devices

    def _follow(self, view: View) -> None:
        changes = view.changes
        if changes.reset:
            self.free = view.free()
            self.waiting = {}
            self.reset(view)
            for job in view.running():
                self.began(job, job.placement)
        for job in changes.finished:
            if job.running:
                self.free.give(job.placement)
                self.ended(job)
            elif self.waiting.pop(job.id, None) is not None:
                self.left(job)
        for job in view.waiting() if changes.reset else changes.arrived:
            self.waiting[job.id] = job
            self.came(job, view)


def parse_shares(text: str, what: str) -> dict[str, float]:
    """Parse ``a:0.5,b:0.25`` into shares by name.

    Raises
    ------
    ConfigError
        If it is not such a list of names and positive numbers.
    """
    shares: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition(":")
        try:
            shares[name.strip()] = float(number)
        except ValueError:
            shares[name.strip()] = -1.0
        if not 0 < shares[name.strip()] < float("inf"):
            raise ConfigError(f"{what}={text!r}: {part!r} is not a share", "write NAME:NUMBER,NAME:NUMBER")
    return shares
