"""Sensitivity curves and pressures of jobs whose truth is known, from real estimators on a simulated core."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

from gpuslice.errors import EnvironmentUnusableError, UsageError
from gpuslice.launch.stressor import check_kinds, perform, stressors
from gpuslice.profiler.colocation.plan import Members
from gpuslice.profiler.colocation.prediction import error, fit, predictions
from gpuslice.profiler.colocation.stress import (
    LEVELS,
    Phase,
    Stressed,
    StressLog,
    Window,
    curves,
    halt_schedule,
    recorded_edges,
    schedule,
    stressed,
    throughput,
    unit_edges,
)

from .jobs import recording


class Clock:
    """Time that only work and pauses move; another process takes a share of the time of work."""

    def __init__(self, share: float) -> None:
        self.now_s, self.worked_s, self._share = 0.0, 0.0, share

    def work(self) -> None:
        self.worked_s += 0.001
        self.now_s += 0.001 / self._share

    def pause(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("level", LEVELS)
def test_a_load_works_for_its_share_of_the_time_it_would_have_alone(level: float, share: float) -> None:
    clock = Clock(share)

    def make() -> Callable[[], None]:
        return clock.work

    log = perform(
        [Phase("", 0.0, 0.5), Phase("compute", level, 1.0)],
        {"compute": make},
        clock=lambda: clock.now_s,
        worked=lambda: clock.worked_s,
        idle=clock.pause,
    )
    idle, loaded = log.windows
    assert (idle.kind, idle.ends_s) == ("", [])
    # A unit of 1 ms of work takes 1 ms / share; the pause is that of the unit alone.
    expected = 1.0 / (0.001 / share + 0.001 * (1 / level - 1))
    assert len(loaded.ends_s) == pytest.approx(expected, rel=0.01)


def test_a_load_that_is_told_to_end_has_a_log() -> None:
    clock = Clock(1.0)
    log = perform(
        [Phase("cache", 1.0, 1e6)],
        {"cache": lambda: clock.work},
        stopped=lambda: clock.now_s > 0.5,
        clock=lambda: clock.now_s,
        worked=lambda: clock.worked_s,
        idle=clock.pause,
    )
    assert len(log.windows[0].ends_s) == pytest.approx(500, abs=2)


def test_every_level_of_every_kind_lies_between_two_pauses() -> None:
    phases = schedule(("bandwidth", "cache"), 2.0, seed=1)
    assert [phase.kind == "" for phase in phases] == [True, *[False, True] * 6]
    loads = [(phase.kind, phase.level) for phase in phases if phase.kind]
    assert sorted(loads) == [(kind, level) for kind in ("bandwidth", "cache") for level in LEVELS]
    assert loads != [
        (phase.kind, phase.level) for phase in schedule(("bandwidth", "cache"), 2.0, 2) if phase.kind
    ]


def log_of(levels: tuple[float, ...], drift: float = 0.0) -> StressLog:
    """Windows of 10 s: pause, load, pause, ...; 1000 units per second alone, half of it beside the job."""
    windows = [Window("", 0.0, 0.0, 10.0, [])]
    for index, level in enumerate(levels):
        begun = 10.0 + 20.0 * index
        ends = list(np.linspace(begun, begun + 10.0, 5000))
        windows.append(Window("compute", level, begun, begun + 10.0, ends))
        windows.append(Window("", 0.0, begun + 10.0, begun + 20.0, []))
    return StressLog(windows)


def test_a_job_is_compared_with_itself_right_before_and_after() -> None:
    # 0.1 s a step alone, slowing down by a tenth in each 20 s; twice that under load.
    steps: list[float] = []
    now_s = 0.0
    while now_s < 70.0:
        loaded = any(10.0 + 20.0 * index <= now_s < 20.0 + 20.0 * index for index in range(3))
        steps.append(0.1 * (1 + now_s / 200.0) * (2.0 if loaded else 1.0))
        now_s += steps[-1]
    found = stressed(recorded_edges([recording(0.0, steps)]), log_of(LEVELS))
    assert [one.level for one in found] == list(LEVELS)
    for one in found:
        assert one.normalized == pytest.approx(0.5, rel=0.02)
        assert one.units_per_second == pytest.approx(500.0, rel=1e-3)


def test_the_reference_is_compared_with_itself_while_the_job_is_halted() -> None:
    """A unit takes 1 ms, and twice that beside the job; the machine slows down by half meanwhile."""
    phases = [Phase("", 0.0, 4.0), Phase("compute", 1.0, 8.0), Phase("", 0.0, 4.0)]
    halts = halt_schedule(phases)
    assert halts == [(5.0, 6.0), (7.0, 8.0), (9.0, 10.0), (11.0, 12.0)]
    times, steps, units = [0.0], [0.0], []
    while times[-1] < 16.0:
        now_s = times[-1]
        halted, loaded = any(a <= now_s < b for a, b in halts), 4.0 <= now_s < 12.0
        times.append(now_s + 0.001 * (1 + now_s / 32.0) * (2 if loaded and not halted else 1))
        # A step of the job is ten units' time, and twice that beside the load.
        steps.append(steps[-1] + (0.0 if halted else 0.1))
        units += [times[-1]] if loaded else []
    whole = np.interp(np.arange(int(steps[-1])), steps, times)
    windows = [Window("", 0.0, 0.0, 4.0, []), Window("compute", 1.0, 4.0, 12.0, units)]
    (found,) = stressed([whole], StressLog([*windows, Window("", 0.0, 12.0, 16.0, [])]), halts)
    assert found.reference == pytest.approx(0.5, rel=0.03)
    assert found.normalized == pytest.approx(0.5, rel=0.03)


def test_a_job_that_was_being_started_has_no_figure() -> None:
    parts = [recording(0.0, [0.1] * 110), recording(19.0, [0.1] * 600)]
    found = stressed(recorded_edges(parts), log_of(LEVELS))
    assert [one.normalized is None for one in found] == [True, False, False]


#: Jobs on one core that want it for these shares of the time, as their loads of that level do.
SHARES = (1.0, 0.25, 0.5, 0.05)
NAMES = ("a", "b", "c", "d")
KINDS = ("bandwidth", "compute")


def fair(share: float, other: float) -> float:
    """Normalized throughput on a core that goes to both in equal parts, as far as they want it."""
    return min(1.0, max(0.5, 1.0 - other) / share)


def values(share: float, noise: Callable[[], float]) -> list[Stressed]:
    return [
        Stressed(
            kind,
            level,
            fair(share, level) * noise(),
            1000.0 * level * fair(level, share),
            fair(1.0, share) * noise() if level == 1.0 else None,
        )
        for kind in KINDS
        for level in LEVELS
    ]


def test_pressure_is_the_level_that_slows_the_reference_alike() -> None:
    jobs = {job: values(share, lambda: 1.0) for job, share in enumerate(SHARES)}
    found = curves(NAMES, KINDS, jobs, values(1.0, lambda: 1.0))
    for (job, _), curve in found.items():
        # From half of the core on, all slow the reference down alike.
        assert curve.pressure == pytest.approx(min(SHARES[job], 0.5), abs=0.01)
        assert curve.reference == pytest.approx(fair(1.0, SHARES[job]))
        assert throughput(curve, 0.0) == 1.0


def test_held_out_pairs_are_predicted_within_a_stated_error_in_95_of_100_runs() -> None:
    random = np.random.default_rng(19)
    pairs: list[Members] = [(one, other) for one in range(4) for other in range(one + 1, 4)]
    good = 0
    for _ in range(100):

        def noise() -> float:
            return float(random.normal(1.0, 0.01))

        jobs = {job: values(share, noise) + values(share, noise) for job, share in enumerate(SHARES)}
        found = curves(NAMES, KINDS, jobs, values(1.0, noise) + values(1.0, noise))
        truth = {
            (one, other): (
                fair(SHARES[one], SHARES[other]) * noise(),
                fair(SHARES[other], SHARES[one]) * noise(),
            )
            for one, other in pairs
        }
        predicted = predictions(NAMES, KINDS, found, truth, pairs)
        off = error(predicted)
        assert off is not None
        assert off.pairs == len(pairs)
        assert off.mean_absolute_of_mean is not None
        good += off.mean_absolute < 0.05 and off.mean_absolute < off.mean_absolute_of_mean
    assert good >= 95


def test_a_pair_is_predicted_without_having_been_seen() -> None:
    jobs = {job: values(share, lambda: 1.0) for job, share in enumerate(SHARES)}
    found = curves(NAMES, KINDS, jobs, values(1.0, lambda: 1.0))
    others: dict[Members, tuple[float, ...]] = {(0, 2): (0.5, 1.0), (1, 2): (1.0, 1.0)}
    (hidden,) = predictions(NAMES, KINDS, found, {**others, (0, 1): (0.1, 0.1)}, [(0, 1)])
    (unknown,) = predictions(NAMES, KINDS, found, others, [(0, 1)])
    assert hidden.normalized == unknown.normalized
    assert (hidden.measured, unknown.measured) == ((0.1, 0.1), None)


def test_without_measured_pairs_all_kinds_count_alike() -> None:
    jobs = {job: values(share, lambda: 1.0) for job, share in enumerate(SHARES)}
    found = curves(NAMES, KINDS, jobs, values(1.0, lambda: 1.0))
    assert list(fit(KINDS, found, {})) == pytest.approx([0.5, 0.5])
    assert error(predictions(NAMES, KINDS, found, {}, [(0, 1)])) is None


def test_kinds_that_were_not_measured_give_no_curve() -> None:
    assert curves(NAMES, KINDS, {0: values(1.0, lambda: 1.0)}, []) == {}
    assert unit_edges(StressLog([])) == []


@pytest.mark.parametrize(
    ("words", "device", "message"),
    [("gravity", "cpu", "--stress gravity"), (",", "cpu", "--stress ,"), ("cache,pcie", "cpu", "over PCIe")],
)
def test_kinds_that_make_no_sense_are_refused_by_name(words: str, device: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        check_kinds(words, device)
    assert message in raised.value.message


@pytest.mark.parametrize(("device", "library"), [("cpu", "numba"), ("cuda", "cupy")])
def test_a_library_that_is_missing_is_named(
    device: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "gpuslice.profiler.colocation.host_stressors",
        "gpuslice.profiler.colocation.cuda_stressors",
    ):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(EnvironmentUnusableError) as raised:
        stressors(device)
    assert library in raised.value.message.lower()
    assert "pip install gpuslice" in str(raised.value.remedy)


def test_kinds_are_taken_once() -> None:
    assert check_kinds("cache, compute,cache", "cpu") == ("cache", "compute")
    assert check_kinds("pcie", "cuda") == ("pcie",)
