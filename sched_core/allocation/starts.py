"""Jobs that may not start yet: until a moment, or until other jobs have ended.

A moment is a Unix time. It stays the same when the machine sleeps or is switched off, or its clock is set.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from math import inf

from gpuslice.sched_core.jobs.conditions import described, followed, fulfilled
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState, Trigger
from gpuslice.sched_core.lifecycle import job_steps
from gpuslice.sched_core.lifecycle.events import Notice
from gpuslice.sched_core.lifecycle.state import State

_ENDED = {
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "was cancelled",
}


class Followed:
    """The jobs that others wait for: one job, or all of an array.

    Parameters
    ----------
    jobs
        All of them.

    Attributes
    ----------
    followers
        The jobs that wait for them, by id.
    ended
        The states of those that have ended.
    """

    def __init__(self, jobs: Iterable[Gang]) -> None:
        self._jobs = list(jobs)
        self.followers: dict[str, Gang] = {}
        self._look_at_all()

    def _look_at_all(self) -> None:
        self._left = {job.id for job in self._jobs if not job.over}
        self.ended = {job.state for job in self._jobs if job.over}

    @property
    def over(self) -> bool:
        """True if all of them have ended."""
        return not self._left

    def look_at(self, job: Gang) -> None:
        """Note that ``job``, one of them, is over."""
        self._left.discard(job.id)
        self.ended.add(job.state)
        if not self._left:
            self._look_at_all()  # one that had ended may have been started again


class Starts:
    """The jobs with conditions of their start that are not fulfilled yet.

    Parameters
    ----------
    state
        The facts that all parts of the core share.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        #: The moments that jobs wait for, the first one first.
        self._moments: list[tuple[float, int, Gang]] = []
        #: The jobs and arrays whose end others wait for, by id.
        self._followed: dict[str, Followed] = {}
        #: The jobs of each array, in order.
        self._arrays: dict[str, list[Gang]] = {}

    def add(self, job: Gang, now: float) -> None:
        """Have ``job``, which has been submitted, wait for the conditions of its start."""
        if (begin_unix_s := job.conditions.begin_unix_s) > 0.0:
            heapq.heappush(self._moments, (begin_unix_s, job.number, job))
            self.expire(now)
        for name in dict.fromkeys(map(followed, job.conditions.after)):
            if name not in self._followed:
                found = self._state.jobs.get(name)
                self._followed[name] = Followed(self._arrays[name] if found is None else [found])
            self._followed[name].followers[job.id] = job
            self._conclude(name, None, now)
        if job.spec.array:
            self._arrays.setdefault(job.spec.array, []).append(job)

    def knows(self, name: str) -> bool:
        """Return True if there is a job or an array of that id."""
        return name in self._state.jobs or name in self._arrays

    def look_at(self, job: Gang, now: float) -> None:
        """If ``job`` is over, start or cancel the jobs that wait for its end, or for its array's."""
        for name in (job.id, job.spec.array):
            if name in self._followed and job.over:
                self._followed[name].look_at(job)
                self._conclude(name, job, now)

    def _conclude(self, name: str, job: Gang | None, now: float) -> None:
        """Start or cancel the jobs that wait for ``name``, of which ``job`` has ended now, if that is due."""
        found = self._followed[name]
        for follower in list(found.followers.values()):
            if follower.state.ended or self._follow(follower, name, job, now):
                del found.followers[follower.id]
        if not found.followers:
            del self._followed[name]

    def _follow(self, follower: Gang, name: str, job: Gang | None, now: float) -> bool:
        """Note for ``follower`` how ``name`` has ended. Return True if it does not wait for that any more.

        It is cancelled if that is not, or can no longer become, the end that it waits for.
        """
        found, waits = self._followed[name], False
        is_array = name not in self._state.jobs
        for dependency in follower.conditions.after:
            if followed(dependency) != name:
                continue
            allowed = fulfilled(dependency, found.ended, over=found.over)
            told = described(dependency, array=is_array)
            if allowed is None:
                waits = True
                if JobState.FAILED in found.ended:
                    follower.conditions.failed(dependency)
            elif allowed:
                follower.conditions.fulfil(dependency)
                follower.history.append((now, told))
            else:
                reason = f"it was to start once {told} (--after), {self._otherwise(name, job)}"
                self._state.order(Notice("dependency_failed", follower.id, {"reason": reason}))
                job_steps.end(self._state, follower, Trigger.CANCEL, reason, now)
                return True
        self._may_start(follower, now)
        return not waits

    def _otherwise(self, name: str, job: Gang | None) -> str:
        """Return how ``name`` has ended otherwise than a follower wants. ``job`` of it has ended last."""
        one = self._state.jobs.get(name)
        if one is not None:
            return f"which {_told(one)}"
        if job is None or job.state is JobState.SUCCEEDED:
            ended = [job for job in self._arrays[name] if job.over]
            job = next((one for one in ended if one.state is not JobState.SUCCEEDED), None)
        return "and none has" if job is None else f"and {job.id} {_told(job)}"

    def expire(self, now: float) -> None:
        """Let the jobs start whose moment has come."""
        while self._moments and self._due_s() <= now:
            job = heapq.heappop(self._moments)[2]
            if not job.state.ended:
                job.conditions.come()
                job.history.append((now, "its time has come"))
                self._may_start(job, now)

    def _may_start(self, job: Gang, now: float) -> None:
        if not job.conditions.unmet:
            job.book(now)
            self._state.touch(job)
            self._state.reconcile_later(job)

    def due_s(self) -> float:
        """Return when the next moment comes that a job waits for; infinite if there is none."""
        while self._moments and self._moments[0][2].state.ended:
            heapq.heappop(self._moments)
        return self._due_s() if self._moments else inf

    def _due_s(self) -> float:
        return self._state.wall.moment(self._moments[0][0])


def _told(job: Gang) -> str:
    """Return how ``job`` has ended, in words."""
    return _ENDED[job.state] + (f": {job.verdict.reason}" if job.verdict.reason else "")
