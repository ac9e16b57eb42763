"""Quotas: how many devices the jobs of one tenant may ask for at the same time.

A job queues for its part of the quota from its submission on, not from the moment its processes are there. So
a job that imports for long loses no place to a job that was submitted later.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from gpuslice.sched_core.jobs.gang import Gang


class Quotas:
    """The jobs that the policy may see by their tenants' quotas, and those that wait outside, in order.

    Parameters
    ----------
    limits
        Devices by tenant; tenants that are not named have no limit.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        self.limits = dict(limits)
        self._used: Counter[str] = Counter()
        #: The jobs inside their tenant's quota, and those outside: by tenant, then by id in order of entry.
        self._inside: defaultdict[str, dict[str, Gang]] = defaultdict(dict)
        self._outside: defaultdict[str, dict[str, Gang]] = defaultdict(dict)

    def enter(self, job: Gang) -> bool:
        """Let ``job`` queue for its tenant's quota. Return True if it is in. Else a ``leave`` lets it in."""
        tenant = job.spec.tenant
        if tenant not in self.limits or job.id in self._inside[tenant]:
            return True
        self._outside[tenant].setdefault(job.id, job)
        self._admit(tenant)
        return job.id in self._inside[tenant]

    def keeps_out(self, job: Gang) -> bool:
        """Return True if ``job`` waits outside its tenant's quota."""
        return job.id in self._outside.get(job.spec.tenant, ())

    def inside(self, tenant: str) -> list[str]:
        """Return the ids of the jobs that have a part of the quota of ``tenant``, in order of their entry."""
        return list(self._inside.get(tenant, ()))

    def next_outside(self, tenant: str) -> str:
        """Return the id of the job of ``tenant`` that comes in next. Return "" if none waits outside."""
        return next(iter(self._outside.get(tenant, ())), "")

    def leave(self, job: Gang) -> list[Gang]:
        """Remove ``job``, which is inside or outside. Return the jobs that come in now."""
        tenant = job.spec.tenant
        self._outside[tenant].pop(job.id, None)
        if self._inside[tenant].pop(job.id, None) is not None:
            self._used[tenant] -= job.demand
        return self._admit(tenant) if tenant in self.limits else []

    def _admit(self, tenant: str) -> list[Gang]:
        admitted: list[Gang] = []
        queue = self._outside[tenant]
        for job in list(queue.values()):
            if self._used[tenant] + job.demand > self.limits[tenant]:
                break
            del queue[job.id]
            self._inside[tenant][job.id] = job
            self._used[tenant] += job.demand
            admitted.append(job)
        return admitted
