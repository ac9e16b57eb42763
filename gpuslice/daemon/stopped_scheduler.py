"""What is left of a scheduler that does not run: its jobs, events and their output, from its directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from msgspec.structs import replace

from gpuslice.daemon.observer import EventObserver
from gpuslice.daemon.replay import JournalReplay
from gpuslice.errors import EnvironmentUnusableError, UsageError
from gpuslice.sched_core.journal.event_listing import history
from gpuslice.sched_core.journal.journal import FILE
from gpuslice.sched_core.live.job_logs import log_files, part
from gpuslice.sched_core.live.status import Overview
from gpuslice.verbs import EventInfo, JobInfo, LogFiles, SchedulerStatus


class StoppedScheduler:
    """A reader of a stopped scheduler's journal with the methods of `Client` that only read.

    Parameters
    ----------
    directory
        The scheduler's.

    Raises
    ------
    EnvironmentUnusableError
        If no scheduler has left a journal there.
    JournalError
        If it cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._replay = JournalReplay(directory / FILE)
        self._observer = EventObserver(self._replay.core)
        self._last_s = 0.0

    @property
    def directory(self) -> Path:
        """Return the scheduler's directory."""
        return self._directory

    def __enter__(self) -> StoppedScheduler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._replay.close()

    def last_unix_s(self) -> float | None:
        """Return the Unix time of the last event. Return None if the journal does not tell."""
        self._advance()
        return self._replay.journal.wall_clock().unix_s(self._last_s)

    def status(self, *, fold: bool = False) -> SchedulerStatus:
        """Return the jobs as they stood after the last event, as `Client.status` does. ``pid`` is 0."""
        self._advance()
        core = self._replay.core
        policy = core.allocation.planning.policy
        overview = Overview(core, self._observer.job_history, policy=policy, pid=0)
        status = overview.status(0, self._last_s, fold=fold)
        jobs = list(status.jobs)
        while len(jobs) < status.job_count:
            jobs += overview.status(len(jobs), self._last_s, fold=fold).jobs
        return replace(status, jobs=tuple(jobs))

    def jobs(self) -> list[JobInfo]:
        """Return all jobs, in order of submission."""
        return list(self.status().jobs)

    def wait(self, job: str, timeout_s: float | None = None) -> JobInfo:
        """Return a job that has ended.

        Raises
        ------
        EnvironmentUnusableError
            If it has not: nobody is there to tell when it does.
        """
        found = self._known(job)
        if not found.ended:
            raise EnvironmentUnusableError(
                f"no scheduler runs in {self._directory}, and job {job!r} had not ended by its last event",
                "`gpuslice up` with the same options goes on with it",
            )
        return found

    def logs(self, job: str) -> LogFiles:
        """Return where the output of ``job`` is."""
        return log_files(self._log, self._known(job).id)

    def read_log(self, job: str, offset: int = 0, *, err: bool = False) -> bytes:
        """Return the next part of what ``job`` has printed, or written to stderr, from byte ``offset`` on."""
        return part(self._log(job, "err" if err else "out"), offset)

    def events(self, after: int = 0) -> Iterator[EventInfo]:
        """Yield what happened after event number ``after``, the oldest event first."""
        while True:
            part = history(self._replay.journal, after)
            yield from part.events
            if part.after == after:
                return
            after = part.after

    def _advance(self) -> None:
        for event, now_s, commands in self._replay.advance():
            self._observer.note(event, now_s, commands)
            self._last_s = now_s

    def _known(self, job: str) -> JobInfo:
        for found in self.jobs():
            if found.id == job:
                return found
        raise UsageError(f"there is no job {job!r}", "`gpuslice ps` lists them")

    def _log(self, job: str, stream: str) -> Path:
        return self._directory / "logs" / f"{job}.{stream}"
