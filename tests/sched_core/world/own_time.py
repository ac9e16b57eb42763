"""Jobs with a time of their own in a world: holds, moments, other jobs' ends, time limits and priorities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec

from gpuslice.sched_core.jobs.conditions import allows, followed
from gpuslice.sched_core.jobs.states import JobState

from .draws import Draws
from .loop import Loop
from .record import Record
from .scenario import CALM_S, JobPlan, Scenario, Wish
from .windows import UNIX_S

#: What the core takes for the same moment.
_ROUNDING_S = 2e-3


def with_own_times(scenario: Scenario) -> Scenario:
    """Return ``scenario`` with arrays, conditions of the start, time limits, priorities, and more wishes."""
    draws, jobs, wishes = Draws(scenario.seed), list[JobPlan](), [*scenario.wishes]
    for plan in sorted(scenario.jobs, key=lambda plan: plan.spec.submit_s):
        name, before = plan.spec.id, [other.spec.id for other in jobs]
        begin_s = plan.spec.submit_s + draws.between(0.0, 25.0, name, "begin")
        fields: dict[str, object] = {
            "hold": draws.chance(0.2, name, "hold"),
            "begin_unix_s": UNIX_S + begin_s if draws.chance(0.3, name, "begins") else 0.0,
            "time_limit_s": draws.choice([0.0, 0.0, 0.0, 2.0, 6.0], name, "time limit"),
            "priority": draws.choice([-1, 0, 0, 0, 1, 2], name, "priority"),
        }
        if before and draws.chance(0.4, name, "follows"):
            others = draws.sample(before, draws.number(1, min(2, len(before)), name, "count"), name, "after")
            how = [draws.choice(["", ":any", ":any", ":failed"], name, other, "how") for other in others]
            fields["after"] = tuple(map("".join, zip(others, how, strict=True)))
        plan = replace(plan, spec=msgspec.structs.replace(plan.spec, **fields))
        jobs += _array_of(draws, plan) if draws.chance(0.25, name, "array") else [plan]
        wishes += _draw_changes(draws, name)
    wishes.sort(key=lambda wish: wish.when_s)
    return replace(scenario, jobs=tuple(jobs), wishes=tuple(wishes))


def _array_of(draws: Draws, plan: JobPlan) -> list[JobPlan]:
    """Return the jobs of an array, each like ``plan``. One of them has its id."""
    name = plan.spec.id
    places = draws.choice([0, 1, 2], name, "at once")
    spec = msgspec.structs.replace(plan.spec, array=f"{name}-array", at_once=places, hold=False)
    ids = [name, *(f"{name}{number}" for number in range(1, draws.number(2, 4, name, "points")))]
    return [
        replace(
            plan,
            spec=msgspec.structs.replace(spec, id=one),
            boundaries=max(2, plan.boundaries - draws.number(0, plan.boundaries, one, "fewer")),
        )
        for one in ids
    ]


def _draw_changes(draws: Draws, name: str) -> list[Wish]:
    """Return requests to change the job, or to run it again once it has ended."""
    found = list[Wish]()
    for number in range(draws.choice([0, 0, 1, 3], name, "changes")):
        key = (name, "change", number)
        what = draws.choice(["priority", "time limit", "requeue", "requeue", "requeue --fresh"], *key)
        value = draws.choice([3.0, 8.0] if what == "time limit" else [-1, 0, 1, 2], *key, "value")
        found.append(Wish(draws.between(5.0, CALM_S - 2.0, *key, "when"), name, what, value=value))
    return found


class OwnTime:
    """What jobs wait for before they start, as somebody knows who only heard the requests.

    Parameters
    ----------
    loop, record
        Virtual time, and what is said of violations.
    """

    def __init__(self, loop: Loop, record: Record) -> None:
        self._loop, self._record = loop, record
        self._released: set[str] = set()
        self._cancelled: set[str] = set()
        #: The jobs that had ended and whose owners want another attempt, whatever they were to wait for.
        self.requeued: set[str] = set()
        #: The jobs whose owners have set a time limit.
        self.limited: set[str] = set()
        #: Returns the state of a job, and whether nothing of it is left.
        self.state_of: Callable[[str], tuple[str, bool]] = lambda job: ("", False)

    def release(self, job: str) -> None:
        """The owner of ``job`` is about to release it."""
        self._released.add(job)

    def cancel(self, job: str) -> None:
        """The owner of ``job`` is about to cancel it."""
        self._cancelled.add(job)

    def limit(self, job: str) -> None:
        """The owner of ``job`` is about to set its time limit."""
        self.limited.add(job)

    @property
    def changed(self) -> set[str]:
        """The jobs that were requeued, or whose time limits were set, so that their times are not known."""
        return self.requeued | self.limited

    def _is_known(self, plan: JobPlan) -> bool:
        """Return True if neither the job nor one that it follows was requeued."""
        return self.requeued.isdisjoint({plan.spec.id, *map(followed, plan.spec.after)})

    def launched(self, plan: JobPlan) -> None:
        """A node was told to start ``plan``: the job may start by now."""
        spec, unix_s = plan.spec, self._loop.now_s + UNIX_S
        waits = spec.id not in self.requeued
        early = waits and spec.hold and spec.id not in self._released
        early = early or (waits and unix_s < spec.begin_unix_s - _ROUNDING_S)
        for dependency in spec.after if self._is_known(plan) else ():
            state, over = self.state_of(followed(dependency))
            early = early or not over or not allows(dependency, JobState(state))
        if early:
            raise self._record.violated("a job was started before its time", spec.id, unix_s, spec.after)

    def judged(self, plan: JobPlan, states: Mapping[str, str]) -> None:
        """All jobs have ended, in ``states``: none was cancelled that could have been started."""
        spec = plan.spec
        if states[spec.id] != "cancelled" or spec.id in self._cancelled or not self._is_known(plan):
            return
        if all(allows(one, JobState(states[followed(one)])) for one in spec.after):
            raise self._record.violated("a job was cancelled for nothing", spec.id, spec.after)
