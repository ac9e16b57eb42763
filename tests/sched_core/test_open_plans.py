"""Devices that are open to some jobs only, under every policy: none is idle while such a job waits for it."""

from __future__ import annotations

import pytest

from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Drained, Undrained
from gpuslice.sched_core.open_plans import open_plan
from gpuslice.sched_core.policies.registry import POLICIES
from gpuslice.sched_core.policy import Migrate, Plan, Start, Suspend, View

from .core.test_device_requests import Box
from .policies.worlds import view

_POLICIES = [name for name in POLICIES if not name.startswith("published-")]
#: Policies under which all jobs get on together, whatever they need.
_TURNS = ("rr", "las", "2das", "gittins", "gandiva", "themis")


class Many(Box):
    """A box on which jobs of one device train whenever they have one."""

    def sees(self, policy: str) -> None:
        """Check that no job has what is closed to it, and that no device is idle that a job could have."""
        jobs = [job for job in self.core.jobs.values() if not job.state.ended]
        for job in jobs:
            assert job.may_have(job.placement if job.running else ()), policy
        held = {device for job in jobs if job.running for device in job.placement}
        for device in sorted({*range(len(self.core.devices))} - held):
            could = [job.id for job in jobs if not job.running and job.shown and job.may_have((device,))]
            assert not could, (policy, device, could, self.now_s)

    def lives(self, policy: str, times: int, step_s: float = 60.0) -> None:
        for _ in range(times):
            for job in self.core.jobs.values():
                if job.state is JobState.SUSPENDING:
                    self.parks(job.id)
                self.greets(job.id) if not job.lease else self.comes(job.id)
            self.sees(policy)
            self.wake(step_s)


@pytest.mark.parametrize("policy", _POLICIES)
def test_no_device_is_idle_that_a_job_may_have(policy: str) -> None:
    box = Many(3, policy=policy)
    box.reserve(0, begin_s=0.0, end_s=3600.0)
    for job, tenant in {"a": "", "b": "", "c": "", "u1": "u", "d": "", "u2": "u"}.items():
        box.running(job, tenant, steps=100_000)
    box.lives(policy, 12)
    box.do(Drained(("null:1",)))
    box.lives(policy, 6)
    box.do(Undrained(("null:1",)))
    box.lives(policy, 6)
    box.wake(3600.0)
    box.lives(policy, 6)
    assert policy not in _TURNS or all(job.service_at(box.now_s) > 0.0 for job in box.core.jobs.values())


def _view(*jobs: str, closed: tuple[int, ...] = (0,)) -> View:
    """Three devices of one node, of which some are closed to all jobs but those whose name begins with u."""
    made = view("1x3", *((job, 1, 100.0) for job in jobs), now_s=1000.0)
    made.restricted = frozenset(closed)
    for job in made.jobs.values():
        job.closed = frozenset() if job.id.startswith("u") else frozenset(closed)
    return made


def _run(made: View, job: str, device: int, since_s: float = 900.0) -> None:
    made.jobs[job].placement, made.jobs[job].running, made.jobs[job].since_s = (device,), True, since_s


def test_a_job_gets_a_free_device_or_another_one_by_an_exchange() -> None:
    made = _view("a", "u")
    assert open_plan(Plan([Start("a", (0,))]), made).decisions == [Start("a", (1,)), Start("u", (0,))]
    made = _view("a", "b", "u", "c")
    for job, device in {"u": 1, "b": 2}.items():
        _run(made, job, device)
    assert open_plan(Plan([Start("a", (0,))]), made).decisions == [Start("a", (1,)), Migrate("u", (0,))]
    made.can_move = lambda job: False
    assert open_plan(Plan([Start("a", (0,))]), made).decisions == []


def test_a_job_that_has_had_enough_makes_room() -> None:
    made = _view("a", "b", "c", closed=(0,))
    _run(made, "b", 1)
    _run(made, "c", 2)
    assert open_plan(Plan([Start("a", (0,))]), made).decisions == []
    made.jobs["c"].since_s = 100.0
    assert open_plan(Plan([Start("a", (0,))]), made).decisions == [Start("a", (2,)), Suspend("c")]


def test_a_job_stays_where_another_one_cannot_be() -> None:
    made = _view("u", "a", "b", "v")
    for job, device in {"u": 0, "a": 1, "b": 2}.items():
        _run(made, job, device)
    plan = Plan([Suspend("u"), Start("v", (0,))])
    assert open_plan(plan, made) is not plan  # v is no user's
    assert open_plan(plan, made).decisions == []
    assert open_plan(Plan([Suspend("a")], 2.0), made) == Plan([Suspend("a")], 2.0)
