"""``gpuslice colocate``: how fast scripts train that share a device."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from gpuslice import config
from gpuslice.errors import EnvironmentUnusableError, UsageError

from .declare import Argument, Option

if TYPE_CHECKING:
    from gpuslice.launch.kept_trials import KeptTrials
    from gpuslice.profiler.colocation.plan import Plan, Task
    from gpuslice.profiler.colocation.result import Result
    from gpuslice.profiler.colocation.stress import Stressed
    from gpuslice.profiler.colocation.trial import Run

    RunTask = Callable[[Task], tuple[Run, ...]]
    RunStress = Callable[[Task], tuple[Stressed, ...]]


def command(
    scripts: Annotated[
        list[str], Argument(metavar='"SCRIPT.py [ARGS]"...', help="A script and its arguments as one word.")
    ],
    device: Annotated[
        str, Option(help="The device that all of them run on: cpu, cpu:0 or cuda:0.")
    ] = "cpu:0",
    pairs: Annotated[bool, Option("--pairs", help="Run every pair together; the default.")] = False,
    subsets: Annotated[int | None, Option(metavar="K", help="Run every K of them together.")] = None,
    seconds: Annotated[float, Option(help="How long they train together each time.")] = 20.0,
    turn: Annotated[float, Option(help="Seconds of a turn of a sliced set.")] = 2.0,
    repeats: Annotated[int, Option(help="Rounds; at least 2.")] = 3,
    sample: Annotated[int | None, Option(metavar="N", help="Measure only N of the sets, at random.")] = None,
    stress: Annotated[
        str, Option(metavar="KINDS", help="Loads beside each script: bandwidth,compute,cache,pcie.")
    ] = "",
    json: Annotated[Path | None, Option(metavar="FILE", help="Write all figures as JSON.")] = None,
    csv: Annotated[Path | None, Option(metavar="FILE", help="Write a line for each member of a set.")] = None,
    html: Annotated[Path | None, Option(metavar="FILE", help="Write a page.")] = None,
) -> None:
    """Run scripts alone and together, and say which to pack.

    docs/measure.md describes the measurement. Ctrl-C keeps what was measured; the same
    command goes on from there.
    """
    from gpuslice.launch.command import check, check_outputs, command_line
    from gpuslice.launch.kept_trials import KeptTrials, kept_path
    from gpuslice.profiler.colocation.plan import Plan
    from gpuslice.profiler.colocation.result import make_result

    if pairs and subsets not in (None, 2):
        raise UsageError(f"both --pairs and --subsets {subsets} are given", "choose one of the two")
    for option, value in (("--seconds", seconds), ("--turn", turn)):
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"{option} {value:g} is not a time", "give a number of seconds above 0")
    commands = [_words(script) for script in scripts]
    for words in commands:
        command_line(words)
    settings = check(config.load(device=device))
    kinds = _stress_kinds(stress, settings) if stress else ()
    plan = Plan(len(scripts), subsets or 2, repeats, kinds, sample)
    check_outputs({"--json": json, "--csv": csv, "--html": html})
    names = unique(scripts)
    limit_bytes = memory_bytes(settings)
    numbers = (settings.cpu_slots, plan.size, seconds, turn, kinds)
    kept = kept_path(config.state_directory(), commands, device, numbers)
    with KeptTrials(kept) as trials, _ended_like_ctrl_c():
        run = _runner(names, commands, settings, seconds, turn)
        load = _stresser(names, commands, settings, kinds, seconds)
        complete = _measure(plan, trials, names, run, limit_bytes, load)
        ours = [one for one in trials.trials if one.round < repeats]
        result = make_result(names, device, seconds, turn, plan, ours, limit_bytes)
        _write(result, json, csv, html)
        _tell(result)
        if complete:
            trials.forget()
    if not complete:
        sys.stderr.write("gpuslice: interrupted; the same command goes on from here\n")
        raise typer.Exit(130)


def measure_all(
    plan: Plan,
    trials: KeptTrials,
    run: RunTask,
    limit_bytes: int | None,
    tell: Callable[[int, Task], None],
    load: RunStress | None = None,
) -> bool:
    """Run the trials of ``plan`` that are not kept. Return False if Ctrl-C came before all were done.

    Parameters
    ----------
    tell
        Called before each trial, with how many are left.
    load
        Runs the tasks with our own loads.
    """
    from gpuslice.profiler.colocation.result import memories, too_large
    from gpuslice.profiler.colocation.trial import Trial

    left = plan.remaining([one.task for one in trials.trials])
    try:
        for position, task in enumerate(left):
            if task.members in too_large(plan, memories(trials.trials), limit_bytes):
                continue
            tell(len(left) - position, task)
            begun_s = time.monotonic()
            runs: tuple[Run, ...] = ()
            stressed: tuple[Stressed, ...] = ()
            if task.mode in ("stressed", "reference"):
                assert load is not None, "the plan has such tasks"
                stressed = load(task)
            else:
                runs = run(task)
            wall_s = time.monotonic() - begun_s
            trials.add(Trial(task.round, task.members, task.mode, wall_s, runs, stressed))
    except KeyboardInterrupt:
        return False
    return True


@contextmanager
def _ended_like_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C, so that the scripts end together with this process."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    former = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def unique(scripts: Sequence[str]) -> list[str]:
    """Return a name for each job: what the user wrote, with a number if it was written before."""
    return [
        script if scripts.index(script) == at else f"{script} #{scripts[: at + 1].count(script)}"
        for at, script in enumerate(scripts)
    ]


def _measure(
    plan: Plan,
    trials: KeptTrials,
    names: Sequence[str],
    run: RunTask,
    limit_bytes: int | None,
    load: RunStress,
) -> bool:
    from gpuslice.profiler.axes import duration

    if trials.trials:
        sys.stderr.write(f"gpuslice: going on after {len(trials.trials)} trials that were kept\n")

    def tell(left: int, task: Task) -> None:
        spent_s = [one.wall_s for one in trials.trials]
        estimate = f", about {duration(left * sum(spent_s) / len(spent_s))} left" if spent_s else ""
        who = " + ".join(names[job] for job in task.members) or "our own loads"
        done = len(spent_s)
        bar = "#" * (20 * done // (done + left))
        sys.stderr.write(f"[{bar:20}] {done + 1}/{done + left}{estimate}: {who}, {task.mode}\n")

    return measure_all(plan, trials, run, limit_bytes, tell, load)


def _runner(
    names: Sequence[str],
    commands: Sequence[Sequence[str]],
    settings: config.Settings,
    seconds: float,
    turn_s: float,
) -> RunTask:
    from gpuslice.launch.colocation import run_together
    from gpuslice.launch.time_slicing import run_sliced

    def run(task: Task) -> tuple[Run, ...]:
        who, words = [names[job] for job in task.members], [commands[job] for job in task.members]
        with TemporaryDirectory(prefix="gpuslice-colocate-") as directory:
            if task.mode == "sliced":
                found = run_sliced(who, words, settings, seconds, turn_s, Path(directory)) or ()
            else:
                found = run_together(who, words, settings, seconds, Path(directory))
        if not all(one.steps for one in found):
            raise EnvironmentUnusableError(
                f"{' + '.join(who)}: no step was made while all trained, after the warm-ups",
                "give more --seconds",
            )
        return found

    return run


def _stress_kinds(stress: str, settings: config.Settings) -> tuple[str, ...]:
    from gpuslice.launch.stressor import check_kinds, stressors
    from gpuslice.types import DeviceName

    device = DeviceName.parse(settings.device)
    kinds = check_kinds(stress, device.kind)
    stressors(device.kind)
    return kinds


def _stresser(
    names: Sequence[str],
    commands: Sequence[Sequence[str]],
    settings: config.Settings,
    kinds: Sequence[str],
    seconds: float,
) -> RunStress:
    from gpuslice.launch.stress_sweep import reference, sweep

    def load(task: Task) -> tuple[Stressed, ...]:
        with TemporaryDirectory(prefix="gpuslice-colocate-") as directory:
            place = Path(directory)
            if task.mode == "reference":
                return reference(settings, kinds, seconds, task.round, place)
            (job,) = task.members
            return sweep(names[job], commands[job], settings, kinds, seconds, task.round, place)

    return load


def memory_bytes(settings: config.Settings) -> int | None:
    """Return the memory of the measured device in bytes; None if the driver does not tell.

    Raises
    ------
    EnvironmentUnusableError
        If there is no such slot, or no driver.
    """
    import psutil

    from gpuslice.kernels.host.slots import check_slot
    from gpuslice.kernels.nvml import read_driver
    from gpuslice.launch.visible_gpus import visible
    from gpuslice.types import DeviceName

    device = DeviceName.parse(settings.device)
    if device.kind == "cpu":
        check_slot(device, settings.cpu_slots)
        return int(psutil.virtual_memory().total)
    driver = read_driver()
    if driver.problem:
        raise EnvironmentUnusableError(driver.problem, "see `gpuslice doctor`")
    gpus, number = visible(driver.gpus, os.environ), device.index or 0
    return gpus[number].total_bytes if number < len(gpus) else None


def _words(script: str) -> list[str]:
    try:
        return shlex.split(script)
    except ValueError as error:
        raise UsageError(f"{script!r} is no command line: {error}", "check its quotes") from error


def _write(result: Result, json: Path | None, csv: Path | None, html: Path | None) -> None:
    import msgspec

    from gpuslice.profiler.colocation.page import page
    from gpuslice.profiler.colocation.result import to_csv

    if json is not None:
        json.write_bytes(msgspec.json.encode(result) + b"\n")
    if csv is not None:
        csv.write_text(to_csv(result), encoding="utf-8")
    if html is not None:
        html.write_text(page(result), encoding="utf-8")


def _tell(result: Result) -> None:
    from gpuslice.profiler.colocation.page import interval_text, verdict_text

    for job in result.jobs:
        print(f"{job.name}: {job.steps_per_second:.4g} steps/s alone {interval_text(job.interval)}")
    for one in result.sets:
        if not one.measured:
            continue
        members, total = " + ".join(one.members), f"total {one.total:.3f} {interval_text(one.total_interval)}"
        # The verdict weighs both modes, and is told once.
        sliced = one.mode == "sliced"
        print(f"{members}, sliced: {total}" if sliced else f"{members}: {verdict_text(one)}, {total}")
        for name, value, interval in zip(one.members, one.normalized, one.interval, strict=True):
            print(f"  {name}: {value:.3f} of its speed alone {interval_text(interval)}")
    off = result.prediction_error
    for pair in result.predictions:
        first, second = pair.normalized
        known = (
            "" if pair.measured is None else f"; measured {pair.measured[0]:.3f} and {pair.measured[1]:.3f}"
        )
        print(f"{' + '.join(pair.members)}: predicted {first:.3f} and {second:.3f}{known}")
    if off is not None:
        print(f"prediction error over {off.pairs} pairs held out: {off.mean_absolute:.3f} on average")
