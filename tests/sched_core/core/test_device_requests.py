"""Pauses, drains and reservations of devices: what is there leaves at a boundary and comes back."""

from __future__ import annotations

from typing import Any

import pytest

from gpuslice.errors import UsageError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.rank import RankPhase
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Clocked,
    Drained,
    Held,
    Moved,
    Paused,
    Released,
    Reserved,
    Submitted,
    Undrained,
    Unpaused,
    Unreserved,
)
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policy import Plan, Start
from gpuslice.wire import Resume, Suspend, Suspended

from ..driver import PROGRAM, Driver, Scripted, notices, picture, refused, told

#: Unix time minus the core's time.
EPOCH_S = 1_700_000_000.0


class Box(Driver):
    """Two devices under a policy that starts jobs in order, and short words for requests about devices."""

    def __init__(self, device_count: int = 2, policy: str = "fjf", nodes: tuple[str, ...] = ("",)) -> None:
        super().__init__(device_count, make_policy(policy), nodes)

    @property
    def unix_s(self) -> float:
        return self.now_s + EPOCH_S

    def pause(self, *devices: int, for_s: float | None = None) -> Any:
        until_s = None if for_s is None else self.unix_s + for_s
        return self.do(Paused(_names(*devices), self.unix_s, until_s))

    def reserve(
        self, *devices: int, begin_s: float, end_s: float, tenant: str = "u", name: str = "r1"
    ) -> Any:
        now_s = self.unix_s
        event = Reserved(name, _names(*devices), now_s, now_s + begin_s, now_s + end_s, tenant)
        return self.do(event)

    def running(self, job: str, tenant: str = "", ranks: int = 1, **fields: Any) -> None:
        """Submit ``job`` and have it train wherever it has got devices."""
        spec = JobSpec(id=job, submit_s=self.now_s, tenant=tenant, devices=ranks, **fields)
        self.do(Submitted(spec, PROGRAM))
        self.greets(job)

    def greets(self, job: str) -> None:
        """Have the ranks of ``job`` say Hello if it was started, and go on as ``comes`` says."""
        if self.core.jobs[job].command.launched:
            self.hello(job)
            self.comes(job)

    def comes(self, job: str) -> None:
        """Have ``job`` come to the devices that it was given, and train, if it was given some."""
        for rank in self.core.jobs[job].ranks if self.core.jobs[job].lease else ():
            if rank.phase is RankPhase.COMING:
                self.resumed(job, rank.number)
            if rank.phase is RankPhase.ON:
                self.progress(job, rank.boundary + 3, rank.number)

    def parks(self, job: str) -> list[Any]:
        found = self.core.jobs[job]
        return [
            command
            for rank in range(len(found.ranks))
            for command in self.parked(job, found.asked.stop_at, rank)
        ]

    def lease(self, job: str) -> tuple[int, ...]:
        return self.core.jobs[job].lease


def _names(*devices: int) -> tuple[str, ...]:
    return tuple(f"null:{device}" for device in devices)


# Pauses.


def test_what_is_on_a_paused_device_parks_at_its_boundary_and_comes_back_by_itself() -> None:
    box = Box(1)
    box.running("a")
    commands = box.pause(0, for_s=60.0)
    assert [(job, rank) for job, rank, _ in told(commands, Suspend)] == [("a", 0)]
    assert box.lease("a") == (0,)  # until the boundary
    box.parks("a")
    assert box.state("a") is JobState.SUSPENDED
    box.running("b")
    assert not box.lease("b")
    commands = box.wake(60.0)
    assert "pause_ended" in [notice.what for notice in notices(commands)]
    assert [job for job, _, _ in told(commands, Resume)] == ["a"]


