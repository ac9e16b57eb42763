"""How fast jobs are while all of them train."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from gpuslice.profiler.colocation.trial import Trial, held_bytes, measure, measure_turns
from gpuslice.profiler.memory import MemoryUse

from .jobs import Job, recording, run


def test_two_jobs_that_compute_on_one_core_are_half_as_fast() -> None:
    job = Job(compute_s=0.01)
    (alone,) = measure(run([job], 5.0))
    assert alone.steps_per_second == pytest.approx(100.0)
    for one in measure(run([job, job], 5.0)):
        assert one.steps_per_second == pytest.approx(50.0, rel=0.01)


def test_jobs_that_only_sleep_do_not_slow_each_other_down() -> None:
    job = Job(compute_s=0.0, sleep_s=0.02)
    for one in measure(run([job, job], 5.0)):
        assert one.steps_per_second == pytest.approx(50.0, rel=0.01)


def test_only_the_time_counts_in_which_all_train() -> None:
    # Fast while it is alone, until 10 s; then half as fast. The other one begins there.
    early = recording(0.0, [0.1] * 100 + [0.2] * 100)
    late = recording(10.0, [0.2] * 100)
    first, second = measure([[early], [late]])
    assert first.steps_per_second == pytest.approx(5.0, rel=0.01)
    assert second.steps_per_second == pytest.approx(5.0, rel=0.01)
    assert first.seconds == second.seconds
    assert 19.0 < first.seconds <= 20.0
    assert min(first.step_seconds) == pytest.approx(0.2)


def test_a_script_that_was_started_again() -> None:
    parts = [recording(0.0, [0.1] * 50), recording(20.0, [0.1] * 50)]
    other = recording(0.0, [0.5] * 60)
    again, steady = measure([parts, [other]])
    assert again.starts == 2
    assert again.steps_per_second == pytest.approx(10.0)
    assert steady.steps_per_second == pytest.approx(2.0)
    assert again.seconds < 10.0, "while it starts, nothing counts"


def test_jobs_that_never_train_at_the_same_time() -> None:
    for one in measure([[recording(0.0, [0.1] * 20)], [recording(5.0, [0.1] * 20)]]):
        assert (one.steps, one.seconds, one.steps_per_second, one.step_seconds) == (0.0, 0.0, 0.0, ())


def test_a_script_without_steps() -> None:
    for one in measure([[recording(0.0, [])], [recording(5.0, [0.1] * 20)]]):
        assert one.steps_per_second == 0.0


def test_turns_count_whole_cycles_with_their_switches() -> None:
    # Two jobs of 0.1 s a step; turns of 1 s, and 0.25 s for each switch: cycles of 2.5 s.
    def begun(number: int) -> float:
        return 2.5 * number

    first = recording(0.0, ([0.1] * 9 + [1.6]) * 6)
    second = recording(1.25, ([0.1] * 9 + [1.6]) * 6)
    cycles = [
        [(begun(number), begun(number) + 1.25), (begun(number) + 1.25, begun(number) + 2.5)]
        for number in range(1, 4)
    ]
    for one in measure_turns([[first], [second]], cycles):
        assert one.seconds == pytest.approx(7.5)
        assert one.steps == pytest.approx(30.0)
        assert one.alone_steps_per_second == pytest.approx(10.0)
        # Time away is no step time.
        assert (one.step_seconds[0], one.step_seconds[-1]) == pytest.approx((0.1, 0.1))


def test_a_script_that_was_started_again_has_turns_in_both_of_its_lives() -> None:
    parts = [recording(0.0, [0.1] * 20), recording(10.0, [0.1] * 20)]
    (one,) = measure_turns([parts], [[(0.0, 1.0)], [(11.0, 12.0)]])
    assert (one.starts, one.steps) == (2, pytest.approx(20.0))


def test_members_that_are_alone_now_and_then() -> None:
    """20 ms a step alone, 40 ms together; each stands still for 2 s of every 8 s, the machine slows down."""
    halts = ([(6.0 + 8 * i, 8.0 + 8 * i) for i in range(20)], [(2.0 + 8 * i, 4.0 + 8 * i) for i in range(20)])
    recordings = []
    for own, other in (halts, halts[::-1]):
        now_s, ends = 0.0, [0.0]
        while now_s < 150.0:
            left_s = (0.02 if any(a <= now_s < b for a, b in other) else 0.04) * (1 + now_s / 300.0)
            now_s += left_s + sum(b - a for a, b in own if now_s <= a < now_s + left_s)
            ends.append(now_s)
        recordings.append([recording(0.0, list(np.diff(ends)))])
    plain = measure(recordings)
    for one, before in zip(measure(recordings, halts), plain, strict=True):
        assert one.steps_per_second / one.alone_steps_per_second == pytest.approx(0.5, rel=0.03)
        assert one.seconds == pytest.approx(2 * one.alone_seconds, rel=0.1)
        assert one.step_seconds[-1] < 0.07, "a halt is no part of a step"
        assert (before.alone_seconds, before.alone_steps_per_second) == (0.0, 0.0)


def test_memory_on_the_host_and_on_a_gpu() -> None:
    host = recording(0.0, [0.1], MemoryUse(700, 1, 1, 1, 50, 1))
    assert held_bytes(host) == 700
    assert held_bytes(msgspec.structs.replace(host, clock="cuda")) == 750
    assert held_bytes(recording(0.0, [0.1])) is None


def test_a_trial_survives_json() -> None:
    trial = Trial(1, (0, 2), "packed", 3.5, measure(run([Job(0.01), Job(0.02)], 1.0)))
    assert msgspec.json.decode(msgspec.json.encode(trial), type=Trial) == trial
