"""Quotas of tenants, memory of devices, and why jobs wait."""

from __future__ import annotations

import pytest

from gpuslice import wire
from gpuslice.errors import OVER_MEMORY_LIMIT, IllegalTransitionError, UsageError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.jobs.wait_reasons import Delays
from gpuslice.sched_core.lifecycle.events import (
    ArraySubmitted,
    Cancelled,
    Exited,
    Held,
    Point,
    RankGone,
    Released,
    Submitted,
)
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.sched_core.policy import Plan, Start

from .driver import PROGRAM, QUANTUM_S, Driver, Scripted, notices, picture, told


def submit(driver: Driver, job: str, *, tenant: str = "t", ranks: int = 1, memory: int = 0) -> None:
    spec = JobSpec(id=job, submit_s=driver.now_s, tenant=tenant, devices=ranks, device_memory_bytes=memory)
    driver.do(Submitted(spec, PROGRAM))
    for rank in range(ranks):
        hello = wire.Hello(version=1, job=job, rank=rank, world_size=ranks, pid=1)
        for _, number, message in told(driver.say(job, hello, rank), wire.Resume):
            driver.say(job, wire.Resumed(epoch=message.epoch, boundary=0, stages_s={}), number)


def gone(driver: Driver, job: str) -> None:
    driver.do(Exited(job, 0))
    for rank in driver.core.jobs[job].there():
        driver.do(RankGone(job, rank.number))


def waited(driver: Driver, job: str) -> tuple[float, Delays]:
    """How long ``job`` has waited in all, and for which reason."""
    gang = driver.core.jobs[job]
    return gang.without_devices_at(driver.now_s), driver.core.allocation.waits.delays(gang, driver.now_s)


def test_a_tenant_has_no_more_devices_than_its_quota_whatever_is_free() -> None:
    driver = Driver(4, quotas={"t": 2})
    for job in "abc":
        submit(driver, job)
    submit(driver, "other", tenant="u")
    jobs = driver.core.jobs
    assert [bool(jobs[job].lease) for job in ("a", "b", "c", "other")] == [True, True, False, True]
    driver.wake(5.0)
    assert not jobs["c"].lease
    gone(driver, "a")
    assert jobs["c"].lease
    assert waited(driver, "c") == (5.0, Delays(5.0, 0.0)), "there was a device free, but not for this tenant"


def test_nobody_of_a_tenant_overtakes_at_the_quota() -> None:
    driver = Driver(4, quotas={"t": 2})
    submit(driver, "a")
    submit(driver, "pair", ranks=2)
    submit(driver, "small")
    jobs = driver.core.jobs
    assert (jobs["pair"].lease, jobs["small"].lease) == ((), ()), "small would fit"
    driver.do(Cancelled("pair", "enough"))
    assert jobs["small"].lease


def test_a_held_job_gives_its_part_of_the_quota_back_and_queues_for_it_again() -> None:
    driver = Driver(4, quotas={"t": 1})
    submit(driver, "a")
    submit(driver, "b")
    driver.do(Held("a"))
    driver.parked("a", driver.core.jobs["a"].asked.stop_at)
    assert driver.core.jobs["b"].lease
    driver.do(Released("a"))
    assert not driver.core.jobs["a"].lease
    gone(driver, "b")
    assert driver.core.jobs["a"].lease


def hello(driver: Driver, job: str) -> None:
    driver.say(job, wire.Hello(version=1, job=job, rank=0, world_size=1, pid=1))


def test_what_was_submitted_first_is_first_at_the_quota_however_long_it_takes_to_import() -> None:
    driver = Driver(4, quotas={"t": 1})
    for job in "abc":
        driver.do(Submitted(JobSpec(id=job, submit_s=driver.now_s, tenant="t"), PROGRAM))
    jobs = driver.core.jobs
    hello(driver, "b")
    assert not jobs["b"].lease, "a has the quota, though nothing of it is there yet"
    hello(driver, "a")
    assert (jobs["a"].lease, jobs["b"].lease) == ((0,), ())
    gone(driver, "a")
    assert jobs["b"].lease
    gone(driver, "b")
    assert not jobs["c"].lease, "it is let in before it is ready"
    hello(driver, "c")
    assert jobs["c"].lease


def test_a_job_that_ends_before_it_is_ready_gives_its_part_of_the_quota_back() -> None:
    driver = Driver(4, quotas={"t": 1})
    for job in "ab":
        driver.do(Submitted(JobSpec(id=job, submit_s=driver.now_s, tenant="t"), PROGRAM))
    hello(driver, "b")
    driver.do(Exited("a", 1))
    assert driver.core.jobs["b"].lease


def submit_array(driver: Driver, at_once: int, count: int = 4, tenant: str = "", memory: int = 1) -> None:
    spec = JobSpec(id="s", submit_s=driver.now_s, tenant=tenant, at_once=at_once, device_memory_bytes=memory)
    points = tuple(Point(f"s-{n}", ("train", str(n)), {"N": str(n)}) for n in range(count))
    driver.do(ArraySubmitted(spec, PROGRAM, points))
    for number in range(count):
        driver.hello(f"s-{number}")


def leased(driver: Driver) -> list[str]:
    return [name for name, job in driver.core.jobs.items() if job.lease]


def test_an_array_is_submitted_at_once_and_has_no_more_devices_than_its_owner_wants() -> None:
    driver = Driver(4)
    submit_array(driver, 2)
    assert leased(driver) == ["s-0", "s-1"]
    first = driver.core.jobs["s-3"]
    assert (first.program.argv, first.program.environ, first.spec.array) == (("train", "3"), {"N": "3"}, "s")
    gone(driver, "s-0")
    assert leased(driver) == ["s-1", "s-2"]
    driver.do(Held("s-1"))
    driver.resumed("s-2")
    driver.resumed("s-1")
    driver.parked("s-1", driver.core.jobs["s-1"].asked.stop_at)
    assert leased(driver) == ["s-2", "s-3"]
    driver.do(Released("s-1"))
    assert leased(driver) == ["s-2", "s-3"], "s-1 queues again"
    assert picture(driver.core) == picture(driver.replayed(RoundRobin(quantum_s=QUANTUM_S)))


