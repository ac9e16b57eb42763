"""Elastic policies over the live core go by what is measured: jobs of a known speed on 1, 2, 3 … devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpuslice import wire
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.rank import RankPhase
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Cancelled,
    Event,
    Exited,
    Held,
    Measured,
    RankGone,
    Released,
    Submitted,
)
from gpuslice.sched_core.live.throughput_meter import ThroughputMeter
from gpuslice.sched_core.policies.optimus import Optimus
from gpuslice.sched_core.policies.slaq import Slaq
from gpuslice.sched_core.policies.themis.policy import Themis
from gpuslice.sched_core.policy import Policy

from .driver import PROGRAM, Driver, picture, suspended

#: Steps per second on so many devices.
Speed = Callable[[int], float]
TICK_S = 0.25


def linear(width: int) -> float:
    return 20.0 * width


def flat(width: int) -> float:
    return 20.0


def harmful(width: int) -> float:
    return 20.0 / width


class Cluster(Driver):
    """Four devices, and jobs that make steps at their own speed and obey at once.

    ``per_step`` are the samples of a step on so many devices, of jobs that count them.
    """

    def __init__(self, policy: Policy, per_step: Callable[[int], int] | None = None) -> None:
        super().__init__(4, policy)
        self.meter = ThroughputMeter(self.core)
        self.speeds: dict[str, Speed] = {}
        self.steps: dict[str, float] = {}
        self.samples: dict[str, float] = {}
        self.measured: list[Measured] = []
        self._per_step = per_step

    def do(self, event: Event):  # type: ignore[no-untyped-def]
        commands = super().do(event)
        found = self.meter.note(event, self.now_s)
        if found is not None:
            self.measured.append(found)
            commands += super().do(found)
        return commands

    def add(self, name: str, speed: Speed, least: int = 1, most: int = 4, **more: Any) -> None:
        spec = JobSpec(
            id=name, submit_s=self.now_s, devices=least, least_devices=least, most_devices=most, **more
        )
        self.speeds[name], self.steps[name], self.samples[name] = speed, 0.0, 0.0
        self.do(Submitted(spec, PROGRAM))
        self.hello(name)

    def go(self, seconds: float) -> None:
        """Let time pass: every job trains, and does as it is told."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.wake(TICK_S)
            for name in self.speeds:
                self._train(name)
                self._obey(name)

    def _train(self, name: str) -> None:
        job = self.core.jobs[name]
        if job.state is not JobState.RUNNING:
            return
        made = TICK_S * self.speeds[name](len(job.lease))
        self.steps[name] += made
        if self._per_step is not None:
            self.samples[name] += made * self._per_step(len(job.lease))
        for rank in job.members:
            at, samples = int(self.steps[name]), int(self.samples[name])
            self.say(name, wire.Progress(epoch=job.epoch, boundary=at, step=at, samples=samples), rank.number)

    def _obey(self, name: str) -> None:
        job = self.core.jobs[name]
        if job.state is JobState.SUSPENDING:
            self.steps[name] = max(self.steps[name], job.asked.stop_at)
            for rank in job.present(RankPhase.ON):
                self.say(name, suspended(job.epoch, job.asked.stop_at), rank.number)
        for rank in job.present(RankPhase.COMING):
            self.resumed(name, rank.number)

    def cancel(self, name: str) -> None:
        """End ``name`` for good, and its processes."""
        self.do(Cancelled(name, "enough"))
        for rank in self.core.jobs[name].there():
            self.do(RankGone(name, rank.number))
        self.do(Exited(name, -15))
        del self.speeds[name]

    def widths(self) -> dict[str, int]:
        return {name: len(self.core.jobs[name].lease) for name in self.speeds}


Marginal = pytest.mark.parametrize("make", [Optimus, Slaq])


@Marginal
@pytest.mark.parametrize(("speed", "alone"), [(linear, 4), (flat, 1), (harmful, 1)])
def test_a_job_grows_only_where_it_was_measured_to_gain(
    make: Callable[..., Policy], speed: Speed, alone: int
) -> None:
    """It begins on all devices, as if they added up. With others it has fewer; then it is known."""
    cluster = Cluster(make(interval_s=5.0))
    cluster.add("e", speed)
    cluster.go(6.0)
    assert cluster.widths() == {"e": 4}
    cluster.add("other", flat, least=3, most=3)
    cluster.go(12.0)
    assert cluster.widths()["e"] == 1
    assert {found.devices for found in cluster.measured if found.job == "e"} >= {1, 4}
    cluster.cancel("other")
    cluster.go(12.0)
    assert cluster.widths()["e"] == alone


@Marginal
def test_of_two_jobs_the_one_that_scales_gets_the_devices(make: Callable[..., Policy]) -> None:
    cluster = Cluster(make(interval_s=5.0))
    cluster.add("flat", flat)
    cluster.add("linear", linear)
    cluster.go(60.0)
    assert cluster.widths() == {"flat": 1, "linear": 3}


def test_the_speed_on_one_device_is_the_unit_whatever_it_began_on() -> None:
    cluster = Cluster(Optimus(interval_s=5.0))
    cluster.add("e", flat)
    job = cluster.core.jobs["e"]
    assert job.rate == 4.0, "assumed"
    cluster.go(6.0)
    cluster.add("other", linear, least=3, most=3)
    cluster.go(12.0)
    assert cluster.core.allocation.throughput.speeds(job) == pytest.approx({4: 1.0, 1: 1.0}, rel=0.05)
    assert job.rate == pytest.approx(1.0, rel=0.05)