def test_a_job_leaves_a_paused_device_for_a_free_one_and_a_gang_leaves_as_a_whole() -> None:
    box = Box(3)
    box.running("a")
    box.running("g", ranks=2)
    assert box.lease("g") == (1, 2)
    commands = box.pause(2)
    assert [(job, rank) for job, rank, _ in told(commands, Suspend)] == [("g", 0), ("g", 1)]
    box.parks("g")
    assert box.core.jobs["g"].shut_out is False  # it could have 0 and 1
    box.pause(0)
    assert box.core.jobs["g"].shut_out
    box.parks("a")
    assert box.lease("a") == (1,)
    box.do(Unpaused(_names(0, 2)))
    assert box.lease("g") == (0, 2)


def test_a_state_that_can_be_only_there_waits_and_is_not_replaced() -> None:
    box = Box(2)
    box.running("a")
    box.pause(0)
    gang = box.core.jobs["a"]
    message = {"epoch": gang.epoch, "boundary": gang.asked.stop_at, "step": 4, "nbytes": 8, "stages_s": {}}
    box.say("a", Suspended(**message, bound="a foreign pointer"))
    assert gang.shut_out
    assert not gang.lease
    box.running("b")
    assert box.lease("b") == (1,)
    box.do(Unpaused(_names(0)))
    assert box.lease("a") == (0,)


def test_a_job_that_its_rank_keeps_from_leaving_is_told_again_and_not_given_the_device_anew() -> None:
    box = Box(1)
    box.running("a")
    box.pause(0)
    gang = box.core.jobs["a"]
    for _ in range(7):
        box.say("a", refused(gang.epoch, 9, running=True))
        commands = box.wake(gang.refusals.suspend.until_s - box.now_s + 0.01)
        assert [job for job, _, _ in told(commands, Suspend)] == ["a"]
    assert not box.core.ledger.holders(0)


def test_a_pause_is_of_whole_requests_and_known_devices() -> None:
    box = Box(2)
    with pytest.raises(UsageError, match="there is no device 'null:7' here"):
        box.pause(0, 7)
    assert not box.core.state.closed.any
    box.pause(0)
    with pytest.raises(UsageError, match="null:1 is not paused"):
        box.do(Unpaused(_names(0, 1)))
    assert box.core.state.closed.paused


def test_a_job_that_fits_the_whole_cluster_is_accepted_while_devices_are_paused() -> None:
    box = Box(2)
    box.pause(1)
    box.running("g", ranks=2)
    assert box.core.jobs["g"].shut_out
    box.running("a")
    assert box.lease("a") == (0,)
    box.do(Held("a"))
    box.parks("a")
    box.do(Unpaused(_names(1)))
    box.greets("g")
    assert box.lease("g") == (0, 1)


def test_a_job_is_not_moved_to_a_paused_device() -> None:
    box = Box(2)
    box.running("a")
    box.pause(1, for_s=3600.0)
    with pytest.raises(UsageError, match="null:1 is paused until "):
        box.do(Moved("a", _names(1)))
    box.do(Unpaused(_names(1)))
    box.do(Moved("a", _names(1)))


def test_a_trial_does_not_borrow_a_paused_device() -> None:
    box = Box(2)
    box.pause(0)
    box.running("t", trial_batches=2)
    assert box.lease("t") == (1,)


def test_the_time_may_have_passed_while_no_scheduler_was_there() -> None:
    box = Box(1)
    box.pause(0, for_s=3600.0)
    box.running("a")
    box.do(Clocked(box.unix_s + 3000.0))
    assert not box.lease("a")
    box.do(Clocked(box.unix_s + 3600.0))
    box.greets("a")
    assert box.lease("a") == (0,)


# Drains.


def test_a_job_that_has_begun_goes_on_there_and_comes_back_there_and_no_other_begins() -> None:
    box = Box(1)
    box.running("a")
    box.do(Drained(_names(0)))
    assert box.state("a") is JobState.RUNNING
    box.running("b")
    box.do(Held("a"))
    box.parks("a")
    assert not box.lease("b")
    box.do(Released("a"))
    assert box.lease("a") == (0,)
    box.do(Undrained(_names(0)))
    assert box.lease("b") == ()