def test_an_array_within_a_quota_keeps_both() -> None:
    driver = Driver(8, quotas={"t": 2})
    submit_array(driver, 3, tenant="t")
    submit(driver, "later")
    assert leased(driver) == ["s-0", "s-1"]
    gone(driver, "s-0")
    assert leased(driver) == ["s-1", "s-2"], "s-2 was inside its array before the other came"
    gone(driver, "s-1")
    assert leased(driver) == ["s-2", "later"], "s-3 came into its array only when s-0 had left it"


def test_of_an_array_with_one_impossible_job_none_is_submitted() -> None:
    driver = Driver(2)
    submit(driver, "s-1")
    with pytest.raises(IllegalTransitionError, match="submitted again"):
        submit_array(driver, 0)
    with pytest.raises(UsageError, match="job s-0 asks for 3 devices of 2"):
        driver.do(
            ArraySubmitted(JobSpec(id="s", submit_s=0.0, devices=3), PROGRAM, (Point("s-0", ("train",)),))
        )
    assert list(driver.core.jobs) == ["s-1"]


def test_a_job_larger_than_its_tenants_quota_is_refused() -> None:
    driver = Driver(4, quotas={"t": 1})
    with pytest.raises(UsageError, match="quota of tenant t is 1"):
        submit(driver, "a", ranks=2)
    submit(driver, "a", ranks=2, tenant="anybody")


def test_waiting_for_others_is_neither_delay_and_scattered_devices_are_fragmentation() -> None:
    policy = Scripted()
    driver = Driver(2, policy)
    submit(driver, "a")
    submit(driver, "b")
    submit(driver, "c")
    driver.wake(3.0)
    assert waited(driver, "c") == (3.0, Delays(0.0, 0.0))
    policy.next = lambda _: Plan()  # it likes none of the devices that are free
    driver.do(Exited("a", 0))
    driver.do(RankGone("a", 0))
    driver.now_s += 4.0
    assert waited(driver, "c") == (7.0, Delays(0.0, 4.0))
    driver.wake(0.0)
    driver.now_s += 100.0
    assert driver.core.jobs["c"].lease
    assert waited(driver, "c") == (7.0, Delays(0.0, 4.0))


def test_a_job_that_needs_more_memory_than_a_device_has_is_refused() -> None:
    driver = Driver(2, device_memory_bytes=100)
    with pytest.raises(UsageError, match="asks for 101 B on each device, which has 100 B"):
        submit(driver, "a", memory=101)
    submit(driver, "a", memory=100)


def test_jobs_are_not_packed_beyond_the_memory_of_a_device() -> None:
    policy = Scripted()
    driver = Driver(1, policy, device_memory_bytes=100)
    for job, memory in (("a", 40), ("b", 60), ("c", 1)):
        policy.next = lambda _: Plan()
        driver.do(Submitted(JobSpec(id=job, submit_s=0.0, device_memory_bytes=memory), PROGRAM))
        policy.next = lambda _: Plan()
        driver.hello(job)
    policy.next = lambda _: Plan([Start(job, (0,), shared=True) for job in "abc"])
    (notice,) = notices(driver.wake())
    assert "101 bytes of its 100" in str(notice.details["error"])
    policy.next = lambda _: Plan([Start(job, (0,), shared=True) for job in "ab"])
    driver.wake()
    for job in "ab":
        driver.resumed(job)
        assert driver.state(job) is JobState.RUNNING


def over_limit(driver: Driver, job: str) -> object:
    """``job`` ends by its limit; in how many seconds it is started again, if it is."""
    driver.do(Exited(job, 1, f"gpuslice: {OVER_MEMORY_LIMIT} of 40 B: it asked for 50 B"))
    (notice,) = notices(driver.do(RankGone(job, 0)))
    assert notice.details["class"] == "resource"
    return notice.details["restart_in_s"]


def test_a_job_over_its_memory_limit_is_started_again_with_more_as_far_as_allowed() -> None:
    driver = Driver(1, device_memory_bytes=100)
    spec = JobSpec(id="a", submit_s=0.0, device_memory_bytes=40, most_device_memory_bytes=100)
    driver.do(Submitted(spec, PROGRAM))
    limits = []
    while driver.state("a") is JobState.QUEUED:
        driver.hello("a")
        driver.resumed("a")
        limits.append(driver.core.jobs["a"].spec.device_memory_bytes)
        if over_limit(driver, "a") is not None:
            driver.wake(100.0)
    assert (limits, driver.state("a")) == ([40, 80, 100], JobState.FAILED)


def test_it_is_not_started_again_with_the_same_limit() -> None:
    driver = Driver(1)
    driver.do(Submitted(JobSpec(id="a", submit_s=0.0, device_memory_bytes=40, max_restarts=3), PROGRAM))
    driver.hello("a")
    driver.resumed("a")
    assert over_limit(driver, "a") is None
    assert driver.state("a") is JobState.FAILED


def test_a_job_that_may_grow_beyond_a_device_is_refused() -> None:
    driver = Driver(1, device_memory_bytes=100)
    with pytest.raises(UsageError, match="asks for 200 B on each device, which has 100 B"):
        driver.do(
            Submitted(
                JobSpec(id="a", submit_s=0.0, device_memory_bytes=40, most_device_memory_bytes=200), PROGRAM
            )
        )
