"""Plans of policies that do not look at ``Job.closed``: no job gets a device that is closed to it.

A plan that gives a job such a device is changed: the job gets other devices, by an exchange if need be. A
device that is closed to some jobs, and that the plan leaves idle, goes to a job that waits and may have it.
The policy starts again from the whole picture when it is asked next. Other plans stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from .job import Job
from .policy import Decision, Migrate, Plan, Policy, Start, Stop, Suspend, View
from .policy_calls import ask_for_plan

#: A job gives its devices to one that has attained less service once it has had them for so long.
_SLICE_S = 600.0


class OpenPlans:
    """A policy whose plans are changed where they give jobs devices that are closed to them.

    Parameters
    ----------
    policy
        The policy.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._changed = False

    def ask(self, view: View) -> Plan:
        """Return the plan of the policy for ``view``. Raise as ``ask_for_plan`` does."""
        if self._changed:
            view.changes = view.changes.outdated()
        plan = ask_for_plan(self.policy, view)
        opened = open_plan(plan, view)
        self._changed = opened is not plan
        return opened


def open_plan(plan: Plan, view: View) -> Plan:
    """Return ``plan``, changed if it gives a job a device that is closed to the job, or leaves one idle."""
    if not view.restricted:
        return plan
    wrong = [
        decision
        for decision in plan.decisions
        if isinstance(decision, Start | Migrate)
        and (job := view.jobs.get(decision.job)) is not None
        and not job.may_have(decision.devices)
    ]
    opened = _Board(plan, view).without(wrong)
    return opened if wrong or _by_job(opened) != _by_job(plan) else plan


def _by_job(plan: Plan) -> dict[str, Decision]:
    return {decision.job: decision for decision in plan.decisions}


