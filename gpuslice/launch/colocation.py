"""Run unmodified scripts side by side on one device until all have trained together for long enough.

In between, each of them trains while the others are stopped, many times in turn. So changes of the machine
affect both measurements alike.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from gpuslice.config import Settings
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.launch.measured_script import LEAST_INTERVALS, Begin, MeasuredScript, measured_scripts
from gpuslice.profiler.colocation.trial import Run, measure

_LOOK_AGAIN_S = 0.02
#: Number of slices alone, and least number of the slowest script's steps in each. A step in two slices is
#: counted by its parts, as if it were equally fast in both.
_SLICES, _SLICE_STEPS = 4, 10
#: Time beyond the wanted seconds, for starting the scripts, and a last step.
_PATIENCE_S = 600.0


def run_together(
    names: Sequence[str],
    commands: Sequence[Sequence[str]],
    settings: Settings,
    seconds: float,
    directory: Path,
    begin: Begin = subprocess.Popen,
) -> tuple[Run, ...]:
    """Run ``commands`` together, and return their recordings. A script that ends early is started again.

    Parameters
    ----------
    settings
        Settings from `command.check`. All scripts run on their device.
    seconds
        Time that all scripts train at once. The times in which they train alone add up to it, too.
    directory
        An empty directory for the jobs' files.
    begin
        Starts a process, as ``subprocess.Popen`` does.

    Raises
    ------
    UsageError
        If a script fails or does not train, with its last lines.
    EnvironmentUnusableError
        If the scripts do not get to train together, or one does not end.
    """
    with measured_scripts(names, commands, settings, directory, begin) as members:
        for member in members:
            member.start()
        _alternate(members, seconds)
        for member in members:
            member.stop()
        for member in members:
            member.finish()
    return measure([member.recordings for member in members], [member.halts for member in members])


def _alternate(members: Sequence[MeasuredScript], seconds: float) -> None:
    """Let all scripts train at once, then one alone, in turn, until all trained at once for ``seconds``."""
    deadline = _Deadline(members, 10 * seconds + _PATIENCE_S)
    step_s = _warm_up(members, deadline)
    if len(members) == 1:
        _train(members, seconds, deadline)
        return
    slice_s = max(seconds / (_SLICES * len(members)), _SLICE_STEPS * step_s)
    together_s = 0.0
    while together_s < seconds:
        for member in members:
            _train(members, slice_s, deadline)
            together_s += slice_s
            others = [other for other in members if other is not member]
            for other in others:
                other.halt()
            _train([member], slice_s, deadline)
            for other in others:
                other.proceed()


def _warm_up(members: Sequence[MeasuredScript], deadline: _Deadline) -> float:
    """Wait until all have made enough steps. Return the seconds that the slowest takes for one step."""
    began_s: dict[str, float] = {}
    while any(member.intervals < LEAST_INTERVALS for member in members):
        deadline.check()
        for member in members:
            if member.training:
                began_s.setdefault(member.name, time.monotonic())
    now_s = time.monotonic()
    return max((now_s - began_s.get(one.name, now_s)) / one.intervals for one in members)


def _train(members: Sequence[MeasuredScript], seconds: float, deadline: _Deadline) -> None:
    """Wait until all ``members`` have trained for ``seconds``."""
    trained_s, last_s = 0.0, time.monotonic()
    while trained_s < seconds:
        deadline.check()
        now_s = time.monotonic()
        if all(member.training for member in members):
            trained_s += now_s - last_s
        last_s = now_s


class _Deadline:
    """A time limit for all scripts, which also restarts scripts that have ended."""

    def __init__(self, members: Sequence[MeasuredScript], seconds: float) -> None:
        self._members = members
        self._end_s = time.monotonic() + seconds

    def check(self) -> None:
        time.sleep(_LOOK_AGAIN_S)
        for member in self._members:
            member.look()
        if time.monotonic() > self._end_s:
            slow = ", ".join(f"{member.name} made {member.intervals} steps" for member in self._members)
            raise EnvironmentUnusableError(
                f"the scripts did not train together for long enough: {slow}",
                "see what the scripts do before they train",
            )
