"""The numbers for Prometheus: what they count, also when the past is replayed."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpuslice import wire
from gpuslice.daemon import metrics
from gpuslice.daemon.node_reports import Reading
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.lifecycle.events import (
    Cancelled,
    Exited,
    Noted,
    RankGone,
    Requeued,
    SettingsChanged,
    Submitted,
)
from gpuslice.sched_core.live.job_history import JobHistory
from gpuslice.sched_core.live.wait_notes import WaitNotes
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policies.rr import RoundRobin

from ...patience import PATIENCE_S
from ...sched_core.driver import PROGRAM, QUANTUM_S, Driver, devices, notices

OUT = {"copy_out_s": 0.25, "free_s": 0.05}
IN = {"parked_s": 7.0, "copy_in_s": 0.2}


def counted(driver: Driver) -> metrics.Metrics:
    """What is counted when the driver's events are replayed."""
    core = Core(devices(len(driver.core.devices)), RoundRobin(quantum_s=QUANTUM_S))
    job_history = JobHistory(core)
    found = metrics.Metrics(core, job_history, "rr")
    for event, now in driver.journal:
        commands = core.handle(event, now)
        found.note(event, now, job_history.note(event, now, commands))
    return found


def value(found: metrics.Metrics, name: str, labels: Mapping[str, str] | None = None) -> float | None:
    return found.registry.get_sample_value(name, dict(labels or {}))


def story() -> Driver:
    """Job a was suspended for b and is back; b was given up."""
    driver = Driver()
    driver.running_pair()
    driver.wake()
    epoch = driver.core.jobs["a"].epoch
    message = wire.Suspended(epoch=epoch, boundary=11, step=11, nbytes=100, stages_s=OUT)
    driver.say("a", message)
    driver.resumed("b")
    driver.say("a", message)
    driver.progress("b", 5)
    driver.wake()
    driver.parked("b", 6)
    epoch = driver.core.jobs["a"].epoch
    driver.say("a", wire.Resumed(epoch=epoch, boundary=11, stages_s=IN))
    driver.progress("a", 20)
    driver.do(Cancelled("b", "enough"))
    return driver


def test_what_happened_is_counted_once() -> None:
    found = counted(story())
    assert value(found, "gpuslice_jobs_submitted_total") == 2
    assert value(found, "gpuslice_jobs_ended_total", {"state": "cancelled"}) == 1
    assert value(found, "gpuslice_queue_jobs", {"state": "running"}) == 1
    assert value(found, "gpuslice_queue_jobs", {"state": "cancelled"}) == 1
    assert value(found, "gpuslice_queue_jobs", {"state": "queued"}) == 0
    assert value(found, "gpuslice_device_jobs", {"device": "null:0"}) == 1
    assert value(found, "gpuslice_switches_total") == 1
    assert value(found, "gpuslice_switch_blackout_seconds_sum") == pytest.approx(0.5)
    assert value(found, "gpuslice_snapshot_bytes_total", {"direction": "out"}) == 108
    assert value(found, "gpuslice_suspend_duration_seconds_count", {"stage": "copy_out"}) == 1
    assert value(found, "gpuslice_resume_duration_seconds_sum", {"stage": "parked"}) == 7.0


def test_jobs_have_their_own_numbers_until_they_end() -> None:
    driver = story()
    found = counted(driver)
    assert value(found, "gpuslice_job_progress_steps_total", {"job": "a"}) == 20
    service_s = value(found, "gpuslice_job_attained_service_seconds_total", {"job": "a"})
    assert service_s == pytest.approx(driver.core.jobs["a"].service_at(driver.now_s))
    assert value(found, "gpuslice_job_progress_steps_total", {"job": "b"}) is None


def test_users_have_jobs_by_state_and_device_time_that_no_restart_counts_twice() -> None:
    driver = Driver(2)
    for job, tenant in (("a", "ann"), ("b", "bob"), ("c", "bob")):
        driver.do(Submitted(JobSpec(id=job, submit_s=driver.now_s, tenant=tenant), PROGRAM))
    for job in "ab":
        driver.hello(job)
        driver.resumed(job)
        driver.progress(job, 3)
    driver.now_s += 2.0
    for job in "ac":
        driver.do(Cancelled(job, "enough"))
    driver.do(RankGone("a", 0, pid=1))
    driver.do(Exited("a", -15))
    driver.do(Requeued("a"))
    driver.do(Cancelled("a", "enough"))
    driver.progress("b", 4)
    found = counted(driver)
    for user, state, count in (("ann", "cancelled", 1), ("bob", "running", 1), ("bob", "cancelled", 1)):
        assert value(found, "gpuslice_user_jobs", {"user": user, "state": state}) == count
    for user, job in (("ann", "a"), ("bob", "b")):
        service_s = value(found, "gpuslice_user_service_seconds_total", {"user": user})
        assert service_s == pytest.approx(driver.core.jobs[job].service_at(driver.now_s))
        assert service_s == pytest.approx(2.0)


