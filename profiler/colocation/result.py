"""The lab's result, as JSON and as CSV; docs/json.md has types and units."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from gpuslice.profiler.intervals import CONFIDENCE

from .plan import Members, Mode, Plan, Task
from .prediction import Prediction, PredictionError, predictions
from .prediction import error as prediction_error
from .statistics import Estimate, Samples, estimate, quotient
from .stress import Curve, curves
from .trial import Run, Trial
from .verdict import Verdict, VerdictName, judge

Interval = tuple[float, float] | None


class JobResult(msgspec.Struct, frozen=True):
    """Measurements of a job alone."""

    name: str
    steps_per_second: float
    interval: Interval
    memory_bytes: int | None


class SetResult(msgspec.Struct, frozen=True):
    """Measurements of a set of jobs on one device, packed or sliced."""

    members: tuple[str, ...]
    mode: Literal["packed", "sliced"]
    measured: bool
    normalized: tuple[float, ...]
    interval: tuple[Interval, ...]
    error: tuple[float | None, ...]
    total: float
    total_interval: Interval
    gain: float | None
    gain_interval: Interval
    memory_bytes: int | None
    verdict: VerdictName
    more_rounds: int


class Result(msgspec.Struct, frozen=True):
    """All results of a co-location experiment."""

    device: str
    seconds: float
    turn_seconds: float
    repeats: int
    confidence: float
    sliced: Literal["measured", "assumed"]
    complete: bool
    names: tuple[str, ...]
    jobs: tuple[JobResult, ...]
    sets: tuple[SetResult, ...]
    matrix: tuple[tuple[float | None, ...], ...] | None
    stress: tuple[Curve, ...]
    predictions: tuple[Prediction, ...]
    prediction_error: PredictionError | None
    trials: tuple[Trial, ...]


def make_result(
    names: Sequence[str],
    device: str,
    seconds: float,
    turn_seconds: float,
    plan: Plan,
    trials: Sequence[Trial],
    memory_bytes: int | None,
) -> Result:
    """Return the result of ``trials``. Jobs and sets that were not measured yet are left out.

    Parameters
    ----------
    memory_bytes
        What the device has; ``None`` if that is unknown.
    """
    runs = {trial.task: trial.runs for trial in trials if trial.runs}
    memory = memories(trials)
    jobs = tuple(
        JobResult(names[job], alone.mean, alone.interval, memory.get(job))
        for job in range(plan.jobs)
        if (alone := _alone(job, runs)) is not None
    )
    large = too_large(plan, memory, memory_bytes)
    pairs = [_set_results(_Set(names, members, runs, memory, members in large)) for members in plan.sets]
    packed = {members: one for members, (one, _) in zip(plan.sets, pairs, strict=True) if one is not None}
    sliced = [one for _, one in pairs if one is not None]
    done = [trial.task for trial in trials]
    found = _curves(names, plan, trials)
    outcomes: dict[Members, tuple[float, ...]] = {
        pair: one.normalized for pair, one in packed.items() if len(pair) == 2
    }
    predicted = predictions(names, plan.stress, found, outcomes, plan.pairs) if found else []
    return Result(
        device=device,
        seconds=seconds,
        turn_seconds=turn_seconds,
        repeats=plan.repeats,
        confidence=CONFIDENCE,
        sliced="measured" if any(one.measured for one in sliced) else "assumed",
        complete=all(task.members in large for task in plan.remaining(done)),
        names=tuple(names),
        jobs=jobs,
        sets=(*packed.values(), *sliced),
        matrix=_matrix(plan, packed) if plan.size == 2 else None,
        stress=tuple(found.values()),
        predictions=tuple(predicted),
        prediction_error=prediction_error(predicted),
        trials=tuple(trials),
    )


def _curves(names: Sequence[str], plan: Plan, trials: Sequence[Trial]) -> dict[tuple[int, str], Curve]:
    jobs = {
        job: [one for trial in trials if trial.members == (job,) for one in trial.stressed]
        for job in range(plan.jobs)
    }
    references = [one for trial in trials if trial.mode == "reference" for one in trial.stressed]
    return curves(names, plan.stress, jobs, references)


def memories(trials: Sequence[Trial]) -> dict[int, int]:
    """Return the most memory that each job held when it was alone."""
    most: dict[int, int] = {}
    for trial in trials:
        if trial.mode == "alone" and trial.runs[0].memory_bytes is not None:
            job = trial.members[0]
            most[job] = max(most.get(job, 0), trial.runs[0].memory_bytes)
    return most


def too_large(plan: Plan, memory: Mapping[int, int], limit_bytes: int | None) -> Collection[Members]:
    """Return the sets whose memory does not fit on the device. They never run together."""
    if limit_bytes is None:
        return ()
    return {members for members in plan.sets if sum(memory.get(job, 0) for job in members) > limit_bytes}


def to_csv(result: Result) -> str:
    """Return the sets as CSV, one line for each member of each set."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("set", "mode", "member", "normalized", "low", "high", "total", "verdict"))
    for one in result.sets:
        for member, value, interval in zip(one.members, one.normalized, one.interval, strict=True):
            low, high = interval or ("", "")
            label = " + ".join(one.members)
            writer.writerow((label, one.mode, member, value, low, high, one.total, one.verdict))
    return text.getvalue()


_Runs = dict[Task, tuple[Run, ...]]


