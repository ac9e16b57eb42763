"""Dominant resource fairness by offers, as Mesos does it (Ghodsi et al., NSDI 2011, section 4.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpuslice.sched_core.job import Job
from gpuslice.sched_core.placement.placement import Placement
from gpuslice.sched_core.policy import View

from .hosts import Hosts
from .starting import Choice, StartingPolicy, parse_shares


class Drf(StartingPolicy):
    """A policy that offers free devices to the tenant of smallest dominant share.

    The dominant share of a tenant is the largest of its shares of devices, CPUs and memory, divided by its
    weight. A tenant that can use nothing of the offer declines and the next one is asked; ties by name.

    Parameters
    ----------
    weights
        ``tenant:weight`` pairs; 1 for all others.
    node_cpus, node_memory_gib
        What every node has; 0: not counted.
    """

    name = "drf"

    def __init__(
        self,
        placement: Placement | None = None,
        *,
        weights: str = "",
        node_cpus: float = 0,
        node_memory_gib: float = 0,
    ) -> None:
        super().__init__(placement)
        self._weights = parse_shares(weights, "weights")
        self._limits = (node_cpus, node_memory_gib)
        self._shares: dict[str, list[float]] = {}
        #: Who waits, by tenant, in order of arrival.
        self._lines: dict[str, dict[str, Job]] = {}

    def reset(self, view: View) -> None:
        self.hosts = Hosts(view.cluster, *self._limits)
        self._shares = {}
        self._lines = {}

    def came(self, job: Job, view: View) -> None:
        self.hosts.check(job)
        self._lines.setdefault(job.spec.tenant, {})[job.id] = job
        self._shares.setdefault(job.spec.tenant, [0.0, 0.0, 0.0])

    def left(self, job: Job) -> None:
        line = self._lines[job.spec.tenant]
        del line[job.id]
        if not line:
            del self._lines[job.spec.tenant]

    def began(self, job: Job, devices: tuple[int, ...]) -> None:
        self._book(job, devices, 1)

    def ended(self, job: Job) -> None:
        self._book(job, job.placement, -1)

    def choose(self, view: View) -> Choice | None:
        first: dict[str, Choice] = {}
        for job, devices in self.offers(self._undecided(first)):
            if self.hosts.fits(job, devices):
                first[job.spec.tenant] = (job, devices)
        if not first:
            return None
        return first[min(first, key=lambda tenant: (self._dominant(tenant), tenant))]

    def _undecided(self, first: Mapping[str, Choice]) -> Iterator[Job]:
        """Yield the waiting jobs of each tenant until ``first`` has one of that tenant's jobs."""
        for tenant, line in self._lines.items():
            for job in line.values():
                if tenant in first:
                    break
                yield job

    def _dominant(self, tenant: str) -> float:
        # Rounding: sums of taken and returned shares must not decide ties.
        return round(max(self._shares[tenant]) / self._weights.get(tenant, 1.0), 9)

    def _book(self, job: Job, devices: tuple[int, ...], sign: int) -> None:
        self.hosts.take(job, devices, sign)
        sums = self._shares.setdefault(job.spec.tenant, [0.0, 0.0, 0.0])
        for kind, share in enumerate(self.hosts.shares(job)):
            sums[kind] += sign * share
