"""Limits on jobs that have a part of something in common: a tenant's devices, the places of an array.

A job queues for its part of a limit from its submission on, not from the moment its processes are there. So
a job that imports for long loses no place to a job that was submitted later. A job under several limits
passes one after the other: it queues for the next when it has its part of the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from gpuslice.sched_core.jobs.gang import Gang


class Limit:
    """A limit, the jobs that have a part of it, and those that wait for a part, in order.

    Parameters
    ----------
    kind, name
        What the limit is for: the devices of a tenant's jobs, or the number of an array's jobs, by name:
        at once, or before the first one has shown what memory they need.
    most
        The most that all jobs inside have together.
    """

    def __init__(self, kind: Literal["tenant", "array", "first"], name: str, most: int) -> None:
        self.kind, self.name, self.most = kind, name, most
        self.used = 0
        #: By id, in order of entry.
        self._inside: dict[str, Gang] = {}
        self._outside: dict[str, Gang] = {}

    def part(self, job: Gang) -> int:
        """Return how much of the limit ``job`` needs."""
        return job.demand if self.kind == "tenant" else 1

    def enter(self, job: Gang) -> bool:
        """Let ``job`` queue for its part. Return True if it has it. Else a ``leave`` gives it."""
        if job.id in self._inside:
            return True
        self._outside.setdefault(job.id, job)
        self._admit()
        return job.id in self._inside

    def leave(self, job: Gang) -> list[Gang]:
        """Remove ``job``, which is inside or outside. Return the jobs that come in now."""
        self._outside.pop(job.id, None)
        if self._inside.pop(job.id, None) is not None:
            self.used -= self.part(job)
        return self._admit()

    def keeps_out(self, job: Gang) -> bool:
        """Return True if ``job`` waits for its part."""
        return job.id in self._outside

    @property
    def inside(self) -> list[str]:
        """The ids of the jobs that have a part, in order of their entry."""
        return list(self._inside)

    @property
    def line(self) -> list[str]:
        """The ids of the jobs that have a part, and then of those that wait for one."""
        return [*self._inside, *self._outside]

    @property
    def next_outside(self) -> str:
        """The id of the job that comes in next. Empty if none waits."""
        return next(iter(self._outside), "")

    @property
    def outside(self) -> list[Gang]:
        """The jobs that wait for their part, in order."""
        return list(self._outside.values())

    def _admit(self) -> list[Gang]:
        admitted: list[Gang] = []
        while job := next(iter(self._outside.values()), None):
            if self.used + self.part(job) > self.most:
                break
            del self._outside[job.id]
            self._inside[job.id] = job
            self.used += self.part(job)
            admitted.append(job)
        return admitted


class Quotas:
    """The jobs that the policy may see by all limits that they are under.

    Parameters
    ----------
    tenants
        Devices by tenant; tenants that are not named have no limit.

    Attributes
    ----------
    first
        The limits of the arrays of which one job may have devices, because it is to show what memory the
        jobs need.
    array_bytes
        The most memory that a job of an array was seen to use on a device, by array. 0: not measured.
        The arrays in it have no limit of that kind any more.
    """

    def __init__(self, tenants: Mapping[str, int]) -> None:
        self.tenants = {name: Limit("tenant", name, most) for name, most in tenants.items()}
        #: The limits of arrays that have one, by the array's id.
        self._arrays: dict[str, Limit] = {}
        self.first: dict[str, Limit] = {}
        self.array_bytes: dict[str, int] = {}

    def change(self, tenants: Mapping[str, int], queueing: Iterable[Gang]) -> list[Gang]:
        """Replace the limits of tenants. ``queueing`` are the jobs that have, or queue for, all their parts.

        Jobs of a changed limit queue anew: first those that had a part of the old one, in order of entry,
        then those that waited for it, then the others. Return these jobs.
        """
        former, limits = self.tenants, Quotas(tenants).tenants
        kept = {name for name in limits if name in former and limits[name].most == former[name].most}
        changed = (former.keys() | limits.keys()) - kept
        self.tenants = {name: former[name] if name in kept else limits[name] for name in limits}
        places: dict[str, int] = {}
        for name in changed & former.keys():
            places |= {job: place for place, job in enumerate(former[name].line)}
        found = [job for job in queueing if job.spec.tenant in changed]
        found.sort(key=lambda job: (places.get(job.id, len(places)), not job.shown))
        for job in found:
            self.enter(job)
        return found

    def enter(self, job: Gang) -> bool:
        """Let ``job`` queue for its part of each limit. Return True if it has all. Else a ``leave`` may."""
        return all(limit.enter(job) for limit in self._of(job))

    def keeps_out(self, job: Gang) -> bool:
        """Return True if ``job`` waits outside one of its limits."""
        return self.limit_of(job) is not None

    def waits_for_place(self, job: Gang) -> bool:
        """Return True if as many jobs of the array of ``job`` have places as may. It has no trial then."""
        limit = self.limit_of(job)
        return limit is not None and limit.kind != "tenant"

    def limit_of(self, job: Gang) -> Limit | None:
        """Return the limit that keeps ``job`` out. Return None if there is none."""
        return next((limit for limit in self._of(job) if limit.keeps_out(job)), None)

    def leave(self, job: Gang) -> list[Gang]:
        """Remove ``job`` from all limits. Return the jobs that have all their parts now."""
        admitted = [other for limit in self._of(job) for other in limit.leave(job)]
        return [other for other in admitted if self.enter(other)]

    def open(self, array: str, peak_bytes: int) -> list[Gang]:
        """Let all jobs of ``array`` have devices. Return those that have all their parts of limits now.

        ``peak_bytes`` is the most memory that one of them was seen to use; 0: not measured.
        """
        outside = self.first.pop(array).outside
        self.array_bytes[array] = peak_bytes
        return [job for job in outside if self.enter(job)]

    def _of(self, job: Gang) -> list[Limit]:
        """Return the limits that ``job`` is under, in the order in which it passes them."""
        found, name = [], job.spec.array
        # Where its memory is stated, or one is to follow the other anyway, nothing is to be learnt.
        learnt = name in self.array_bytes or job.spec.device_memory_bytes or job.spec.at_once == 1
        if name and not learnt:
            found.append(self.first.setdefault(name, Limit("first", name, 1)))
        if job.spec.at_once:
            if (limit := self._arrays.get(name)) is None:
                limit = self._arrays[name] = Limit("array", name, job.spec.at_once)
            found.append(limit)
        if (limit := self.tenants.get(job.spec.tenant)) is not None:
            found.append(limit)
        return found
