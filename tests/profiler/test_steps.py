"""Step times of jobs whose truth is known, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from gpuslice.profiler.recorder import Recording, StepRecorder
from gpuslice.profiler.steps import Kind, analyse, changes, classify, warmup


class Job:
    """A training loop on a clock of its own: fetch, compute, optimizer step, then whatever follows it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.steps = 0
        self.cpu_s = 3.0
        self.recorder = StepRecorder(clock=lambda: self.now_s, cpu_clock=lambda: self.cpu_s)

    def fetch(self, seconds: float = 0.0, *, grad: bool = True) -> None:
        self.recorder.boundary(self.steps)
        since_s = self.now_s
        self.now_s += seconds
        self.recorder.fetched(since_s, grad=grad)

    def step(self, fetch_s: float = 0.001, compute_s: float = 0.009, after_s: float = 0.0) -> None:
        self.fetch(fetch_s)
        self.now_s += compute_s
        self.cpu_s += 2 * compute_s
        self.steps += 1
        self.recorder.stepped()
        self.now_s += after_s

    def finish(self) -> Recording:
        self.recorder.boundary(self.steps)
        return self.recorder.finish()


def kinds(recording: Recording) -> list[Kind]:
    return list(classify(recording))


def test_a_step_lasts_from_boundary_to_boundary() -> None:
    job = Job()
    for compute_s in (0.05, *[0.009] * 99):
        job.step(compute_s=compute_s)
    found = analyse(job.finish())
    assert (found.steps, found.warmup_steps, found.clock) == (99, 1, "monotonic")
    assert found.step_seconds is not None
    assert found.step_seconds.median == pytest.approx(0.01)
    assert found.step_seconds.interval == pytest.approx((0.01, 0.01))
    assert found.step_seconds.jitter == pytest.approx(0.0, abs=1e-9)
    assert all(phase.count == 0 for phase in found.phases.values())


@pytest.mark.parametrize(("sleep_s", "compute_s"), [(0.001, 0.009), (0.03, 0.01), (0.005, 0.005)])
def test_a_known_mix_of_waiting_and_computing(sleep_s: float, compute_s: float) -> None:
    job = Job()
    for _ in range(50):
        job.step(fetch_s=sleep_s, compute_s=compute_s)
    found = analyse(job.finish())
    assert found.data_share == pytest.approx(sleep_s / (sleep_s + compute_s))
    assert found.cpu_cores == pytest.approx(2 * compute_s / (sleep_s + compute_s)), "two threads"
    assert found.step_seconds is not None
    assert found.step_seconds.median == pytest.approx(sleep_s + compute_s)


def test_batches_that_are_accumulated_are_one_step() -> None:
    job = Job()
    for _ in range(40):
        job.fetch(0.001)
        job.now_s += 0.004
        job.step(0.001, 0.004)
    found = analyse(job.finish())
    assert found.steps == 39
    assert found.step_seconds is not None
    assert found.step_seconds.median == pytest.approx(0.01)


def test_several_optimizers_between_two_boundaries_are_one_step() -> None:
    job = Job()
    for _ in range(40):
        job.step(compute_s=0.004)
        job.now_s += 0.005
        job.steps += 1
        job.recorder.stepped()
    assert analyse(job.finish()).steps == 39


@pytest.mark.parametrize(
    ("odd", "kind"),
    [
        ({"fetch_s": 0.2}, Kind.DATA_STALL),
        ({"after_s": 0.2}, Kind.PAUSE),
        ({"compute_s": 0.2}, Kind.STEP),
        ({"fetch_s": 0.002}, Kind.STEP),
    ],
)
def test_what_makes_an_interval_long_says_what_it_is(odd: dict[str, float], kind: Kind) -> None:
    job = Job()
    for number in range(60):
        job.step(**(odd if number == 40 else {}))
    found = kinds(job.finish())
    assert found[40] is kind
    assert [one for one in found if one is not Kind.STEP] == [
        Kind.WARMUP,
        *([kind] if kind is not Kind.STEP else []),
    ]


@pytest.mark.parametrize("grad", [False, True])
def test_an_evaluation_is_no_step(grad: bool) -> None:
    job = Job()
    for number in range(60):
        if number == 40:
            for _ in range(3):
                job.fetch(0.001, grad=grad)
                job.now_s += 0.003
        job.step()
    found = analyse(job.finish())
    assert found.phases["evaluation"].count == 1
    assert found.phases["evaluation"].seconds == pytest.approx(0.022)
    assert found.steps == 58


def test_the_end_of_an_epoch_is_a_step_like_others() -> None:
    job = Job()
    for number in range(60):
        if number % 10 == 9:
            job.recorder.boundary(job.steps)
            job.recorder.exhausted(job.now_s)
        job.step()
    assert analyse(job.finish()).steps == 59


def test_warm_up_ends_where_steps_are_as_they_will_be() -> None:
    slow = np.array([3.0, 2.0, 2.0, 2.0, 1.9, 1.8, 1.7])
    assert warmup(np.concatenate([slow, np.ones(93)])) == 7, (
        "the median of steps 5 to 9 is 1, but 5 and 6 are slow"
    )
    assert warmup(np.ones(100)) == 1
    assert warmup(np.array([5.0, 1.0, 1.0])) == 1


def noise(count: int, level: float, seed: int) -> np.ndarray:
    return level * (1 + 0.02 * np.random.default_rng(seed).standard_normal(count))


def test_a_change_for_good_is_found_where_it_is() -> None:
    steps_s = np.concatenate([noise(60, 1.0, 1), noise(50, 1.5, 2), noise(70, 1.0, 3)])
    found = changes(steps_s)
    assert [change.step for change in found] == [60, 110]
    assert found[0].before_seconds == pytest.approx(1.0, rel=0.02)
    assert found[0].after_seconds == pytest.approx(1.5, rel=0.02)


def test_noise_is_no_change() -> None:
    assert sum(len(changes(noise(200, 1.0, seed))) for seed in range(50)) == 0


def recorded(intervals: Sequence[float]) -> Recording:
    zeros, ones = [0.0] * len(intervals), [1] * len(intervals)
    return Recording(0, "monotonic", list(intervals), zeros, zeros, ones, [0] * len(intervals), 0.5, 100.0)


def test_the_overhead_is_the_part_of_the_time_that_recording_took() -> None:
    assert analyse(recorded([1.0] * 100)).overhead == pytest.approx(0.005)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_intervals(count: int) -> None:
    found = analyse(recorded([1.0] * count))
    assert (found.steps, found.warmup_steps) == ((1, 1) if count == 2 else (count, 0))


def test_one_interval_is_a_step_for_want_of_others() -> None:
    found = analyse(recorded([2.0]))
    assert found.step_seconds is not None
    assert (found.step_seconds.median, found.step_seconds.interval) == (2.0, None)


class Marks:
    """A device's clock on which every step takes 3 s."""

    def __init__(self) -> None:
        self.count = 0

    def mark(self) -> None:
        self.count += 1

    def intervals_s(self) -> list[float]:
        return [3.0] * (self.count - 1)


def test_on_a_device_with_a_clock_of_its_own_that_counts() -> None:
    job, marks = Job(), Marks()
    job.recorder = StepRecorder(None, marks, clock=lambda: job.now_s)
    for _ in range(20):
        job.step()
    found = analyse(job.finish())
    assert found.clock == "cuda"
    assert found.step_seconds is not None
    assert found.step_seconds.median == 3.0
