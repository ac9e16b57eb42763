"""Live packing of jobs whose rates are known (packing_world.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import log

import pytest

from gpuslice.errors import ConfigError
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.interference import MOST, Prior, Sample
from gpuslice.sched_core.lifecycle.events import (
    Notice,
)
from gpuslice.sched_core.policies.gandiva.live_packing import Packing
from gpuslice.sched_core.policies.registry import make_policy

from .driver import picture
from .packing_world import COMPUTES, TICK_S, WAITS, World

OPTIONS = {"quantum_s": "2", "pack": "true"}


def judged_pair(rates: Mapping[str, tuple[float, float]], policy: str) -> World:
    """Jobs "a" and "b" of the one model of ``rates``, after as long as a verdict takes."""
    world = World(rates, policy)
    for name in ("a", "b"):
        world.submit(name, *rates)
    world.run(120.0)
    assert not world.said("policy_failed")
    return world


@pytest.mark.parametrize("policy", ["rr", "las", "gandiva"])
def test_two_that_compute_are_tried_and_unpacked(policy: str) -> None:
    world = judged_pair(COMPUTES, policy)
    found = world.said("packed", "unpacked")
    assert [notice.what for notice in found] == ["unpacked", "unpacked"]
    for notice in found:
        low, high = notice.details["slowdown_low"], notice.details["slowdown_high"]
        assert isinstance(low, float)
        assert isinstance(high, float)
        assert 1.0 < low <= 2.0 <= high
    assert len(world.on()) == 1
    since = world.driver.core.jobs["a"].service_s
    world.run(60.0)
    assert world.said("packed", "unpacked") == found, "a bad pair is not tried again"
    assert world.driver.core.jobs["a"].service_s > since


@pytest.mark.parametrize("policy", ["rr", "las", "gandiva"])
def test_two_that_wait_for_data_are_packed_and_stay_so(policy: str) -> None:
    world = judged_pair(WAITS, policy)
    assert [notice.what for notice in world.said("packed", "unpacked")] == ["packed", "packed"]
    assert world.on() == {"a", "b"}
    suspends = sum(job.preemptions for job in world.driver.core.jobs.values())
    world.run(60.0)
    assert world.on() == {"a", "b"}
    assert sum(job.preemptions for job in world.driver.core.jobs.values()) == suspends
    slowdown = world.driver.core.allocation.throughput.slowdown(world.driver.core.jobs["b"])
    assert slowdown is not None
    assert slowdown.low <= 10.0 / 9.7 <= slowdown.high


def test_a_pair_that_gets_worse_is_given_up_and_not_tried_again() -> None:
    world = World(WAITS)
    world.submit("a", "wait")
    world.submit("b", "wait")
    world.run(120.0)
    world.rates = {"wait": (10.0, 4.0)}
    world.run(120.0)
    assert [notice.what for notice in world.said("packed", "unpacked")] == ["packed"] * 2 + ["unpacked"] * 2
    assert len(world.on()) == 1


def test_all_pairs_of_a_kind_that_seems_to_get_worse_are_taken_apart() -> None:
    world = World(WAITS, devices=2)
    for job in "abcd":
        world.submit(job, "wait")
    world.run(120.0)
    assert [len(world.on(device)) for device in (0, 1)] == [2, 2]
    samples = world.driver.core.allocation.throughput._samples
    samples["wait", ""] = deque(Sample(steps, 1.0) for steps in (5, 10, 20))
    samples["wait", "wait"] = deque([Sample(4, 1.0)] * MOST)
    world.submit("e", "wait")
    assert not world.said("policy_failed")
    assert [len(world.on(device)) for device in (0, 1)] == [1, 1]


def test_what_is_known_of_a_kind_needs_no_trial() -> None:
    world = World(WAITS | COMPUTES)
    for job in "ab":
        world.submit(job, "wait")
    world.run(120.0)
    for job in "ab":
        world.end(job)
    for job in "cd":
        world.submit(job, "wait")
    world.run(5.0)
    assert world.on() == {"c", "d"}
    assert len(world.said("packed")) == 2, "nothing new was found out"


def test_who_is_known_to_get_along_begins_every_slice_together() -> None:
    """Of five jobs that take turns two hold the device from the first moment of each slice on."""
    world = World(WAITS)
    for job in "abcde":
        world.submit(job, "wait")
    world.run(60.0)
    assert world.said("packed")
    together = 0
    for _ in range(200):
        world.run(TICK_S)
        together += len(world.on()) == 2
    assert together >= 195


def test_a_pair_with_profiles_is_judged_by_fewer_samples() -> None:
    def verdict_s(priors: Mapping[tuple[str, str], Prior]) -> float:
        world = World(WAITS)
        assert isinstance(world.policy, Packing)
        world.policy.priors = priors
        for job in "ab":
            world.submit(job, "wait")
        while not world.said("packed"):
            world.run(TICK_S)
        return world.driver.now_s

    assert verdict_s({("wait", "wait"): Prior(log(0.97), 0.1)}) < verdict_s({})


def test_the_guest_goes_on_where_its_host_ends() -> None:
    world = World(WAITS)
    world.submit("a", "wait")
    world.submit("b", "wait")
    world.run(120.0)
    suspends = world.driver.core.jobs["b"].preemptions
    world.end("a")
    world.run(5.0)
    assert world.on() == {"b"}
    assert world.driver.core.jobs["b"].preemptions == suspends
    world.submit("c", "wait")
    world.run(5.0)
    assert world.on() == {"b", "c"}


def test_other_jobs_take_turns_with_a_pair() -> None:
    world = World(WAITS)
    for job in "abc":
        world.submit(job, "wait")
    world.run(200.0)
    assert not world.said("policy_failed")
    before = dict(world.steps)
    world.run(60.0)
    made = {job: world.steps[job] - before[job] for job in "abc"}
    assert all(steps > 100 for steps in made.values())
    assert sum(made.values()) > 1.2 * 10.0 * 60.0


@pytest.mark.parametrize(("memory", "packed"), [(0, False), (60, False), (50, True)])
def test_memory_limits_have_to_fit_where_the_devices_memory_is_known(memory: int, packed: bool) -> None:
    world = World(WAITS, device_memory_bytes=100)
    for job in "ab":
        world.submit(job, "wait", memory)
    world.run(120.0)
    assert not world.said("policy_failed")
    assert (world.on() == {"a", "b"}) is packed


@pytest.mark.parametrize(("peaks", "packed"), [((40, 40), True), ((40, 41), False), ((40, 0), False)])
def test_what_jobs_without_limits_have_used_has_to_fit_with_a_margin(
    peaks: tuple[int, int], packed: bool
) -> None:
    """40 counts as 50, and 41 as 52; a job that was never measured is not packed."""
    world = World(WAITS, device_memory_bytes=100)
    world.peaks = dict(zip("ab", peaks, strict=True))
    for job in "ab":
        world.submit(job, "wait")
    world.run(120.0)
    assert not world.said("policy_failed")
    assert (world.on() == {"a", "b"}) is packed


def test_a_limit_counts_beside_what_was_measured() -> None:
    world = World(WAITS, device_memory_bytes=100)
    world.peaks = {"a": 100, "b": 40}
    world.submit("a", "wait", 50)
    world.submit("b", "wait")
    world.run(120.0)
    assert world.on() == {"a", "b"}


def test_a_pair_that_outgrows_the_device_is_taken_apart() -> None:
    world = World(WAITS, device_memory_bytes=100)
    world.peaks = {"a": 40, "b": 40}
    for job in "ab":
        world.submit(job, "wait")
    world.run(120.0)
    assert world.on() == {"a", "b"}
    world.peaks["b"] = 60
    world.run(5.0)
    assert len(world.on()) == 1
    world.run(60.0)
    assert len(world.on()) == 1
    assert not world.said("policy_failed", "unpacked"), "they get along; there is no room"


def test_a_replayed_journal_knows_the_same() -> None:
    world = World(COMPUTES)
    world.submit("a", "compute")
    world.submit("b", "compute")
    world.run(120.0)
    again = Core(world.driver.core.devices, make_policy("rr", OPTIONS))
    said = [
        command
        for event, now in world.driver.journal
        for command in again.handle(event, now)
        if isinstance(command, Notice) and command.what == "unpacked"
    ]
    assert said == world.said("unpacked")
    assert picture(again) == picture(world.driver.core)


def test_guarantees_and_packing_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="guarantees deadlines"):
        make_policy("chronus", {"pack": "true"})


def test_the_guest_does_not_wait_where_its_host_does() -> None:
    world = World(WAITS, "2das", options={"thresholds": "8"})
    for job in "ab":
        world.submit(job, "wait")
    world.run(60.0)
    for job in "ab":
        world.end(job)
    world.submit("old", "wait")
    world.run(30.0)
    world.submit("guest", "wait")
    world.run(1.0)
    assert world.on() == {"old", "guest"}
    world.submit("urgent", "wait")  # the older one, in the second queue, has to go
    world.run(1.0)
    before = world.steps["guest"]
    world.run(3.0)
    assert world.steps["guest"] > before
