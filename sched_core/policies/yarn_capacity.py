"""The capacity scheduler of YARN, as clusters for deep learning used it (Philly, ATC 2019, section 2.2)."""

from __future__ import annotations

from gpuslice.sched_core.job import Job
from gpuslice.sched_core.placement.placement import Placement
from gpuslice.sched_core.policy import View

from .starting import Choice, StartingPolicy, parse_shares


class YarnCapacity(StartingPolicy):
    """Every tenant has a queue with a guaranteed share; first in, first out inside; gangs; no preemption.

    The queue that uses the least of what is guaranteed to it is served first, ties by name. The head of a
    queue that does not fit blocks its own queue only.

    Parameters
    ----------
    capacities
        ``tenant:share`` pairs; tenants not named share equally. Shares are relative to each other.
    elastic
        Whether a queue may use more than its share while there are free devices.
    """

    name = "yarn-cs"

    def __init__(
        self, placement: Placement | None = None, *, capacities: str = "", elastic: bool = True
    ) -> None:
        super().__init__(placement)
        self._stated = parse_shares(capacities, "capacities")
        self._elastic = elastic
        self._used: dict[str, int] = {}
        self._queues: dict[str, dict[str, Job]] = {}

    def reset(self, view: View) -> None:
        self._used = dict.fromkeys(self._stated, 0)
        self._queues = {tenant: {} for tenant in self._stated}

    def came(self, job: Job) -> None:
        queue = self._queues.setdefault(job.spec.tenant, {})
        queue.pop(job.id, None)  # Held back by its owner it left, and comes again at the end.
        queue[job.id] = job
        self._used.setdefault(job.spec.tenant, 0)

    def began(self, job: Job, devices: tuple[int, ...]) -> None:
        self._queues.setdefault(job.spec.tenant, {}).pop(job.id, None)
        self._used[job.spec.tenant] = self._used.get(job.spec.tenant, 0) + len(devices)

    def ended(self, job: Job) -> None:
        self._used[job.spec.tenant] -= len(job.placement)

    def choose(self, view: View) -> Choice | None:
        whole = sum(self._share(tenant) for tenant in self._queues)
        loads = sorted((self._used[tenant] / self._share(tenant), tenant) for tenant in self._queues)
        for _, tenant in loads:
            head = self._head(tenant)
            if head is None or head.demand > self.free.total:
                continue
            guaranteed = view.cluster.size * self._share(tenant) / whole
            if not self._elastic and self._used[tenant] and self._used[tenant] + head.demand > guaranteed:
                continue
            devices = self.placement.choose(head, self.free)
            if devices is not None:
                return head, devices
        return None

    def _share(self, tenant: str) -> float:
        return self._stated.get(tenant, 1.0)

    def _head(self, tenant: str) -> Job | None:
        queue = self._queues[tenant]
        while queue:
            name = next(iter(queue))
            if name in self.waiting:
                return queue[name]
            del queue[name]
        return None
