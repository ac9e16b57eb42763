"""The result of the lab, as JSON and as CSV; docs/colocation.md has types and units."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

from .plan import Members, Plan
from .statistics import CONFIDENCE, Estimate, estimate
from .trial import Trial
from .verdict import Verdict, judge

Interval = tuple[float, float] | None


class JobResult(msgspec.Struct, frozen=True):
    """A job alone."""

    name: str
    steps_per_second: float
    interval: Interval
    memory_bytes: int | None


class SetResult(msgspec.Struct, frozen=True):
    """Jobs on one device, packed or sliced."""

    members: tuple[str, ...]
    mode: Literal["packed", "sliced"]
    measured: bool
    normalized: tuple[float, ...]
    interval: tuple[Interval, ...]
    total: float
    total_interval: Interval
    memory_bytes: int | None
    verdict: Verdict | None


class Result(msgspec.Struct, frozen=True):
    """All that is known of the jobs on a device."""

    device: str
    seconds: float
    repeats: int
    confidence: float
    sliced: Literal["assumed"]
    complete: bool
    names: tuple[str, ...]
    jobs: tuple[JobResult, ...]
    sets: tuple[SetResult, ...]
    matrix: tuple[tuple[float | None, ...], ...] | None
    trials: tuple[Trial, ...]


def make_result(
    names: Sequence[str],
    device: str,
    seconds: float,
    plan: Plan,
    trials: Sequence[Trial],
    memory_bytes: int | None,
) -> Result:
    """What follows from ``trials``; jobs and sets that were not measured yet are left out.

    Parameters
    ----------
    memory_bytes
        What the device has; ``None`` if that is unknown.
    """
    rates = {(trial.round, trial.members): [run.steps_per_second for run in trial.runs] for trial in trials}
    memory = memories(trials)
    jobs = tuple(
        JobResult(names[job], alone.mean, alone.interval, memory.get(job))
        for job in range(plan.jobs)
        if (alone := _alone(job, rates)) is not None
    )
    packed = {members: found for members in plan.sets if (found := _packed(names, members, rates, memory))}
    large = too_large(plan, memory, memory_bytes)
    sliced = [_sliced(one.members, one.memory_bytes, one.verdict) for one in packed.values()]
    sliced += [
        _sliced(tuple(names[job] for job in members), sum(memory[job] for job in members), "slice")
        for members in plan.sets
        if members in large
    ]
    return Result(
        device=device,
        seconds=seconds,
        repeats=plan.repeats,
        confidence=CONFIDENCE,
        sliced="assumed",
        complete=all(members in large for _, members in plan.remaining(rates)),
        names=tuple(names),
        jobs=jobs,
        sets=(*packed.values(), *sliced),
        matrix=_matrix(plan, packed) if plan.size == 2 else None,
        trials=tuple(trials),
    )


def memories(trials: Sequence[Trial]) -> dict[int, int]:
    """The most memory that each job held when it was alone."""
    most: dict[int, int] = {}
    for trial in trials:
        if len(trial.members) == 1 and trial.runs[0].memory_bytes is not None:
            job = trial.members[0]
            most[job] = max(most.get(job, 0), trial.runs[0].memory_bytes)
    return most


def too_large(plan: Plan, memory: Mapping[int, int], limit_bytes: int | None) -> Collection[Members]:
    """The sets whose memory does not fit on the device; they never run together."""
    if limit_bytes is None:
        return ()
    return {members for members in plan.sets if sum(memory.get(job, 0) for job in members) > limit_bytes}


def to_csv(result: Result) -> str:
    """One line for each member of each set."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("set", "mode", "member", "normalized", "low", "high", "total", "verdict"))
    for one in result.sets:
        for member, value, interval in zip(one.members, one.normalized, one.interval, strict=True):
            low, high = interval or ("", "")
            label = " + ".join(one.members)
            writer.writerow((label, one.mode, member, value, low, high, one.total, one.verdict or ""))
    return text.getvalue()


_Rates = dict[tuple[int, Members], list[float]]


def _alone(job: int, rates: _Rates) -> Estimate | None:
    found = [rate for (_, members), (rate, *_) in rates.items() if members == (job,)]
    return estimate(found) if found else None


def _packed(
    names: Sequence[str], members: Members, rates: _Rates, memory: dict[int, int]
) -> SetResult | None:
    """Only rounds in which each of the members ran alone, too: a drift between rounds cancels."""
    rounds = [
        [rate / rates[number, (job,)][0] for job, rate in zip(members, found, strict=True)]
        for (number, those), found in rates.items()
        if those == members and all(rates.get((number, (job,)), [0.0])[0] for job in members)
    ]
    if not rounds:
        return None
    normalized = [estimate(values) for values in zip(*rounds, strict=True)]
    total = estimate([sum(values) for values in rounds])
    sizes = [memory.get(job) for job in members]
    known = [size for size in sizes if size is not None]
    return SetResult(
        members=tuple(names[job] for job in members),
        mode="packed",
        measured=True,
        normalized=tuple(one.mean for one in normalized),
        interval=tuple(one.interval for one in normalized),
        total=total.mean,
        total_interval=total.interval,
        memory_bytes=sum(known) if len(known) == len(sizes) else None,
        verdict=judge(normalized, total),
    )


def _sliced(members: tuple[str, ...], memory_bytes: int | None, verdict: Verdict | None) -> SetResult:
    """Time-slicing that costs nothing: each member has its share of the time. Assumed, not measured."""
    return SetResult(
        members=members,
        mode="sliced",
        measured=False,
        normalized=(1 / len(members),) * len(members),
        interval=(None,) * len(members),
        total=1.0,
        total_interval=None,
        memory_bytes=memory_bytes,
        verdict=verdict,
    )


def _matrix(plan: Plan, packed: dict[Members, SetResult]) -> tuple[tuple[float | None, ...], ...]:
    """Row: the job that is slowed down; column: the one beside it."""
    cells: list[list[float | None]] = [[None] * plan.jobs for _ in range(plan.jobs)]
    for (one, other), found in packed.items():
        cells[one][other], cells[other][one] = found.normalized
    return tuple(map(tuple, cells))
