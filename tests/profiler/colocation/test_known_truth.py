"""Jobs whose truth is known, a hundred times: every figure lies within its stated interval.

The jobs are simulated: their steps vary at random, the mechanism that slows them down is exact. What judges
them is the real thing: recordings, warm-up, throughput, rounds, intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import numpy as np
import pytest
import torch

from gpuslice.profiler.colocation.plan import Plan
from gpuslice.profiler.colocation.result import make_result
from gpuslice.profiler.colocation.trial import Run, Trial, measure
from gpuslice.profiler.memory import HostMemory
from gpuslice.profiler.recorder import Recording
from gpuslice.profiler.skew import measure_skew
from gpuslice.profiler.steps import analyse

from .jobs import recording

RUNS = 100
#: Of a hundred intervals so many contain the truth at least; they are stated at 99 %.
GOOD = 95
STEPS = 300
COMPUTE_S, SLEEP_S = 0.01, 0.02
MIB = 1 << 20


def steps_s(random: np.random.Generator, mean_s: float) -> list[float]:
    """Step times around ``mean_s`` with a spread of a tenth; the warm-up's steps last twice as long."""
    varied = mean_s * random.normal(1.0, 0.1, STEPS).clip(0.5)
    varied[:5] *= 2.0
    return list(varied)


def through_bucket(needs_s: Sequence[float], rate: float, burst_s: float = 0.05) -> list[float]:
    """Step times of a job that gets its processor time from a token bucket, filled at ``rate`` a second."""
    now_s = tokens_s = 0.0
    found = []
    for need_s in needs_s:
        # It computes at full speed as long as there are tokens, then at the rate at which they come.
        waits_s = max(0.0, (need_s - tokens_s) / rate - need_s)
        took_s = need_s + waits_s
        tokens_s = min(burst_s, tokens_s + rate * took_s - need_s)
        found.append(took_s)
        now_s += took_s
    return found


def rates_inside(random: np.random.Generator, rate: float) -> bool:
    """Whether a job slowed down to ``rate`` beside one that is not is found so, over three rounds."""
    plan = Plan(2, 2, 3)
    trials = []
    for task in plan.tasks():
        if task.mode == "sliced":
            trials.append(Trial(*task, 1.0, ()))
            continue
        recordings = []
        for job in task.members:
            needs_s = steps_s(random, COMPUTE_S)
            slowed = task.mode == "packed" and job == 0
            recordings.append([recording(0.0, through_bucket(needs_s, rate) if slowed else needs_s)])
        trials.append(Trial(*task, 1.0, measure(recordings)))
    (packed,) = (
        one
        for one in make_result(("a", "b"), "cpu:0", 1.0, 1.0, plan, trials, None).sets
        if one.mode == "packed"
    )
    assert packed.interval[0] is not None
    low, high = packed.interval[0]
    assert high - low < 0.2, "an interval that says something"
    return low <= rate <= high


@pytest.mark.parametrize(
    "rate", [0.3, *(pytest.param(rate, marks=pytest.mark.repeats) for rate in (0.5, 0.8))]
)
def test_a_slow_down_by_a_token_bucket(rate: float) -> None:
    random = np.random.default_rng(int(100 * rate))
    assert sum(rates_inside(random, rate) for _ in range(RUNS)) >= GOOD


def mixed(random: np.random.Generator, share: float) -> Recording:
    """A job that computes, on ``share`` of a core, and sleeps, in a fixed mix."""
    computed = np.array(steps_s(random, COMPUTE_S)) / share
    return recording(0.0, list(computed + SLEEP_S))


def test_the_step_time_of_a_fixed_mix_of_sleep_and_computation() -> None:
    random = np.random.default_rng(7)
    inside = 0
    for _ in range(RUNS):
        found = analyse(mixed(random, 1.0)).step_seconds
        assert found is not None
        assert found.interval is not None
        inside += found.interval[0] <= COMPUTE_S + SLEEP_S <= found.interval[1]
    assert inside >= GOOD


