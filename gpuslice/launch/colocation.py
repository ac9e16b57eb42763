"""Runs unmodified scripts side by side on one device until all have trained together for long enough."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from gpuslice.config import Settings
from gpuslice.errors import EnvironmentUnusableError, UsageError
from gpuslice.kernels.host.slots import check_slot, slot_cores
from gpuslice.launch.command import command_line, environment
from gpuslice.launch.recording import read
from gpuslice.launch.step_control import StepControl
from gpuslice.profiler.colocation.trial import Run, measure
from gpuslice.profiler.recorder import Recording
from gpuslice.sched_core.live.processes import uninterrupted
from gpuslice.types import DeviceName

Begin = Callable[..., "subprocess.Popen[Any]"]

_LOOK_AGAIN_S = 0.05
#: A job's warm-up is at most half of its intervals: so many leave some.
_LEAST_INTERVALS = 10
#: Beyond what is asked for: starting the scripts, and a last step.
_PATIENCE_S, _ENDING_S = 600.0, 60.0
_LAST_LINES = 10
#: A script that ends before it has made two steps is not started for ever.
_EMPTY_STARTS = 3


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
    members = []
    try:
        for number, (name, words) in enumerate(zip(names, commands, strict=True)):
            place = directory / str(number)
            place.mkdir()
            members.append(_Member(name, words, settings, place, begin))
        for member in members:
            member.start()
        _until_measured(members, seconds)
        for member in members:
            member.stop()
        for member in members:
            member.finish()
    finally:
        for member in members:
            member.kill()
    return measure([member.recordings for member in members])


def _until_measured(members: Sequence[_Member], seconds: float) -> None:
    """Return when all have trained at the same time for ``seconds``, and long enough to tell."""
    begun_s = last_s = time.monotonic()
    together_s = 0.0
    while together_s < seconds or any(member.intervals < _LEAST_INTERVALS for member in members):
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


class _Member:
    """One script of a trial: its process, and the recordings of its starts."""

    def __init__(
        self, name: str, words: Sequence[str], settings: Settings, directory: Path, begin: Begin
    ) -> None:
        self.name = name
        self._command = command_line(words)
        self._settings = settings
        self._device = DeviceName.parse(settings.device)
        self._directory = directory
        self._log = directory / "output"
        self._begin = begin
        self._starts = 0
        self._earlier = 0
        self._process: subprocess.Popen[Any] | None = None
        self.recordings: list[Recording] = []

    @property
    def intervals(self) -> int:
        """Those of all starts."""
        return self._earlier + self._control.intervals

    @property
    def training(self) -> bool:
        """Whether it makes steps now."""
        return self._control.intervals >= 1

    def look(self) -> None:
        """Start it again if it has ended."""
        if self._process is None or self._process.poll() is None:
            return
        self._take(self._process)
        if len(self.recordings) >= _EMPTY_STARTS and not any(one.interval_s for one in self.recordings):
            raise UsageError(f"{self.name} makes no two steps before it ends", "let it train longer")
        self.start()

    def stop(self) -> None:
        """Have it end at its next boundary."""
        self._control.stop()

    def finish(self) -> None:
        """Wait until it has ended, and take its recording."""
        if self._process is None:
            return
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired as error:
            raise EnvironmentUnusableError(
                f"{self.name} did not end at a boundary within {_ENDING_S:.0f} s",
                "let it neither catch SystemExit nor evaluate for so long",
            ) from error
        self._take(self._process)

    def kill(self) -> None:
        """Leave no process of it."""
        if self._process is None:
            return
        _end_group(self._process.pid)
        self._process.wait()

    def start(self) -> None:
        """Start the script, with a file of its own to record into."""
        self._starts += 1
        self._recording = self._directory / f"{self._starts}.json"
        self._control = StepControl.create(self._recording)
        settings = msgspec.structs.replace(self._settings, profile=str(self._recording), profile_steps=0)
        variables = environment(settings, _visible(self._device, os.environ))
        with self._log.open("wb") as log, uninterrupted():
            try:
                self._process = self._begin(
                    self._command,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise UsageError(
                    f"cannot execute {self._command[0]}: {error.strerror}", "check the command"
                ) from error
        cores = device_cores(self._device, settings.cpu_slots)
        if cores is not None:
            with suppress(ProcessLookupError):  # it may have ended already
                os.sched_setaffinity(self._process.pid, cores)

    def _take(self, process: subprocess.Popen[Any]) -> None:
        """Its recording, now that it has ended; what it leaves behind must not disturb what comes next."""
        status = process.wait()
        _end_group(process.pid)
        self._process = None
        if status:
            how = f"was killed by signal {-status}" if status < 0 else f"failed with exit status {status}"
            raise UsageError(f"{self.name} {how}; its last lines are:\n{self._last_lines()}", "mend it")
        if not self._recording.exists():
            raise UsageError(
                f"{self.name} recorded no step; its last lines are:\n{self._last_lines()}",
                "it has to import torch and train",
            )
        self._earlier += self._control.intervals
        self.recordings.append(read(self._recording))

    def _last_lines(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-_LAST_LINES:]) or "  (none)"


def _end_group(pid: int) -> None:
    """End the processes of a session that we have started: a script's, and those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def device_cores(device: DeviceName, slots: int) -> frozenset[int] | None:
    """The cores of a host slot; ``None`` for devices that leave processes where they are."""
    if device.kind != "cpu" or device.index is None:
        return None
    cores = sorted(os.sched_getaffinity(0))
    return slot_cores(device.index, check_slot(device, slots), cores)


def _visible(device: DeviceName, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment in which unmodified scripts, which say ``cuda``, find ``device``."""
    if device.kind != "cuda" or not device.index:
        return environ
    listed = [one for one in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    if listed and device.index >= len(listed):
        raise UsageError(f"{device} is not among CUDA_VISIBLE_DEVICES", "choose another device")
    return {**environ, "CUDA_VISIBLE_DEVICES": listed[device.index] if listed else str(device.index)}