class _Board:
    """Who has which devices once a plan is carried out.

    Parameters
    ----------
    plan
        The plan.
    view
        What the policy saw.
    """

    def __init__(self, plan: Plan, view: View) -> None:
        self._plan, self._view = plan, view
        self._devices: dict[str, tuple[int, ...]] = {}
        self._holders: dict[int, list[Job]] = {}
        self._decided = _by_job(plan)
        given = [one for one in plan.decisions if isinstance(one, Start | Migrate)]
        self._shared = {one.job for one in given if one.shared}
        for job in view.running():
            if job.id not in self._decided:
                self._put(job, job.placement)
        for one in given:
            if (named := view.jobs.get(one.job)) is not None:
                self._put(named, tuple(one.devices))

    def _put(self, job: Job, devices: tuple[int, ...]) -> None:
        self._devices[job.id] = devices
        for device in devices:
            self._holders.setdefault(device, []).append(job)

    def _take(self, job: Job) -> tuple[int, ...]:
        """Take from ``job`` the devices that it is to have, and return them."""
        devices = self._devices.pop(job.id)
        for device in devices:
            self._holders[device].remove(job)
        return devices

    def without(self, wrong: Sequence[Start | Migrate]) -> Plan:
        """Return the plan, changed where the decisions ``wrong`` give jobs what is closed to them."""
        jobs = [self._view.jobs[decision.job] for decision in wrong]
        for job in jobs:
            self._take(job)
        for job, decision in zip(jobs, wrong, strict=True):
            if job.id not in self._shared:
                self._place(job, tuple(decision.devices))
        self._fill(self._spare({device for decision in wrong for device in decision.devices}))
        return Plan(self._decisions(), self._plan.wake_at_s)

    def _spare(self, devices: set[int]) -> set[int]:
        """Return those of ``devices``, and of all that are closed to some jobs, that nobody is to have."""
        node_of = self._view.cluster.node_of
        restricted = {one for one in self._view.restricted if one in self._view.cluster.on(node_of[one])}
        return {device for device in devices | restricted if self._are_free((device,))}

    def _place(self, job: Job, wanted: tuple[int, ...]) -> None:
        """Give ``job`` other devices than ``wanted``, by exchanges if need be; else those that it has."""
        found, taken = list[int](), list[int]()
        for device in wanted:
            if job.may_have((device,)):
                found.append(device)
            elif (other := self._instead(job, device, [*wanted, *taken])) is not None:
                found.append(other)
                taken.append(other)
        if len(found) == len(wanted) and job.may_be_on(self._view.cluster.nodes(found)):
            closed = [device for device in wanted if not job.may_have((device,))]
            for other, device in zip(taken, closed, strict=True):
                self._exchange(other, device)
            self._put(job, tuple(found))
        elif job.running and job.may_have(job.placement) and self._are_free(job.placement):
            self._put(job, job.placement)

    def _exchange(self, device: int, other: int) -> None:
        """Give the holder of ``device``, if it has one, ``other`` instead. Else the holder waits."""
        if (holder := self._holder(device)) is not None:
            devices = tuple(other if one == device else one for one in self._take(holder))
            if self._may_have(holder, devices):
                self._put(holder, devices)

    def _instead(self, job: Job, device: int, besides: Iterable[int]) -> int | None:
        """Return a device that ``job`` can have instead of ``device``; None if there is none."""
        cluster, passed = self._view.cluster, {*besides}
        usable = [
            other
            for node in (job.within or range(len(cluster.node_sizes)))
            for other in cluster.on(node)
            if other not in passed and job.may_have((other,))
        ]
        for gives in (self._is_free, self._gives, self._has_had_enough):
            for other in usable:
                if gives(job, other, device):
                    return other
        return None

    def _is_free(self, job: Job, device: int, other: int) -> bool:
        return self._are_free((device,))

    def _gives(self, job: Job, device: int, other: int) -> bool:
        """Return True if the holder of ``device`` can have ``other`` instead."""
        holder = self._holder(device)
        if holder is None or not self._view.can_move(holder):
            return False
        left = tuple(other if one == device else one for one in self._devices[holder.id])
        return self._may_have(holder, left)

    def _has_had_enough(self, job: Job, device: int, other: int) -> bool:
        """Return True if the only holder of ``device`` has had more than ``job``, and for a while by now."""
        holder, now_s = self._holder(device), self._view.now_s
        if holder is None or len(self._devices[holder.id]) > 1:
            return False
        less = (job.service_at(now_s), job.number) < (holder.service_at(now_s), holder.number)
        least_s = max(_SLICE_S, self._view.least_slice_s)
        return less and (not holder.running or now_s - holder.since_s >= least_s)

    def _may_have(self, job: Job, devices: tuple[int, ...]) -> bool:
        return job.may_have(devices) and job.may_be_on(self._view.cluster.nodes(devices))

    def _holder(self, device: int) -> Job | None:
        """Return the job that has ``device`` for itself; None if no job has."""
        holders = self._holders.get(device, ())
        return holders[0] if len(holders) == 1 and holders[0].id not in self._shared else None

    def _are_free(self, devices: Iterable[int]) -> bool:
        return not any(self._holders.get(device) for device in devices)

    def _fill(self, spare: set[int]) -> None:
        """Give the ``spare`` devices that are left to jobs that would wait and may have them."""
        jobs, now_s = self._view.jobs.values() if spare else (), self._view.now_s
        left_out = [
            job
            for job in jobs
            if job.id not in self._devices and not isinstance(self._decided.get(job.id), Stop)
        ]
        for job in left_out:
            stays = job.running and job.may_have(job.placement)
            if stays and spare.issuperset(job.placement) and self._are_free(job.placement):
                self._put(job, job.placement)
        for job in sorted(left_out, key=lambda job: (job.service_at(now_s), job.number)):
            free = [device for device in spare if self._are_free((device,))]
            if not free:
                return
            if job.id not in self._devices and (devices := self._choose(job, free)):
                self._put(job, devices)

    def _choose(self, job: Job, free: Iterable[int]) -> tuple[int, ...]:
        """Return devices for ``job`` of those that are ``free``, on few nodes; empty if it can have none."""
        node_of = self._view.cluster.node_of
        usable = sorted(device for device in free if job.may_have((device,)))
        nodes = Counter(
            node_of[device] for device in usable if not job.within or node_of[device] in job.within
        )
        if job.within:
            nodes = Counter({node: count for node, count in nodes.items() if count >= job.demand})
        order = [node for node, _ in nodes.most_common(1 if job.within else None)]
        found = [device for node in order for device in usable if node_of[device] == node][: job.demand]
        return tuple(sorted(found)) if len(found) == job.demand else ()

    def _decisions(self) -> list[Decision]:
        """Return the decisions that lead to these devices."""
        found: list[Decision] = []
        for job in self._view.jobs.values():
            devices, before = self._devices.get(job.id), self._decided.get(job.id)
            shared = job.id in self._shared
            if isinstance(before, Stop):
                found.append(before)
            elif devices is None:
                found += [Suspend(job.id)] if job.running else []
            elif not job.running:
                found.append(Start(job.id, devices, shared))
            elif devices != job.placement or (isinstance(before, Migrate) and shared):
                found.append(Migrate(job.id, devices, shared))
        return found