def test_jobs_that_wait_are_counted_by_the_case_of_why() -> None:
    driver = Driver()
    driver.running_pair()
    driver.do(Submitted(JobSpec(id="c", submit_s=driver.now_s, tenant="bob", hold=True), PROGRAM))
    found = metrics.Metrics(driver.core, driver.job_history, "rr")

    def reason(user: str, case: str) -> float | None:
        return value(found, "gpuslice_waiting_jobs", {"user": user, "reason": case})

    notes = WaitNotes(driver.core, lambda: driver.now_s, lambda note: None, found.waiting)
    notes.look()
    assert (reason("", "taken"), reason("bob", "held")) == (1, 1)
    driver.do(Cancelled("c", "enough"))
    driver.now_s += 100.0
    notes.look()
    assert (reason("", "taken"), reason("bob", "held")) == (1, 0)


def test_many_users_are_counted_together() -> None:
    driver = Driver()
    for number in range(metrics._MOST_USERS + 3):
        driver.do(Submitted(JobSpec(id=f"j{number}", submit_s=0.0, tenant=f"t{number}", hold=True), PROGRAM))
    found = counted(driver)
    assert value(found, "gpuslice_user_jobs", {"user": "others", "state": "queued"}) == 3


def test_states_add_up() -> None:
    found = counted(story())
    (family,) = [one for one in found.registry.collect() if one.name == "gpuslice_queue_jobs"]
    assert sum(sample.value for sample in family.samples) == 2


def test_they_are_served_on_this_machine_only() -> None:
    with metrics.served(counted(story()), 0) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
        with (
            pytest.raises(EnvironmentUnusableError, match="cannot serve metrics"),
            metrics.served(counted(story()), port),
        ):
            pass
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {"gpuslice_build_info", "gpuslice_queue_jobs", "gpuslice_job_progress_steps"} <= names
    assert not [name for name in names if name.endswith("_created") or not name.startswith("gpuslice_")]


def test_missed_deadlines_are_counted() -> None:
    driver = Driver()
    for name, deadline_s in (("late", 1.0), ("early", 90.0)):
        spec = JobSpec(id=name, submit_s=driver.now_s, deadlines=((deadline_s, 1.0),))
        driver.do(Submitted(spec, PROGRAM))
    for notice in notices(driver.wake(2.0)):
        driver.do(Noted(notice.what, notice.job, notice.details))
    assert value(counted(driver), "gpuslice_deadlines_missed_total") == 1


def test_what_is_known_of_the_nodes_is_read_when_it_is_asked_for() -> None:
    known = [Reading("here", None, 100, None), Reading("b", 4.0, 7, -1.5)]
    core = Core(devices(1), RoundRobin())
    found = metrics.Metrics(core, JobHistory(core), "rr", lambda: known)
    assert value(found, "gpuslice_node_silent_seconds", {"node": "b"}) == 4.0
    assert value(found, "gpuslice_node_silent_seconds", {"node": "here"}) is None
    assert value(found, "gpuslice_node_ramdisk_free_bytes", {"node": "here"}) == 100
    assert value(found, "gpuslice_node_clock_difference_seconds", {"node": "b"}) == -1.5
    known.pop()
    assert value(found, "gpuslice_node_ramdisk_free_bytes", {"node": "b"}) is None


def test_they_follow_the_settings() -> None:
    driver = Driver(make_policy=make_policy)
    driver.do(SettingsChanged("las", {}, devices=("null:0", "null:4")))
    core = Core(devices(1), RoundRobin(quantum_s=QUANTUM_S), make_policy=make_policy)
    job_history = JobHistory(core)
    found = metrics.Metrics(core, job_history, "rr")
    for event, now in driver.journal:
        found.note(event, now, job_history.note(event, now, core.handle(event, now)))
    version = metrics.__version__
    assert value(found, "gpuslice_build_info", {"version": version, "policy": "las"}) == 1
    assert value(found, "gpuslice_build_info", {"version": version, "policy": "rr"}) is None
    assert value(found, "gpuslice_device_jobs", {"device": "null:4"}) == 0
