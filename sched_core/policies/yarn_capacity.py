"""The capacity scheduler of YARN, as clusters for deep learning used it (Philly, ATC 2019, section 2.2)."""

from __future__ import annotations

from collections.abc import Set

from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.placement.one_node import choose_devices
from gpuslice.sched_core.placement.placement import Placement
from gpuslice.sched_core.policy import View

from .starting import Choice, StartingPolicy, parse_shares


class YarnCapacity(StartingPolicy):
    """Every tenant has a queue with a guaranteed share; first in, first out inside; gangs; no preemption.

    The queue that uses the least of what is guaranteed to it is served first, of equals the one whose head
    came first. The head of a queue that does not fit blocks its own queue. If what is guaranteed to its queue
    would hold it, or nobody of its queue runs, devices are reserved for it, which no other queue gets: free
    ones, and those of the jobs that began first. Without that, small jobs of others would keep it waiting for
    as long as there are any.

    Parameters
    ----------
    capacities
        ``tenant:share`` pairs; tenants not named share equally. Shares are relative to each other.
    elastic
        True if a queue may use more than its share while there are free devices.
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
        #: What each running job holds, in the order in which they began.
        self._held: dict[str, tuple[int, ...]] = {}

    def reset(self, view: View) -> None:
        self._used = dict.fromkeys(self._stated, 0)
        self._queues = {tenant: {} for tenant in self._stated}
        self._held = {}

    def came(self, job: Job, view: View) -> None:
        queue = self._queues.setdefault(job.spec.tenant, {})
        queue.pop(job.id, None)  # Held back by its owner it left, and comes again at the end.
        queue[job.id] = job
        self._used.setdefault(job.spec.tenant, 0)

    def began(self, job: Job, devices: tuple[int, ...]) -> None:
        self._queues.setdefault(job.spec.tenant, {}).pop(job.id, None)
        self._used[job.spec.tenant] = self._used.get(job.spec.tenant, 0) + len(devices)
        self._held[job.id] = devices

    def ended(self, job: Job) -> None:
        self._used[job.spec.tenant] -= len(job.placement)
        self._held.pop(job.id, None)

    def choose(self, view: View) -> Choice | None:
        heads = [head for tenant in self._queues if (head := self._head(tenant)) is not None]
        heads.sort(key=lambda head: (self._load(head.spec.tenant), head.number))
        left, promised = self.free, set[int]()
        for place, head in enumerate(heads):
            entitled = self._entitled(head, view.cluster.size)
            if not (self._elastic or entitled):
                continue
            devices = choose_devices(self.placement, head, left) if head.demand <= left.total else None
            if devices is not None:
                return head, devices
            if entitled and any(other.demand <= left.total for other in heads[place + 1 :]):
                reserved = self._reserved(head, left, promised)
                promised.update(reserved)
                left = left.copy()
                left.take([device for device in reserved if left.has((device,))])
        return None

    def _load(self, tenant: str) -> float:
        """Return the use of ``tenant`` relative to its share."""
        return self._used[tenant] / self._share(tenant)

    def _entitled(self, head: Job, size: int) -> bool:
        """Return True if ``head`` keeps its queue within its guaranteed share, or is the queue's only job."""
        return not self._used[head.spec.tenant] or not self._over_share(head.spec.tenant, head.demand, size)

    def over_share(self, tenant: str, demand: int) -> bool:
        """Return True if ``tenant`` would exceed its guaranteed share with ``demand`` more devices."""
        if not self._queues:
            return False  # nobody has come yet, or it has not even seen the cluster
        return self._over_share(tenant, demand, self.free.cluster.size)

    def _over_share(self, tenant: str, demand: int, size: int) -> bool:
        whole = sum(self._share(name) for name in self._queues)
        return self._used.get(tenant, 0) + demand > size * self._share(tenant) / whole

    def _reserved(self, head: Job, left: FreeDevices, promised: Set[int]) -> tuple[int, ...]:
        """Return the devices that are reserved for ``head``, the first job of a queue.

        Return none if those ``promised`` to others leave too few.

        Devices are added in the order in which jobs began: it never waits for one that was given away since.
        """
        trial = left.copy()
        for devices in self._held.values():
            trial.give([device for device in devices if device not in promised])
            if trial.total >= head.demand:
                chosen = choose_devices(self.placement, head, trial)
                if chosen is not None:
                    return chosen
        return ()

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
