"""What people ask for in a world: jobs, arrays and requests about jobs and devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from gpuslice.errors import IllegalTransitionError, UsageError
from gpuslice.sched_core.jobs.conditions import followed
from gpuslice.sched_core.lifecycle.events import (
    Adjusted,
    ArraySubmitted,
    Cancelled,
    Clocked,
    Event,
    Held,
    Moved,
    OwnerRequest,
    Point,
    Released,
    Requeued,
    Submitted,
    Weighted,
)

from .scenario import Change, JobPlan, Window, Wish
from .schedulers import PROGRAM
from .windows import UNIX_S, begin_of, end_of

if TYPE_CHECKING:
    from .world import World


class People:
    """Those who use a world. Whatever they want waits for as long as there is no scheduler.

    Parameters
    ----------
    world
        The world.

    Attributes
    ----------
    submitted
        The ids of the jobs that have been accepted.
    """

    def __init__(self, world: World) -> None:
        self._world, self._ground, self._safety = world, world.ground, world.safety
        self.submitted: list[str] = []
        self._held: set[str] = set()
        #: All devices that there ever were.
        self._devices = set(map(str, world.scenario.devices))

    def begin(self) -> None:
        """Put off everything until its time has come."""
        scenario, loop = self._world.scenario, self._ground.loop
        arrays: dict[str, list[JobPlan]] = {}
        for plan in scenario.jobs:
            arrays.setdefault(plan.spec.array or plan.spec.id, []).append(plan)
        for plans in arrays.values():
            loop.at(plans[0].spec.submit_s, self.when_served(lambda plans=plans: self._submit(plans)))
        for wish in scenario.wishes:
            loop.at(wish.when_s, lambda wish=wish: self._ask(wish))
        for number, window in enumerate(scenario.windows):
            close = self.when_served(lambda window=window, number=number: self._close(window, number))
            loop.at(window.when_s, close)
        for change in scenario.changes:
            loop.at(change.when_s, self.when_served(lambda change=change: self._change(change)))

    def when_served(self, act: Callable[[], object]) -> Callable[[], None]:
        """Return ``act``, put off for as long as there is no scheduler."""

        def do() -> None:
            if self._world.serves:
                act()
            else:
                self._ground.loop.after(1.0, do)

        return do

    def submit(self, plan: JobPlan) -> None:
        """Submit a job that waits for no other one."""
        self._submit([plan])

    def _submit(self, plans: Sequence[JobPlan]) -> None:
        """Submit a job, or all jobs of an array."""
        spec = plans[0].spec
        if not {*map(followed, spec.after)} <= {*self.submitted}:
            self._ground.loop.after(1.0, self.when_served(lambda: self._submit(plans)))
            return
        for plan in plans:
            self._safety.add(plan)
        scheduler = self._world.now
        if spec.begin_unix_s:
            scheduler.handle(Clocked(self._ground.loop.now_s + UNIX_S))
        if spec.array:
            points = tuple(Point(plan.spec.id, PROGRAM.argv) for plan in plans)
            whole = msgspec.structs.replace(spec, id=spec.array, array="")
            scheduler.handle(ArraySubmitted(whole, PROGRAM, points))
        else:
            scheduler.handle(Submitted(spec, PROGRAM))
        names = [plan.spec.id for plan in plans]
        self.submitted += names
        if spec.hold:
            self._held.update(names)

    def _ask(self, wish: Wish) -> None:
        if not self._world.serves or wish.job not in self.submitted:
            return
        request: OwnerRequest
        match wish.what:
            case "hold":
                request = Held(wish.job)
            case "release":
                request = Released(wish.job)
            case "move":
                request = Moved(wish.job, wish.devices)
                if not self._world.room_watch.admits(request):
                    return
            case "weigh":
                request = Weighted(wish.job, 2.0)
            case "requeue" | "requeue --fresh":
                request = Requeued(wish.job, wish.what != "requeue")
            case "priority":
                request = Adjusted(wish.job, priority=int(wish.value))
            case "time limit":
                request = Adjusted(wish.job, time_limit_s=wish.value)
            case _:
                request = Cancelled(wish.job, "enough")
        if self._requested(request):
            self._ground.record.note(wish.job, 0, "asked", wish.what)

    def _requested(self, request: OwnerRequest) -> bool:
        """Ask for something; return False if that is impossible now."""
        own_time = self._safety.own_time
        if isinstance(request, Released):
            own_time.release(request.job)
        elif isinstance(request, Cancelled):
            own_time.cancel(request.job)
        elif isinstance(request, Adjusted) and request.time_limit_s:
            own_time.limit(request.job)
        failed = isinstance(request, Requeued) and self._world.now.outcome(request.job).state == "failed"
        state = self._ground.states.of(request.job)
        if isinstance(request, Requeued) and (request.fresh or not failed):
            self._ground.states.forget(request.job)  # before its next attempt begins
        was_requeued = request.job in own_time.requeued
        if isinstance(request, Requeued):
            own_time.requeued.add(request.job)
        try:
            self._world.now.handle(request)
        except (IllegalTransitionError, UsageError):
            self._ground.states.put(state)
            if not was_requeued:
                own_time.requeued.discard(request.job)
            return False
        if isinstance(request, Requeued):
            self._safety.requeue(request.job)
        elif isinstance(request, Held):
            self._held.add(request.job)
        elif isinstance(request, Released):
            self._held.discard(request.job)
        return True

    def _close(self, window: Window, number: int) -> None:
        """Ask for ``window``, unless it would be over by now or another tenant has one of its devices."""
        loop, ends_s = self._ground.loop, window.when_s + window.for_s
        if loop.now_s >= ends_s or not self._asked(begin_of(window, number, loop.now_s)):
            return
        self._ground.record.note("", 0, window.what, (window.devices, ends_s))
        self._safety.closed.begins(window)
        if (end := end_of(window)) is not None:
            loop.at(ends_s, self.when_served(lambda: self._asked(end)))

    def _change(self, change: Change) -> None:
        """Change settings, if that is possible for the jobs that there are."""
        if not self._asked(change.event):
            return
        self._ground.record.note("", 0, "settings changed", change.event)
        if (devices := change.event.devices) is not None:
            self._devices |= {*devices}
            self._safety.closed.removed(tuple(self._devices - {*devices}))

    def _asked(self, event: Event) -> bool:
        """Ask for something about devices, or for other settings. Return False if that is impossible now."""
        try:
            self._world.now.handle(event)
        except UsageError:
            return False
        return True

    def release(self) -> None:
        """Have the owners release their jobs, again as long as that is impossible."""
        for job in sorted(self._held):
            if not self._world.serves:
                break  # the scheduler may have died at the last request
            if self._world.now.outcome(job).ended or self._requested(Released(job)):
                self._held.discard(job)
        if self._held:
            self._ground.loop.after(1.0, self.release)
