"""Waiting for one's share under a live scheduler, by the same definition as in the simulator."""

from __future__ import annotations

from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.wait_reasons import Delays
from gpuslice.sched_core.lifecycle.events import Event, Limited, Submitted
from gpuslice.sched_core.policies.yarn_capacity import YarnCapacity

from ..driver import PROGRAM, Driver, notices


def waiting_for_its_share(policy: YarnCapacity, *before: Event) -> Driver:
    """Of tenant a, who may have two of four devices, one job holds two, and one waits for 5 s."""
    driver = Driver(4, policy)
    for event in before:
        driver.do(event)
    for name in ("held", "waits"):
        driver.do(Submitted(JobSpec(id=name, submit_s=driver.now_s, devices=2, tenant="a"), PROGRAM))
        driver.hello(name)
    driver.wake(5.0)
    return driver


def test_a_tenant_that_has_used_up_its_share_does_not_wait_for_a_place() -> None:
    driver = waiting_for_its_share(YarnCapacity(capacities="a:1,b:1", elastic=False))
    job = driver.core.jobs["waits"]
    assert job.without_devices_at(driver.now_s) == 5.0
    assert driver.core.allocation.waits.delays(job, driver.now_s) == Delays(5.0, 0.0)


class Broken(YarnCapacity):
    """Cannot say whose share is used up."""

    def over_share(self, tenant: str, demand: int) -> bool:
        raise RuntimeError("no books")


def test_a_policy_that_fails_to_say_so_is_reported_and_does_not_end_the_scheduler() -> None:
    driver = Driver(4, Broken())
    commands = driver.do(Submitted(JobSpec(id="a", submit_s=driver.now_s), PROGRAM))
    commands += driver.hello("a")
    said = [notice for notice in notices(commands) if notice.what == "policy_failed"]
    assert len(said) == 1
    assert "no books" in str(said[0].details["error"])
    assert driver.core.jobs["a"].running


def test_a_policy_that_has_yet_to_see_the_cluster_is_not_given_up() -> None:
    driver = waiting_for_its_share(YarnCapacity(capacities="a:1,b:1", elastic=False), Limited(4))
    assert driver.core.allocation.waits.delays(driver.core.jobs["waits"], driver.now_s).fair_share_s == 5.0
