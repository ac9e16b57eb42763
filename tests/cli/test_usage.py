"""The time that jobs and users had devices, read from a journal."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpuslice.cli import usage
from gpuslice.daemon.scheduler_setup import Setup
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.journal.journal import Journal
from gpuslice.sched_core.lifecycle.events import Exited, RankGone, Submitted
from gpuslice.types import DeviceName

from ..sched_core.driver import PROGRAM, Driver

UNIX_S = 1e9


def journal(path: Path) -> None:
    """Jobs a and b of user t on two devices: a fails after an hour, b goes on; c of nobody waits."""
    setup = Setup((DeviceName("null", 0), DeviceName("null", 1)), options={"quantum_s": "1"})
    driver = Driver(2)
    driver.core = setup.make_core()
    driver.job_history = type(driver.job_history)(driver.core)
    for job, tenant in (("a", "t"), ("b", "t"), ("c", "")):
        driver.do(Submitted(JobSpec(id=job, submit_s=driver.now_s, tenant=tenant), PROGRAM))
    for job in "ab":
        driver.hello(job)
        driver.resumed(job)
        driver.progress(job, 1)
    driver.now_s += 3600.0
    driver.do(RankGone("a", 0))
    driver.do(Exited("a", 3))
    driver.now_s += 1800.0
    driver.progress("b", 9)
    now_s = [0.0]
    with Journal(path, unix_s=lambda: UNIX_S + now_s[0]) as written:
        written.introduce(msgspec.json.encode(setup))
        for event, at_s in driver.journal:
            now_s[0] = at_s
            written.append(event, at_s, quiet=False)


def test_device_hours_are_those_of_leases_after_the_moment(tmp_path: Path) -> None:
    journal(tmp_path / "j")
    found = {one.id: one for one in usage.read(tmp_path / "j")}
    hours = {name: one.device_hours for name, one in found.items()}
    assert hours == pytest.approx({"a": 1.0, "b": 1.5, "c": 0.0})
    assert (found["a"].state, found["a"].exit_code, found["a"].failure) == ("failed", 3, "user")
    assert found["a"].ended_unix_s == pytest.approx(UNIX_S + 3600.25)
    assert found["b"].ended_unix_s is None
    recent = usage.read(tmp_path / "j", UNIX_S + 1800.25, now_s=7200.25)
    assert {one.id: one.device_hours for one in recent} == pytest.approx({"a": 0.5, "b": 1.5, "c": 0.0})
    assert [one.id for one in usage.read(tmp_path / "j", UNIX_S + 4000.0)] == ["b", "c"]


def test_users_have_the_sums_of_their_jobs(tmp_path: Path) -> None:
    journal(tmp_path / "j")
    first, second = usage.by_user(usage.read(tmp_path / "j"))
    assert (first.tenant, first.jobs, first.failed, first.succeeded) == ("t", 2, 1, 0)
    assert first.device_hours == pytest.approx(2.5)
    assert (second.tenant, second.device_hours) == ("", 0.0)
