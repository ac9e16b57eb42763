"""One script of an experiment: its process, which is restarted if it ends early, and its recordings."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from gpuslice.config import Settings
from gpuslice.errors import EnvironmentUnusableError, UsageError
from gpuslice.kernels.host.slots import check_slot, slot_cores
from gpuslice.launch.command import command_line, environment
from gpuslice.launch.recording import read
from gpuslice.launch.step_control import StepControl
from gpuslice.profiler.colocation.spans import Span
from gpuslice.profiler.recorder import Recording
from gpuslice.sched_core.nodes.processes import uninterrupted
from gpuslice.types import DeviceName

Begin = Callable[..., "subprocess.Popen[Any]"]

#: Least number of step intervals. Warm-up is at most half of them, so some are left.
LEAST_INTERVALS = 10
_ENDING_S = 60.0
_LAST_LINES = 10
#: Most starts of a script that ends before two steps. Then the experiment fails.
_EMPTY_STARTS = 3


@contextmanager
def measured_scripts(
    names: Sequence[str],
    commands: Sequence[Sequence[str]],
    settings: Settings,
    directory: Path,
    begin: Begin = subprocess.Popen,
    *,
    take_turns: bool = False,
) -> Iterator[list[MeasuredScript]]:
    """Yield the scripts of a trial, not yet started. Kill all their processes at the end.

    Parameters
    ----------
    settings
        Settings from `command.check`. All scripts run on their device.
    directory
        An empty directory for the jobs' files.
    begin
        Starts a process, as ``subprocess.Popen`` does.
    """
    scripts: list[MeasuredScript] = []
    try:
        for number, (name, words) in enumerate(zip(names, commands, strict=True)):
            place = directory / str(number)
            place.mkdir()
            scripts.append(MeasuredScript(name, words, settings, place, begin, takes_turns=take_turns))
        yield scripts
    finally:
        for script in scripts:
            script.kill()


class MeasuredScript:
    """One script of a trial: its process, and the recordings of its starts."""

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        settings: Settings,
        directory: Path,
        begin: Begin,
        *,
        takes_turns: bool = False,
    ) -> None:
        self.name = name
        self._command = command_line(words)
        self._settings = settings
        self._device = DeviceName.parse(settings.device)
        self._directory = directory
        self._log = directory / "output"
        self._begin = begin
        self._takes_turns = takes_turns
        self._control: StepControl | None = None
        self.starts = 0
        self._earlier = 0
        self._process: subprocess.Popen[Any] | None = None
        self.recordings: list[Recording] = []
        #: Spans in which the script's processes were halted, by the host's monotonic clock.
        self.halts: list[Span] = []
        self._halted_s: float | None = None

    @property
    def control(self) -> StepControl:
        """The control of the running process."""
        assert self._control is not None, "it was started"
        return self._control

    @property
    def intervals(self) -> int:
        """Number of step intervals in all starts of the script."""
        return self._earlier + self.control.intervals

    @property
    def training(self) -> bool:
        """True if the script makes steps now."""
        return self.control.intervals >= 1

    def look(self) -> None:
        """Start the script again if it has ended."""
        if self._process is None or self._process.poll() is None:
            return
        self._take(self._process)
        if len(self.recordings) >= _EMPTY_STARTS and not any(one.interval_s for one in self.recordings):
            raise UsageError(f"{self.name} makes no two steps before it ends", "let it train longer")
        self.start()

    def halt(self) -> None:
        """Stop the script's processes (SIGSTOP) until ``proceed``. Their memory stays."""
        if self._halted_s is None and self._process is not None:
            self._halted_s = time.perf_counter()
            _signal_group(self._process.pid, signal.SIGSTOP)

    def proceed(self) -> None:
        """Continue the script's processes if they were halted."""
        if self._halted_s is not None:
            if self._process is not None:
                _signal_group(self._process.pid, signal.SIGCONT)
            self.halts.append((self._halted_s, time.perf_counter()))
            self._halted_s = None

    def stop(self) -> None:
        """Make the script end at its next boundary."""
        self.control.stop()

    def finish(self) -> None:
        """Wait until the script has ended, and read its recording."""
        if self._process is None:
            return
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired as error:
            raise EnvironmentUnusableError(
                f"{self.name} did not end at a boundary within {_ENDING_S:.0f} s",
                "it must not catch SystemExit, nor evaluate for that long",
            ) from error
        self._take(self._process)

    def kill(self) -> None:
        """Kill all processes of the script, and close its control."""
        if self._process is not None:
            _end_group(self._process.pid)
            self._process.wait()
        if self._control is not None:
            self._control.close()

    def start(self) -> None:
        """Start the script, which records into a new file."""
        self.proceed()
        away = self._control is not None and self._control.away
        self.starts += 1
        self._recording = self._directory / f"{self.starts}.json"
        self._control = StepControl.create(self._recording, takes_turns=self._takes_turns)
        if away:
            self._control.withdraw()
        settings = msgspec.structs.replace(self._settings, profile=str(self._recording), profile_steps=0)
        variables = environment(settings, visible_to_job(self._device, os.environ))
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
        keep_on_cores(self._process.pid, self._device, settings.cpu_slots)

    def _take(self, process: subprocess.Popen[Any]) -> None:
        """Read the recording of an ended process, and kill processes that it left behind."""
        status = process.wait()
        _end_group(process.pid)
        self._process = None
        if status:
            how = f"was killed by signal {-status}" if status < 0 else f"failed with exit status {status}"
            raise UsageError(
                f"{self.name} {how}; its last lines are:\n{self._last_lines()}", "correct the script"
            )
        if not self._recording.exists():
            raise UsageError(
                f"{self.name} recorded no step; its last lines are:\n{self._last_lines()}",
                "it has to import torch and train",
            )
        self._earlier += self.control.intervals
        self.control.close()
        self.recordings.append(read(self._recording))

    def _last_lines(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-_LAST_LINES:]) or "  (none)"


def _end_group(pid: int) -> None:
    """Kill the processes of a script's process group."""
    _signal_group(pid, signal.SIGKILL)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def device_cores(device: DeviceName, slots: int) -> frozenset[int] | None:
    """Return the cores of a host slot; None for devices that do not bind processes."""
    if device.kind != "cpu" or device.index is None:
        return None
    cores = sorted(os.sched_getaffinity(0))
    return slot_cores(device.index, check_slot(device, slots), cores)


def keep_on_cores(pid: int, device: DeviceName, slots: int) -> None:
    """Bind a process that was just started to the cores of ``device``, if that is a host slot."""
    cores = device_cores(device, slots)
    if cores is not None:
        with suppress(ProcessLookupError):  # the process may have ended already
            os.sched_setaffinity(pid, cores)


def visible_to_job(device: DeviceName, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return ``environ`` such that ``cuda`` in an unmodified script means ``device``."""
    if device.kind != "cuda" or not device.index:
        return environ
    listed = [one for one in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    if listed and device.index >= len(listed):
        raise UsageError(f"{device} is not among CUDA_VISIBLE_DEVICES", "choose another device")
    return {**environ, "CUDA_VISIBLE_DEVICES": listed[device.index] if listed else str(device.index)}
