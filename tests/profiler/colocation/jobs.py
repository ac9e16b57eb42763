"""Jobs with a known truth on a clock that only they move: one core that hands out tokens, and sleep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpuslice.profiler.memory import MemoryUse
from gpuslice.profiler.recorder import Recording, StepRecorder

#: The core is given away in slices of so many seconds.
TOKEN_S = 0.001


@dataclass(frozen=True)
class Job:
    """Every step computes for ``compute_s`` on the core, then sleeps for ``sleep_s``."""

    compute_s: float
    sleep_s: float = 0.0


class _Running:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.now_s = 0.0
        self.recorder = StepRecorder(clock=lambda: self.now_s, cpu_clock=lambda: 0.0)
        self.steps = 0
        self.left_s = 0.0
        self.awake_s = 0.0
        self.recorder.boundary(0)
        self._begin()

    def _begin(self) -> None:
        self.left_s = self.job.compute_s
        self.awake_s = self.now_s

    def compute(self) -> None:
        """Take a token; at the end of a step, sleep."""
        self.left_s -= TOKEN_S
        if self.left_s < TOKEN_S / 2:
            self._end(self.now_s + self.job.sleep_s)

    def sleep_over(self, now_s: float) -> None:
        """A job that never computes only sleeps."""
        while not self.job.compute_s and self.awake_s + self.job.sleep_s <= now_s:
            self._end(self.awake_s + self.job.sleep_s)

    def _end(self, at_s: float) -> None:
        self.now_s = at_s
        self.steps += 1
        self.recorder.boundary(self.steps)
        self._begin()


def run(jobs: Sequence[Job], seconds: float) -> list[list[Recording]]:
    """The recordings of ``jobs`` on one core; it goes to those that want it in turn."""
    running = [_Running(job) for job in jobs]
    now_s, turn = 0.0, 0
    while now_s < seconds:
        now_s += TOKEN_S
        for one in running:
            one.sleep_over(now_s)
        wanting = [one for one in running if one.job.compute_s and one.awake_s <= now_s - TOKEN_S / 2]
        if wanting:
            one = wanting[turn % len(wanting)]
            one.now_s = now_s
            one.compute()
            turn += 1
    return [[one.recorder.finish()] for one in running]


#: Of jobs that take turns: a turn, and the switch after it.
TURN_S, SWITCH_S = 2.0, 0.2


def in_turns(
    jobs: Sequence[Job], cycles: int
) -> tuple[list[list[Recording]], list[list[tuple[float, float]]]]:
    """The recordings of ``jobs`` that take turns, each alone in its own, and when the turns were.

    The first cycle is not among the turns that are returned.
    """
    length_s = TURN_S + SWITCH_S
    recordings = []
    for number, job in enumerate(jobs):
        step_s = job.compute_s + job.sleep_s
        now_s = begun_s = number * length_s
        ends = []
        for cycle in range(cycles + 2):
            now_s = max(now_s, (cycle * len(jobs) + number) * length_s)
            turn_end_s = (cycle * len(jobs) + number) * length_s + TURN_S
            while now_s < turn_end_s - step_s / 2:
                now_s += step_s
                ends.append(now_s)
        recordings.append([recording(begun_s, list(np.diff([begun_s, *ends])))])
    turns = [
        [((at := (cycle * len(jobs) + job) * length_s), at + length_s) for job in range(len(jobs))]
        for cycle in range(1, cycles + 1)
    ]
    return recordings, turns


def recording(begun_s: float, intervals_s: Sequence[float], memory: MemoryUse | None = None) -> Recording:
    """Plain intervals from ``begun_s`` on."""
    count = len(intervals_s)
    zeros, ones = [0.0] * count, [1] * count
    total_s = sum(intervals_s)
    return Recording(
        0,
        "monotonic",
        list(intervals_s),
        zeros,
        zeros,
        ones,
        [0] * count,
        0.0,
        total_s,
        memory=memory,
        begun_s=begun_s,
    )
