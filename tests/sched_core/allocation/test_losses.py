"""Losses from the ranks' heartbeats to the policies that look at them."""

from __future__ import annotations

import pytest

from gpuslice import wire
from gpuslice.errors import RemoteProtocolError
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policy import Plan, View

from ..driver import Driver, Scripted, picture


def say(driver: Driver, job: str, step: int, loss: float | None, rank: int = 0) -> None:
    epoch = driver.core.jobs[job].epoch
    driver.say(job, wire.Progress(epoch=epoch, boundary=step, step=step, loss=loss), rank)


class Looking(Scripted):
    """Notes what it sees of losses; starts jobs of one rank, or nobody."""

    def __init__(self, *, starts: bool = True) -> None:
        super().__init__()
        self.starts = starts
        self.seen: dict[str, float | None] = {}

    def plan(self, view: View) -> Plan:
        self.seen = {name: view.loss(job) for name, job in view.jobs.items()}
        return super().plan(view) if self.starts else Plan()


def test_a_policy_sees_the_newest_loss() -> None:
    policy = Looking()
    driver = Driver(1, policy)
    driver.running_pair()
    assert policy.seen == {"a": None, "b": None}
    say(driver, "a", 11, 2.5)
    say(driver, "a", 12, 0.5)
    driver.submit("c")
    driver.hello("c")
    assert policy.seen == {"a": 0.5, "b": None, "c": None}


def test_of_a_gang_the_first_rank_that_reports_any_counts() -> None:
    policy = Looking(starts=False)
    driver = Driver(2, policy)
    driver.submit("g", 2)
    driver.hello("g")
    job = driver.core.jobs["g"]
    job.ranks[1].loss = 3.0
    driver.wake()
    driver.submit("h")
    driver.hello("h")
    assert policy.seen["g"] == 3.0
    job.ranks[0].loss = 1.0
    driver.submit("i")
    driver.hello("i")
    assert policy.seen["g"] == 1.0


def test_slaq_gives_the_device_to_the_job_whose_loss_falls() -> None:
    """One has learnt nearly all it can within 20 minutes, the loss of the other still falls."""
    driver = Driver(1, make_policy("slaq", {"interval_s": 100.0}))
    for name in ("flat", "falls"):
        driver.submit(name)
        driver.hello(name)
    running: list[str] = []
    for _ in range(20):
        (name,) = [job.id for job in driver.core.jobs.values() if job.running]
        running.append(name)
        job = driver.core.jobs[name]
        if job.state.value in ("starting", "resuming"):
            driver.resumed(name)
        say(driver, name, job.ranks[0].step + 1, None)
        driver.now_s += 100.0
        per_s = 0.0002 if name == "falls" else 0.02
        say(driver, name, job.ranks[0].step + 10, 1.0 / (per_s * job.executed_at(driver.now_s) + 1.0))
        driver.wake(0.0)
        for other in driver.core.jobs.values():
            if other.state.value == "suspending":
                driver.parked(other.id, other.ranks[0].boundary + 1)
    assert running[-10:].count("falls") >= 8, running


def test_replay_gives_the_same_core() -> None:
    driver = Driver(1, make_policy("optimus", {"interval_s": 5.0}))
    driver.running_pair()
    for step in range(11, 30):
        say(driver, "a", step, 10.0 / step)
        driver.wake(1.0)
    twin = driver.replayed(make_policy("optimus", {"interval_s": 5.0}))
    assert picture(twin) == picture(driver.core)
    assert twin.jobs["a"].ranks[0].loss == 10.0 / 29


@pytest.mark.parametrize(
    "loss", [b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00"]
)
def test_a_loss_that_is_no_number_does_not_pass_the_door(loss: bytes) -> None:
    """Nan and infinity, in msgpack."""
    frame = wire.encode(wire.Progress(epoch=1, boundary=1, step=1, loss=0.5))
    half = b"\xcb\x3f\xe0\x00\x00\x00\x00\x00\x00"
    assert half in frame
    with pytest.raises(RemoteProtocolError):
        wire.decode_from_agent(frame.replace(half, loss))


def test_a_heartbeat_without_a_loss_is_what_it_was() -> None:
    assert b"loss" not in wire.encode(wire.Progress(epoch=1, boundary=1, step=1))
