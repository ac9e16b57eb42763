"""Runs unmodified scripts side by side on one device until all have trained together for long enough."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from gpuslice.config import Settings
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.launch.measured_script import LEAST_INTERVALS, Begin, MeasuredScript, measured_scripts
from gpuslice.profiler.colocation.trial import Run, measure

_LOOK_AGAIN_S = 0.05
#: Beyond what is asked for: starting the scripts, and a last step.
_PATIENCE_S = 600.0


def run_together(
    names: Sequence[str],
    commands: Sequence[Sequence[str]],
    settings: Settings,
    seconds: float,
    directory: Path,
    begin: Begin = subprocess.Popen,
) -> tuple[Run, ...]:
    """Run ``commands`` together; a script that ends early is started again.

    Parameters
    ----------
    settings
        Checked ones; their device is where all of them run.
    seconds
        How long all are to train at the same time.
    directory
        Empty; for what the jobs write.
    begin
        Starts a process, as ``subprocess.Popen`` does.

    Raises
    ------
    UsageError
        If a script fails or does not train, with its last lines.
    EnvironmentUnusableError
        If they do not come to train together, or one does not end.
    """
    with measured_scripts(names, commands, settings, directory, begin) as members:
        for member in members:
            member.start()
        _until_measured(members, seconds)
        for member in members:
            member.stop()
        for member in members:
            member.finish()
    return measure([member.recordings for member in members])


def _until_measured(members: Sequence[MeasuredScript], seconds: float) -> None:
    """Return when all have trained at the same time for ``seconds``, and long enough to tell."""
    begun_s = last_s = time.monotonic()
    together_s = 0.0
    while together_s < seconds or any(member.intervals < LEAST_INTERVALS for member in members):
        time.sleep(_LOOK_AGAIN_S)
        now_s = time.monotonic()
        for member in members:
            member.look()
        if all(member.training for member in members):
            together_s += now_s - last_s
        last_s = now_s
        if now_s - begun_s > 10 * seconds + _PATIENCE_S:
            slow = ", ".join(f"{member.name} made {member.intervals} steps" for member in members)
            raise EnvironmentUnusableError(
                f"the scripts did not train together for {seconds:g} s: {slow}", "see what they do at first"
            )