def _alone(job: int, runs: _Runs) -> Estimate | None:
    found = [run.steps_per_second for task, (run, *_) in runs.items() if task[1:] == ((job,), "alone")]
    return estimate(Samples(found)) if found else None


@dataclass(frozen=True)
class _Set:
    names: Sequence[str]
    members: Members
    runs: _Runs
    memory: Mapping[int, int]
    too_large: bool

    def measured(self, mode: Mode) -> _Measured:
        """Return normalized throughput: by the throughput alone in the same trial, if that was measured.

        Otherwise by the trial alone in the same round, if there is one. So a drift of the machine cancels.
        """
        found = _Measured({}, [])
        for task, runs in sorted(self.runs.items()):
            if task.members == self.members and task.mode == mode:
                both = zip(self.members, runs, strict=True)
                alone = [self._alone(task.round, job, run) for job, run in both]
                if all(alone):
                    rates = (run.steps_per_second for run in runs)
                    found.rounds[task.round] = [rate / one for rate, one in zip(rates, alone, strict=True)]
                    found.windows.extend(_whole_windows(runs))
        return found

    def _alone(self, number: int, job: int, run: Run) -> float:
        trial = self.runs.get(Task(number, (job,), "alone"))
        return run.alone_steps_per_second or (trial[0].steps_per_second if trial else 0.0)

    @property
    def memory_bytes(self) -> int | None:
        known = [self.memory[job] for job in self.members if job in self.memory]
        return sum(known) if len(known) == len(self.members) else None


@dataclass(frozen=True)
class _Measured:
    """Normalized throughput of all members: by round, and in windows in order of time."""

    rounds: dict[int, list[float]]
    windows: list[list[float]]

    def members(self) -> list[Samples]:
        """Return the samples of each member."""
        windows = list(zip(*self.windows, strict=True)) or [()] * len(next(iter(self.rounds.values())))
        by_member = zip(*self.rounds.values(), strict=True)
        return [Samples(rounds, own) for rounds, own in zip(by_member, windows, strict=True)]

    def total(self) -> Samples:
        """Return the samples of the members' sum."""
        return Samples([sum(values) for values in self.rounds.values()], [sum(one) for one in self.windows])


def _whole_windows(runs: Sequence[Run]) -> Iterator[list[float]]:
    """Yield the windows in which every member was measured, as normalized throughput of each."""
    for windows in zip(*(run.windows for run in runs), strict=True):
        values = [one.normalized for one in windows]
        if None not in values:
            yield [value for value in values if value is not None]


def _set_results(one: _Set) -> tuple[SetResult | None, SetResult | None]:
    """Return the packed and the sliced result. Slicing that was not measured is assumed to cost nothing.

    A measured slice is compared with the packed trial of the same round.
    """
    packed, sliced = one.measured("packed"), one.measured("sliced")
    if not packed.rounds and not sliced.rounds and not one.too_large:
        return None, None
    gain = _gain(packed, sliced)
    verdict = Verdict("slice") if one.too_large else Verdict("undecided", 1)
    if gain is not None:
        shares = [1 / len(one.members)] * len(one.members)
        if sliced.rounds:
            shares = [float(np.mean(values)) for values in zip(*sliced.rounds.values(), strict=True)]
        verdict = judge([estimate(own) for own in packed.members()], shares, gain, len(packed.rounds))
    return (
        _set_result(one, "packed", packed, gain, verdict) if packed.rounds else None,
        _set_result(one, "sliced", sliced, gain, verdict),
    )


def _gain(packed: _Measured, sliced: _Measured) -> Estimate | None:
    """Return the packed total divided by the sliced total; None if no round has both."""
    gains = [
        sum(values) / (sum(sliced.rounds[number]) if sliced.rounds else 1.0)
        for number, values in packed.rounds.items()
        if number in sliced.rounds or not sliced.rounds
    ]
    return quotient(gains, packed.total(), sliced.total() if sliced.rounds else None) if gains else None


def _set_result(
    one: _Set, mode: Literal["packed", "sliced"], found: _Measured, gain: Estimate | None, verdict: Verdict
) -> SetResult:
    if found.rounds:
        normalized, total = [estimate(samples) for samples in found.members()], estimate(found.total())
    else:  # time-slicing that costs nothing: each member has its share of the time
        count = len(one.members)
        normalized, total, gain = [Estimate(1 / count, None)] * count, Estimate(1.0, None), None
    return SetResult(
        members=tuple(one.names[job] for job in one.members),
        mode=mode,
        measured=bool(found.rounds),
        normalized=tuple(value.mean for value in normalized),
        interval=tuple(value.interval for value in normalized),
        error=tuple(value.error for value in normalized),
        total=total.mean,
        total_interval=total.interval,
        gain=None if gain is None else gain.mean,
        gain_interval=None if gain is None else gain.interval,
        memory_bytes=one.memory_bytes,
        verdict=verdict.name,
        more_rounds=verdict.more_rounds,
    )


def _matrix(plan: Plan, packed: dict[Members, SetResult]) -> tuple[tuple[float | None, ...], ...]:
    """Return the matrix of throughputs. Row: the job that is slowed down; column: the job beside it."""
    cells: list[list[float | None]] = [[None] * plan.jobs for _ in range(plan.jobs)]
    for (one, other), found in packed.items():
        cells[one][other], cells[other][one] = found.normalized
    return tuple(map(tuple, cells))
