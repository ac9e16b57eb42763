"""Runs of unmodified scripts in turns on one device: one trains, the others are suspended."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpuslice.config import Settings
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.launch.measured_script import LEAST_INTERVALS, Begin, MeasuredScript, measured_scripts
from gpuslice.profiler.colocation.spans import Span
from gpuslice.profiler.colocation.trial import Run, measure_turns

#: Intervals of checks while a script trains, and while it is being suspended.
_LOOK_AGAIN_S, _LOOK_SOON_S = 0.05, 0.001
_PATIENCE_S = 600.0
#: Least number of cycles: with fewer the result depends on where they begin.
_LEAST_CYCLES = 2
#: Successive cycles with a restart after which scripts cannot be measured in turns.
_BROKEN_CYCLES = 2


def run_sliced(
    names: Sequence[str],
    commands: Sequence[Sequence[str]],
    settings: Settings,
    seconds: float,
    turn_s: float,
    directory: Path,
    begin: Begin = subprocess.Popen,
) -> tuple[Run, ...] | None:
    """Run ``commands`` in turns of ``turn_s`` seconds, with suspends like the scheduler's. Return their runs.

    Parameters
    ----------
    settings
        Settings from `command.check`. All scripts run on their device.
    seconds
        Time to measure. Whole cycles count, at least two.
    directory
        An empty directory for the jobs' files.
    begin
        Starts a process, as ``subprocess.Popen`` does.

    Returns
    -------
    tuple of Run or None
        ``None`` if a script ends by itself so soon that no two cycles pass without a new start.

    Raises
    ------
    UsageError
        If a script fails, cannot be suspended or does not train, with its last lines.
    EnvironmentUnusableError
        If a script passes no boundary for very long, or does not end.
    """
    with measured_scripts(names, commands, settings, directory, begin, take_turns=True) as members:
        # One after the other: the device may not have room for all of them.
        for member in members:
            _begin(member)
        cycles = _take_turns(members, seconds, turn_s)
        for member in members:
            member.control.stop()
            member.control.grant()
            member.finish()
    if cycles is None:
        return None
    return measure_turns([member.recordings for member in members], cycles)


def _take_turns(members: Sequence[MeasuredScript], seconds: float, turn_s: float) -> list[list[Span]] | None:
    """Return whole cycles of all members' turns that last for ``seconds``; None if scripts end too soon.

    The first cycle does not count, because it sets up memory for the snapshots. A cycle does not count either
    if a script was started again in it or just before it.
    """
    cycles: list[list[Span]] = []
    counted_s, broken, settled = 0.0, 0, False
    while counted_s < seconds or len(cycles) < _LEAST_CYCLES:
        starts = [member.starts for member in members]
        turns = [_turn(member, turn_s) for member in members]
        whole = starts == [member.starts for member in members]
        broken = 0 if whole else broken + 1
        if broken >= _BROKEN_CYCLES:
            return None
        if whole and settled:
            cycles.append(turns)
            counted_s += turns[-1][1] - turns[0][0]
        settled = whole
    return cycles


def _begin(member: MeasuredScript) -> None:
    member.start()
    _until(member, lambda: member.intervals >= LEAST_INTERVALS, _LOOK_AGAIN_S)
    _suspend(member)


def _turn(member: MeasuredScript, turn_s: float) -> Span:
    begun_s = time.monotonic()
    member.control.grant()
    while (left_s := begun_s + turn_s - time.monotonic()) > 0:
        time.sleep(min(left_s, _LOOK_AGAIN_S))
        member.look()
    _suspend(member)
    return begun_s, time.monotonic()


def _suspend(member: MeasuredScript) -> None:
    member.control.withdraw()
    _until(member, lambda: member.control.suspended, _LOOK_SOON_S)


def _until(member: MeasuredScript, there: Callable[[], bool], every_s: float) -> None:
    begun_s = time.monotonic()
    while not there():
        time.sleep(every_s)
        member.look()
        if time.monotonic() - begun_s > _PATIENCE_S:
            raise EnvironmentUnusableError(
                f"{member.name} passed no boundary at which it can be suspended for {_PATIENCE_S:.0f} s",
                "docs/run.md says what is a boundary",
            )
