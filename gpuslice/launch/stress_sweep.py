"""Runs of loads of known kinds and intensities beside a script, and beside a load of the same kind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gpuslice.config import Settings
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.launch.measured_script import (
    LEAST_INTERVALS,
    MeasuredScript,
    keep_on_cores,
    measured_scripts,
    visible_to_job,
)
from gpuslice.profiler.colocation.spans import Span
from gpuslice.profiler.colocation.stress import (
    Phase,
    Stressed,
    StressLog,
    halt_schedule,
    recorded_edges,
    schedule,
    stressed,
    unit_edges,
)
from gpuslice.types import DeviceName

_LOOK_AGAIN_S = 0.02
#: Time beyond the schedule, to import and compile the load, and to start a script.
_PATIENCE_S = 600.0
#: The reference load lasts until it is told to end.
_ENDLESS_S = 1e6


def sweep(
    name: str,
    words: Sequence[str],
    settings: Settings,
    kinds: Sequence[str],
    seconds: float,
    seed: int,
    directory: Path,
) -> tuple[Stressed, ...]:
    """Run a script beside loads of ``kinds``, each level for ``seconds``. Return their effects on each other.

    Parameters
    ----------
    settings
        Settings from `command.check`. Their device is loaded.
    seed
        Seed of the order of the loads.
    directory
        An empty directory for the processes' files.

    Raises
    ------
    UsageError
        If the script fails or does not train.
    EnvironmentUnusableError
        If the load cannot be made on this machine, or a process does not end.
    """
    with measured_scripts([name], [words], settings, directory) as (job,):
        job.start()
        _until(lambda: job.intervals >= LEAST_INTERVALS, name, 0.0, job.look)
        phases = schedule(kinds, seconds, seed)
        with _stressor(phases, settings, directory / "load") as load:
            halter = _Halter(job, load, halt_schedule(phases))
            log = load.finish(sum(phase.seconds for phase in phases), halter.look)
        job.proceed()
        job.stop()
        job.finish()
    return stressed(recorded_edges(job.recordings), log, job.halts)


def reference(
    settings: Settings, kinds: Sequence[str], seconds: float, seed: int, directory: Path
) -> tuple[Stressed, ...]:
    """Run loads of each kind beside a load of the same kind at full intensity. Return their effects."""
    found: list[Stressed] = []
    for kind in kinds:
        phases = schedule([kind], seconds, seed)
        with (
            _stressor([Phase(kind, 1.0, _ENDLESS_S)], settings, directory / f"{kind}-reference") as one,
            _stressor(phases, settings, directory / kind, after=one) as other,
        ):
            log = other.finish(sum(phase.seconds for phase in phases), one.check)
            one.end()
            found += stressed(unit_edges(one.finish(0.0)), log)
    return tuple(found)


class _Halter:
    """Halts a job during ``spans``, in seconds since the load began, and keeps the real times."""

    def __init__(self, job: MeasuredScript, load: _Stressor, spans: Sequence[Span]) -> None:
        self._job, self._load, self._spans = job, load, spans
        self._begun_s: float | None = None

    def look(self) -> None:
        self._job.look()
        if self._begun_s is None:
            self._begun_s = time.monotonic() if self._load.loading else None
            return
        at_s = time.monotonic() - self._begun_s
        if any(begin <= at_s < end for begin, end in self._spans):
            self._job.halt()
        else:
            self._job.proceed()


class _Stressor:
    """A process that loads the device and writes a log."""

    def __init__(self, phases: Sequence[Phase], settings: Settings, path: Path) -> None:
        self._log, self._ready = path.with_suffix(".json"), path.with_suffix(".ready")
        self._output = path.with_suffix(".output")
        device = DeviceName.parse(settings.device)
        words = [str(self._log), device.kind, msgspec.json.encode(list(phases)).decode()]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpuslice.launch.stressor", *words],
                env=dict(visible_to_job(device, os.environ)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        keep_on_cores(self.process.pid, device, settings.cpu_slots)

    @property
    def loading(self) -> bool:
        """True if the load's schedule has begun."""
        return self._ready.exists()

    def check(self) -> None:
        """Raise ``EnvironmentUnusableError`` if the process has failed."""
        if self.process.poll():
            lines = self._output.read_text(encoding="utf-8", errors="replace").splitlines()
            raise EnvironmentUnusableError(
                f"the load of the device failed: {lines[-1] if lines else self.process.returncode}",
                "leave --stress out, or some of its kinds",
            )

    def end(self) -> None:
        """Make the process end now and write its log."""
        self.process.terminate()

    def finish(self, seconds: float, look: Callable[[], object] = lambda: None) -> StressLog:
        """Wait until the schedule of ``seconds`` is over, calling ``look`` meanwhile. Return the log."""

        def ended() -> bool:
            self.check()
            return self.process.poll() is not None

        _until(ended, "the load of the device", seconds, look)
        self.check()
        return msgspec.json.decode(self._log.read_bytes(), type=StressLog)


@contextmanager
def _stressor(
    phases: Sequence[Phase], settings: Settings, path: Path, after: _Stressor | None = None
) -> Iterator[_Stressor]:
    if after is not None:
        _until(lambda: after.loading, "the load of the device", 0.0, after.check)
    load = _Stressor(phases, settings, path)
    try:
        yield load
    finally:
        load.process.kill()
        load.process.wait()


def _until(there: Callable[[], bool], what: str, seconds: float, look: Callable[[], object]) -> None:
    begun_s = time.monotonic()
    while not there():
        time.sleep(_LOOK_AGAIN_S)
        look()
        if time.monotonic() - begun_s > 10 * seconds + _PATIENCE_S:
            raise EnvironmentUnusableError(f"{what} took too long", "see what the device is doing")
