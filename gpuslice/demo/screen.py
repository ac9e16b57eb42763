"""Live output of the demonstration: a picture on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpuslice.sched_core.lifecycle.events import Command, Event, Exited, Reported, Tell
from gpuslice.wire import Resume, Resumed, Suspended

from .recorder import JobRecord, Recorder
from .training import Training

_BAR_WIDTH = 24


class Screen(Protocol):
    """A live output of the shared run, as a context manager."""

    def __enter__(self) -> Screen: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def observe(self, event: Event, now: float, commands: Sequence[Command]) -> None:
        """Show an event. It is called after the recorder has recorded the event."""
        ...


def open_screen(
    console: Console, recorder: Recorder, trainings: Sequence[Training], elapsed_s: Callable[[], float]
) -> Screen:
    """Return a live picture if ``console`` is a terminal, else plain lines."""
    steps = {training.name: training.steps for training in trainings}
    if console.is_terminal:
        return Picture(console, recorder, steps, elapsed_s)
    return Lines(console, recorder, steps)


class Lines:
    """An output with one line for each start, switch and end."""

    def __init__(self, console: Console, recorder: Recorder, steps: Mapping[str, int]) -> None:
        self._console = console
        self._recorder = recorder
        self._steps = steps

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: nothing is open."""

    def observe(self, event: Event, now: float, commands: Sequence[Command]) -> None:
        """Print a line if ``event`` is a suspend, a resume or an end."""
        now_s = self._recorder.since_start_s(now)
        if isinstance(event, Exited):
            self._print(now_s, self._recorder.jobs[event.job], f"ended with exit code {event.code}")
        elif isinstance(event, Reported):
            job = self._recorder.jobs[event.job]
            match event.message:
                case Suspended():
                    one = job.slice_of(event.message.epoch)
                    moved = f"{one.nbytes / 1e6:.1f} MB moved"
                    self._print(now_s, job, f"suspended in {_ms(one.suspend_s)}, {moved}")
                case Resumed():
                    self._resumed(now_s, job)
        for command in commands:
            if isinstance(command, Tell) and isinstance(command.message, Resume):
                job = self._recorder.jobs[command.job]
                if job.slices[-1].resumed_s is not None:  # Resumed came before the Resume
                    self._resumed(now_s, job)

    def _resumed(self, now_s: float, job: JobRecord) -> None:
        again = len(job.slices) > 1
        self._print(now_s, job, f"resumed in {_ms(job.slices[-1].resume_s)}" if again else "begins")

    def _print(self, now_s: float, job: JobRecord, what: str) -> None:
        device = job.slices[-1].device if job.slices else "-"
        steps = f"step {job.step}/{self._steps[job.name]}"
        line = f"{now_s:6.2f} s  {device:7} {job.name:8} {steps:15} {what}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class Picture:
    """A table of the device and the jobs that is drawn again several times a second."""

    def __init__(
        self, console: Console, recorder: Recorder, steps: Mapping[str, int], elapsed_s: Callable[[], float]
    ) -> None:
        self._recorder = recorder
        self._steps = steps
        self._elapsed_s = elapsed_s
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=8)

    def __enter__(self) -> Picture:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def observe(self, event: Event, now: float, commands: Sequence[Command]) -> None:
        """Do nothing: the next drawing shows the event."""

    def render(self) -> RenderableType:
        """Return the present picture."""
        table = Table(expand=False, pad_edge=False)
        for header in ("job", "on", "progress"):
            table.add_column(header)
        for header in ("steps", "slices", "last suspend", "last resume"):
            table.add_column(header, justify="right")
        holders = {job: device for device, job in list(self._recorder.holders.items())}
        for job in list(self._recorder.jobs.values()):
            table.add_row(*self._row(job, holders.get(job.name)))
        devices = ", ".join(f"{device}: {job}" for job, device in holders.items()) or "no job on the device"
        return Group(Text(f"{self._elapsed_s():5.1f} s   {devices}", style="bold"), table)

    def _row(self, job: JobRecord, device: str | None) -> list[RenderableType]:
        total = self._steps[job.name]
        step = max(job.step, self._recorder.heard.get(job.name, 0))
        if job.exit_code is not None:
            where = Text("done", style="green") if job.exit_code == 0 else Text("failed", style="red")
        elif device is not None:
            where = Text(device, style="bold cyan")
        else:
            where = Text("parked" if job.slices else "waiting", style="dim")
        suspends = job.suspends
        resumes = [one for one in job.slices[1:] if one.resumed_s is not None]
        return [
            Text(job.name),
            where,
            ProgressBar(total=total, completed=step, width=_BAR_WIDTH),
            Text(f"{step}/{total}"),
            Text(str(len(job.slices))),
            Text(_ms(suspends[-1].suspend_s) if suspends else ""),
            Text(_ms(resumes[-1].resume_s) if resumes else ""),
        ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