def test_a_job_that_has_begun_elsewhere_does_not_come_to_a_drained_device() -> None:
    box = Box(2, policy="rr")
    box.running("a")
    box.running("b")
    box.do(Drained(_names(1)))
    box.running("c")
    for _ in range(12):
        box.wake(60.0)
        for job in "abc":
            gang = box.core.jobs[job]
            if gang.state is JobState.SUSPENDING:
                box.parks(job)
            box.comes(job)
            assert gang.lease in ((), (1,) if job == "b" else (0,))
    assert all(box.core.jobs[job].service_at(box.now_s) > 60.0 for job in "abc")


# Reservations.


def test_a_device_is_for_one_tenant_from_begin_to_end() -> None:
    box = Box(1)
    box.running("a")
    box.reserve(0, begin_s=10.0, end_s=20.0)
    box.running("u1", tenant="u")
    assert box.lease("a") == (0,)
    commands = box.wake(10.0)
    assert [notice.what for notice in notices(commands)] == ["reservation_began"]
    assert [job for job, _, _ in told(commands, Suspend)] == ["a"]
    box.parks("a")
    assert box.lease("u1") == (0,)
    box.wake(10.0)
    assert not box.core.jobs["a"].shut_out
    assert box.lease("u1") == (0,)  # as the policy decides: fjf takes from nobody


@pytest.mark.parametrize(
    "policy", ["fifo", "fjf", "rr", "las", "2das", "yarn-cs", "drf", "optimus", "gandiva"]
)
def test_under_every_policy_a_job_has_only_the_devices_that_are_open_to_it(policy: str) -> None:
    box = Box(2, policy=policy)
    box.reserve(0, begin_s=0.0, end_s=1e6)
    for job, tenant in {"a": "", "u1": "u", "b": "", "u2": "u"}.items():
        box.running(job, tenant, steps=100)
    for _ in range(8):
        for job in box.core.jobs.values():
            if job.state is JobState.SUSPENDING:
                box.parks(job.id)
            box.comes(job.id)
            assert job.spec.tenant or job.lease in ((), (1,))
        box.wake(60.0)
    assert len({device for job in box.core.jobs.values() for device in job.lease}) == 2


def test_two_tenants_do_not_reserve_one_device_at_one_time() -> None:
    box = Box(2)
    box.reserve(0, 1, begin_s=100.0, end_s=200.0)
    with pytest.raises(UsageError, match=r"null:1 is reserved for u from .* \(r1\)"):
        box.reserve(1, begin_s=150.0, end_s=250.0, tenant="v", name="r2")
    box.reserve(1, begin_s=200.0, end_s=250.0, tenant="v", name="r2")
    box.reserve(0, begin_s=150.0, end_s=250.0, name="r3")  # it is the same tenant
    with pytest.raises(UsageError, match="there is no reservation 'r9'"):
        box.do(Unreserved("r9"))
    box.do(Unreserved("r1"))
    assert [one.name for one in box.core.state.closed.reservations] == ["r3", "r2"]


def test_another_scheduler_knows_what_is_closed() -> None:
    box = Box(3)
    box.running("a")
    box.pause(0, for_s=30.0)
    box.parks("a")
    box.do(Drained(_names(1)))
    box.reserve(2, begin_s=5.0, end_s=50.0)
    box.wake(5.0)
    other = box.replayed(make_policy("fjf"))
    assert picture(other) == picture(box.core)
    assert dict(other.state.closed.paused) == dict(box.core.state.closed.paused)
    assert other.state.closed.present == box.core.state.closed.present


def test_a_policy_that_does_not_look_at_what_is_closed_is_put_right() -> None:
    driver = Driver(2, policy := Scripted())
    driver.do(Reserved("r1", _names(0), EPOCH_S, EPOCH_S, EPOCH_S + 100.0, "u"))
    policy.next = lambda view: Plan([Start("a", (0,))])
    driver.submit("a")
    driver.hello("a")
    assert driver.core.jobs["a"].lease == (1,)
