"""The skew of a job: as its owner stated it, else measured after its first steps; it decides on placement."""

from __future__ import annotations

import pytest

from gpuslice import wire
from gpuslice.sched_core.cluster import Cluster, FreeDevices
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.lifecycle.events import Submitted
from gpuslice.sched_core.placement.nodes import SkewAware

from .driver import PROGRAM, Driver


def profiled(driver: Driver, job: str, largest_bytes: int, nbytes: int = 1000) -> None:
    epoch = driver.core.jobs[job].epoch
    message = wire.Profiled(epoch=epoch, tensors=4, nbytes=nbytes, largest_bytes=largest_bytes)
    assert driver.say(job, message) == []


def running(skew: float | None) -> Driver:
    driver = Driver()
    driver.do(Submitted(JobSpec(id="a", submit_s=0.0, skew=skew), PROGRAM))
    driver.hello("a")
    driver.resumed("a")
    return driver


def test_what_a_rank_measured_becomes_the_job_s_skew() -> None:
    driver = running(None)
    job = driver.core.jobs["a"]
    assert job.skew is None
    assert SkewAware().kind(job) == ""
    profiled(driver, "a", 800)
    assert job.skew == pytest.approx(0.8)
    assert SkewAware().kind(job) == "skewed"
    profiled(driver, "a", 100)
    assert SkewAware().kind(job) == "", "the next attempt may train another model"


def test_a_skewed_job_is_consolidated() -> None:
    driver = running(None)
    job = driver.core.jobs["a"]
    job.demand = 2
    free = FreeDevices(Cluster([2, 2]), (1, 3))
    assert SkewAware().choose(job, free) == (1, 3)
    profiled(driver, "a", 800)
    assert SkewAware().choose(job, free) is None, "it waits for a node of its own"


def test_what_its_owner_stated_stands() -> None:
    driver = running(0.05)
    profiled(driver, "a", 800)
    assert driver.core.jobs["a"].skew == 0.05


def test_what_makes_no_sense_changes_nothing() -> None:
    driver = running(None)
    profiled(driver, "a", 0, nbytes=0)
    assert driver.core.jobs["a"].skew is None
    profiled(driver, "a", 2000)
    assert driver.core.jobs["a"].skew == 1.0