def test_what_a_kind_of_job_has_shown_is_known_of_the_next() -> None:
    cluster = Cluster(Optimus(interval_s=5.0))
    cluster.add("first", flat, model="m")
    cluster.go(6.0)
    cluster.add("other", linear, least=3, most=3)
    cluster.go(12.0)
    for name in ("first", "other"):
        cluster.cancel(name)
    cluster.add("second", flat, model="m")
    cluster.go(6.0)
    assert cluster.widths()["second"] == 1


def test_a_batch_that_grows_with_the_ranks_counts_by_its_samples() -> None:
    """With ``scaling="learning_rate"`` steps are as long as ever, but each has more samples."""
    cluster = Cluster(Optimus(interval_s=5.0), per_step=lambda width: 8 * width)
    cluster.add("e", flat)
    cluster.add("other", flat, least=3, most=3)
    cluster.go(12.0)
    assert cluster.widths()["e"] == 1
    cluster.cancel("other")
    cluster.go(12.0)
    assert cluster.widths()["e"] == 4
    speeds = cluster.core.allocation.throughput.speeds(cluster.core.jobs["e"])
    assert speeds[4] / speeds[1] == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize("make", [Optimus, Slaq, Themis])
def test_a_scheduler_made_anew_from_the_journal_knows_the_same(make: Callable[..., Policy]) -> None:
    cluster = Cluster(_quick(make))
    for name, speed in [("e", flat), ("f", linear)]:
        cluster.add(name, speed, expected_s=1000.0)
    cluster.go(20.0)
    assert cluster.measured
    again = cluster.replayed(_quick(make))
    assert picture(again) == picture(cluster.core)
    for name in ("e", "f"):
        speeds = cluster.core.allocation.throughput.speeds(cluster.core.jobs[name])
        assert speeds
        assert again.allocation.throughput.speeds(again.jobs[name]) == speeds


def test_themis_auctions_devices_to_an_elastic_job_between_its_bounds() -> None:
    cluster = Cluster(Themis(lease_s=5.0))
    cluster.add("a", linear, expected_s=1000.0)
    cluster.go(1.0)
    assert cluster.widths() == {"a": 4}, "alone it wins all"
    cluster.add("b", linear, most=3, expected_s=1000.0)
    cluster.go(12.0)
    assert cluster.widths() == {"a": 2, "b": 2}
    cluster.cancel("a")
    cluster.go(12.0)
    assert cluster.widths() == {"b": 3}, "not more than its largest number"


def test_themis_bids_for_no_devices_that_were_measured_to_be_of_no_use() -> None:
    cluster = Cluster(Themis(lease_s=5.0))
    cluster.add("flat", flat, expected_s=1000.0)
    cluster.go(6.0)
    cluster.add("linear", linear, expected_s=1000.0)
    cluster.go(30.0)
    assert cluster.widths() == {"flat": 1, "linear": 3}


def test_a_search_ends_with_the_first_job_that_succeeds_not_with_one_that_is_cancelled_or_held() -> None:
    cluster = Cluster(Themis(lease_s=5.0, tuner="first"))
    for name in ("a", "b", "c"):
        cluster.add(name, linear, most=1, expected_s=1000.0, app="x")
    cluster.add("other", linear, most=1, expected_s=1000.0)
    cluster.go(3.0)
    cluster.cancel("a")
    cluster.do(Held("b"))
    cluster.go(3.0)
    assert cluster.widths() == {"b": 0, "c": 1, "other": 1}
    cluster.do(Released("b"))
    cluster.go(6.0)
    assert cluster.widths() == {"b": 1, "c": 1, "other": 1}
    cluster.do(Exited("c", 0))
    states = {name: job.state for name, job in cluster.core.jobs.items()}
    assert states == {
        "a": JobState.CANCELLED,
        "b": JobState.CANCELLED,
        "c": JobState.SUCCEEDED,
        "other": JobState.RUNNING,
    }


def test_a_search_ends_although_the_policy_begins_anew_at_that_moment() -> None:
    cluster = Cluster(Themis(lease_s=5.0, tuner="first"))
    for name in ("a", "b"):
        cluster.add(name, linear, most=1, expected_s=1000.0, app="x")
    cluster.go(3.0)
    cluster.core.allocation.planned.start_again()
    cluster.do(Exited("a", 0))
    assert cluster.core.jobs["b"].state is JobState.CANCELLED


def test_under_themis_jobs_that_said_only_their_steps_or_nothing_have_their_share() -> None:
    cluster = Cluster(Themis(lease_s=5.0))
    cluster.add("steps", linear, least=4, steps=100_000)
    cluster.add("silent", linear, least=4)
    cluster.add("long", linear, least=4, expected_s=1000.0)
    cluster.go(300.0)
    now_s = cluster.now_s
    attained = {name: job.executed_at(now_s) for name, job in cluster.core.jobs.items()}
    assert min(attained.values()) > 30.0, attained


def _quick(make: Callable[..., Policy]) -> Policy:
    return make(lease_s=5.0) if make is Themis else make(interval_s=5.0)
