"""Priorities over any policy: a waiting job gets devices before jobs of lower priority.

Each priority has an instance of the policy of its own, which ranks the jobs of that priority as if there were
no others. The highest plans over all devices. The next one plans over those that are left, and so on. A job
on a device that goes to a job of higher priority is suspended.

As long as there is room elsewhere, a job of higher priority is not put on a device of a lower one. While all
jobs have the same priority, the policy is asked as if there were no priorities.
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy

from .cluster import Cluster
from .job import Job
from .open_plans import OpenPlans
from .policy import Changes, Decision, Migrate, Plan, Policy, PolicyError, Start, Stop, Suspend, View

_NOTHING: frozenset[int] = frozenset()
#: The lists of ``Changes``, in the order in which they are passed on.
_CHANGES = ("arrived", "finished", "succeeded", "begun", "settled")


class _Level:
    """One priority: its instance of the policy, and what that is shown.

    Parameters
    ----------
    policy
        The instance.
    view
        The view of all jobs.

    Attributes
    ----------
    jobs
        The jobs of this priority.
    """

    def __init__(self, policy: OpenPlans, view: View) -> None:
        self.policy = policy
        self.jobs: dict[str, Job] = {}
        self.view = view.narrowed(view.cluster, self.jobs)
        self._whole, self._hidden = view.cluster, _NOTHING
        #: True while some job waits that does not fit beside jobs of lower priority.
        self._crowded = False

    @property
    def devices(self) -> frozenset[int]:
        """The devices that the jobs have now."""
        return frozenset(device for job in self.jobs.values() if job.running for device in job.placement)

    def overtaken(self, taken: frozenset[int]) -> list[Job]:
        """Return the jobs on ``taken`` devices, which jobs of higher priority are to have."""
        return [job for job in self.jobs.values() if job.running and not taken.isdisjoint(job.placement)]

    def ask(self, view: View, taken: frozenset[int], below: frozenset[int]) -> Plan:
        """Return the policy's plan for the jobs of this priority.

        Parameters
        ----------
        view
            The view of all jobs.
        taken, below
            Devices of jobs of higher priority, and of jobs of lower priority.
        """
        self.view.follow(view)
        waiting = {job.id for job in self.jobs.values() if not job.running}
        self._crowded = self._crowded and bool(waiting)
        moved = view.cluster is not self._whole or not taken <= self._hidden or self._hidden & self.devices
        if waiting or moved or self.view.changes.reset:
            asked = sum(job.demand for job in self.jobs.values())
            apart = taken | below
            if self._crowded or asked > view.cluster.without((), apart).size:
                apart = taken
            self._hide(apart, view.cluster)
        plan = self.policy.ask(self.view)
        if self._hidden > taken and not waiting <= _started(plan):
            self._crowded = True
            self._hide(taken, view.cluster)
            plan = self.policy.ask(self.view)
        self.view.changes = Changes()
        return plan

    def _hide(self, devices: frozenset[int], whole: Cluster) -> None:
        """Show the policy the cluster ``whole`` without ``devices``. It starts again if that is new."""
        if devices != self._hidden or whole is not self._whole:
            self._hidden, self._whole = devices, whole
            self.view.cluster = whole.without((), devices) if devices else whole
            self.view.changes = self.view.changes.outdated()

    def after(self, plan: Plan) -> frozenset[int]:
        """Return the devices that the jobs have once ``plan`` is carried out."""
        found = {job.id: job.placement for job in self.jobs.values() if job.running}
        for decision in plan.decisions:
            if isinstance(decision, Start | Migrate):
                found[decision.job] = tuple(decision.devices)
            else:
                found.pop(decision.job, None)
        return frozenset(device for devices in found.values() for device in devices)


class Priorities:
    """A policy that plans for each priority by an instance of ``policy``.

    Parameters
    ----------
    policy
        The policy. It has not made a plan yet.

    Attributes
    ----------
    unfinished
        True if it is to be asked again once the last plan is entered: jobs were suspended for others of
        higher priority, and can have other devices.
    """

    def __init__(self, policy: Policy) -> None:
        self.name, self.needs_durations = policy.name, policy.needs_durations
        self.unfinished = False
        self._policy, self._copy = OpenPlans(policy), _copy(policy)
        self._counts: Counter[int] = Counter()
        self._levels: dict[int, _Level] = {}

    @property
    def possible(self) -> bool:
        """True if there can be several priorities: the policy can be copied."""
        return self._copy is not None

    def policy_of(self, job: Job) -> Policy:
        """Return the instance of the policy that plans for ``job``."""
        level = self._levels.get(job.spec.priority)
        return (self._policy if level is None else level.policy).policy

    def plan(self, view: View) -> Plan:
        """Return the plan for ``view``.

        Raises
        ------
        PolicyError
            If the policy fails for jobs of some priority.
        """
        self._count(view)
        self.unfinished = False
        if len(self._counts) > 1:
            return self._plan_by_level(view)
        if self._levels:
            self._levels.clear()
            view.changes = view.changes.outdated()
        return self._policy.ask(view)

    def _count(self, view: View) -> None:
        """Count the jobs of each priority."""
        if view.changes.reset:
            self._counts = Counter(job.spec.priority for job in view.jobs.values())
            return
        for job in view.changes.arrived:
            self._counts[job.spec.priority] += 1
        for job in view.changes.finished:
            self._counts[job.spec.priority] -= 1
            if not self._counts[job.spec.priority]:
                del self._counts[job.spec.priority]

    def _plan_by_level(self, view: View) -> Plan:
        self._tell(view)
        decisions: list[Decision] = []
        wakes_s: list[float] = []
        levels = [self._levels[priority] for priority in sorted(self._levels, reverse=True)]
        below = [_NOTHING]
        for level in reversed(levels):
            below.insert(0, below[0] | level.devices)
        taken = _NOTHING
        for level, lower in zip(levels, below[1:], strict=True):
            overtaken = level.overtaken(taken)
            decisions += [Suspend(job.id) for job in overtaken]
            self.unfinished |= bool(overtaken)
            if self.unfinished:
                continue  # its jobs can have other devices once those are free that are left now
            plan = level.ask(view, taken, lower - taken)
            decisions += plan.decisions
            wakes_s += [] if plan.wake_at_s is None else [plan.wake_at_s]
            taken |= level.after(plan)
        return Plan(decisions, min(wakes_s, default=None))

    def _tell(self, view: View) -> None:
        """Tell the instances of the policy what has changed for them."""
        changes = view.changes
        for priority in self._levels.keys() - self._counts.keys():
            del self._levels[priority]
        new = self._counts.keys() - self._levels.keys()
        for priority in new:
            self._levels[priority] = _Level(self._instance(priority), view)
        if changes.reset or new:
            for priority, level in self._levels.items():
                if changes.reset or priority in new:
                    level.jobs.clear()
                    level.view.changes = level.view.changes.outdated()
            for job in view.jobs.values():
                level = self._levels[job.spec.priority]
                if level.view.changes.reset:
                    level.jobs[job.id] = job
        for name in ("succeeded",) if changes.reset else _CHANGES:
            for job in getattr(changes, name):
                if (told := self._levels.get(job.spec.priority)) is not None:
                    _pass_on(told, name, job)

    def _instance(self, priority: int) -> OpenPlans:
        """Return an instance of the policy for jobs of ``priority``. The policy itself has those of 0."""
        if priority == 0:
            return self._policy
        if self._copy is None:
            raise PolicyError(
                f"policy {self.name} cannot be copied, so it cannot plan by priority",
                "submit jobs without --priority, or choose another policy",
            )
        return OpenPlans(deepcopy(self._copy))


def _pass_on(level: _Level, name: str, job: Job) -> None:
    """Tell the policy of ``level`` that ``job`` is to be among the changes of this ``name``."""
    changes = level.view.changes
    if name == "arrived":
        level.jobs[job.id] = job
    elif name == "finished":
        level.jobs.pop(job.id, None)
    if changes.reset and name != "succeeded":
        return
    if name == "finished":
        changes.withdrawn(job)
    else:
        getattr(changes, name).append(job)


def _started(plan: Plan) -> set[str]:
    return {decision.job for decision in plan.decisions if isinstance(decision, Start | Stop)}


def _copy(policy: Policy) -> Policy | None:
    """Return a copy of ``policy``, or None if it cannot be copied."""
    try:
        return deepcopy(policy)
    except Exception:  # noqa: BLE001 (a policy may be anybody's code)
        return None
