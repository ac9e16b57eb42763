"""Jobs that may not start yet: until a moment, or until other jobs have ended.

A moment is a Unix time. It stays the same when the machine sleeps or is switched off, or its clock is set.
"""

from __future__ import annotations

import heapq
from math import inf

from gpuslice.sched_core.jobs.conditions import allows, described, followed
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
        #: The jobs that wait for the end of another one, by the id of that one.
        self._followers: dict[str, dict[str, Gang]] = {}

    def add(self, job: Gang, now: float) -> None:
        """Have ``job``, which has been submitted, wait for the conditions of its start."""
        if (begin_unix_s := job.conditions.begin_unix_s) > 0.0:
            heapq.heappush(self._moments, (begin_unix_s, job.number, job))
            self.expire(now)
        for name in dict.fromkeys(map(followed, job.conditions.after)):
            self._followers.setdefault(name, {})[job.id] = job
            self.look_at(self._state.jobs[name], now)

    def look_at(self, job: Gang, now: float) -> None:
        """If ``job`` is over, start or cancel the jobs that wait for its end."""
        if job.id in self._followers and job.over:
            for follower in self._followers.pop(job.id).values():
                if not follower.state.ended:
                    self._follow(follower, job, now)

    def _follow(self, follower: Gang, job: Gang, now: float) -> None:
        """Note for ``follower`` that ``job`` is over. Cancel it if that was not the end that it waits for."""
        for dependency in follower.conditions.after:
            if followed(dependency) != job.id:
                continue
            if not allows(dependency, job.state):
                why = f": {job.verdict.reason}" if job.verdict.reason else ""
                reason = (
                    f"it was to start once {described(dependency)} (--after), which {_ENDED[job.state]}{why}"
                )
                self._state.order(Notice("dependency_failed", follower.id, {"reason": reason}))
                job_steps.end(self._state, follower, Trigger.CANCEL, reason, now)
                return
            follower.conditions.fulfil(dependency)
            follower.history.append((now, described(dependency)))
        self._may_start(follower, now)

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