def test_a_fixed_mix_beside_a_job_that_always_computes() -> None:
    # Half of the core is left for 10 ms of work: 20 ms, and the sleep as before.
    truth = (COMPUTE_S + SLEEP_S) / (2 * COMPUTE_S + SLEEP_S)
    random = np.random.default_rng(8)
    plan = Plan(2, 2, 3)
    inside = 0
    for _ in range(RUNS):
        trials = []
        for task in plan.tasks():
            if task.mode == "sliced":
                trials.append(Trial(*task, 1.0, ()))
                continue
            share = 0.5 if task.mode == "packed" else 1.0
            busy = recording(0.0, list(np.array(steps_s(random, COMPUTE_S)) / share) * 2)
            both: dict[int, list[Recording]] = {0: [mixed(random, share)], 1: [busy]}
            runs: tuple[Run, ...] = measure([both[job] for job in task.members])
            trials.append(Trial(*task, 1.0, runs))
        sets = make_result(("mix", "busy"), "cpu:0", 1.0, 1.0, plan, trials, None).sets
        (packed,) = (one for one in sets if one.mode == "packed")
        assert packed.interval[0] is not None
        inside += packed.interval[0][0] <= truth <= packed.interval[0][1]
    assert inside >= GOOD


#: How long all train together, and how long each is alone, in two short rounds.
PART_S, ROTATIONS = 0.75, 4


def in_rotations(random: np.random.Generator, speeds: Sequence[float]) -> tuple[Run, ...]:
    """A trial of two members; together each has so much of its speed alone, stopped none."""
    edges = np.arange(4 * ROTATIONS + 1) * PART_S
    recordings, halts = [], []
    for number, speed in enumerate(speeds):
        stopped = (
            3 if number == 0 else 1
        )  # of a rotation: together, the first alone, together, the second alone
        parts = np.array([speed, 1.0, speed, 1.0] * ROTATIONS)
        parts[stopped::4] = 0.0
        trained = np.concatenate([[0.0], np.cumsum(parts * PART_S)])
        ends = np.cumsum(random.normal(COMPUTE_S, 0.1 * COMPUTE_S, 2000).clip(0.001))
        ends = np.interp(ends[ends < trained[-1]], trained + np.arange(trained.size) * 1e-12, edges)
        recordings.append([recording(0.0, list(np.diff([0.0, *ends])))])
        halts.append([(float(edges[at]), float(edges[at + 1])) for at in range(stopped, 4 * ROTATIONS, 4)])
    return measure(recordings, halts)


@pytest.mark.parametrize(
    ("speeds", "verdicts"),
    [((0.99, 0.99), {"pack"}), ((0.45, 0.45), {"slice"}), ((0.51, 0.51), {"undecided", "slice", "pack"})],
)
def test_two_short_rounds_decide_what_is_clear(speeds: tuple[float, float], verdicts: set[str]) -> None:
    random = np.random.default_rng(11)
    plan, alone, inside = Plan(2, 2, 2), measure([[mixed(random, 1.0)]]), 0
    for _ in range(RUNS // 4):
        trials = []
        for task in plan.tasks():
            packed = in_rotations(random, speeds) if task.mode == "packed" else None
            trials.append(Trial(*task, 1.0, packed or (() if task.mode == "sliced" else alone)))
        sets = make_result(("a", "b"), "cpu:0", 6.0, 1.0, plan, trials, None).sets
        (found,) = (one for one in sets if one.mode == "packed")
        assert found.verdict in verdicts
        assert (found.more_rounds > 0) == (found.verdict == "undecided")
        assert found.gain_interval is not None
        inside += found.gain_interval[0] <= sum(speeds) <= found.gain_interval[1]
    assert inside >= GOOD // 4


def test_a_known_skew() -> None:
    random = np.random.default_rng(9)
    for _ in range(RUNS):
        sizes = [int(size) for size in random.integers(1, 1000, 20)]
        share = float(random.uniform(0.1, 0.9))
        largest = max(round(share * sum(sizes) / (1 - share)), max(sizes))
        found = measure_skew([*sizes, largest])
        assert found.skew == pytest.approx(largest / (sum(sizes) + largest))
        assert found.consolidate == (found.skew >= found.threshold)


def test_a_fixed_memory() -> None:
    """Real memory of this process: what other threads and the allocator do meanwhile is below a MiB."""
    inside = 0
    for number in range(RUNS):
        size = (8 + number % 8) * MIB
        empty = HostMemory()
        empty.sample()
        before = empty.report().boundary_bytes
        memory = mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)  # fresh pages, that nobody has used
        tensor = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
        meter = HostMemory()
        meter.sample()
        found = meter.report().boundary_bytes
        assert before is not None
        assert found is not None
        inside += abs(found - before - tensor.nbytes) < MIB
        del tensor, memory
    assert inside >= GOOD
