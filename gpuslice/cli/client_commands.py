"""The commands that ask the scheduler. No parser is imported here, so that they answer at once.

Each function takes the parameters of its command and returns the exit code.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpuslice.client.client import Client
from gpuslice.client.log_tail import last_lines, start_of_last_lines
from gpuslice.config import parse_duration
from gpuslice.errors import EnvironmentUnusableError, NoSchedulerError, UsageError
from gpuslice.verbs import ArrayInfo, JobInfo, SchedulerStatus

from . import device_remarks, event_line, job_choice, job_details, job_table, node_table, tables
from .job_choice import Choice
from .scheduler_options import named_scheduler
from .text_width import cut

if TYPE_CHECKING:
    from gpuslice.daemon.stopped_scheduler import StoppedScheduler

TIMED_OUT = 124
#: So many lines of a job's output `show` prints.
_SHOWN_LINES = 5
_REFRESH_S = 1.0
_LOG_LOOK_AGAIN_S = 0.25
_EVENTS_LOOK_AGAIN_S = 0.5
_CLEAR = "\x1b[H\x1b[2J"


def connect(state_dir: str | Path | None) -> Client:
    """Return a client of the scheduler that the user means."""
    named = named_scheduler.get
    return Client(state_dir, connect=named("--connect"), curve_keys=named("--curve-keys"))


@contextmanager
def reading(state_dir: str | Path | None) -> Iterator[Client | StoppedScheduler]:
    """Yield a client of the user's scheduler; if it does not run, a reader of its journal.

    If none runs there, a line on stderr says so.
    """
    with connect(state_dir) as client:
        try:
            client.check_scheduler()
        except NoSchedulerError as error:
            with _left_by(error) as stopped:
                yield stopped
        else:
            yield client


def _left_by(nobody: NoSchedulerError) -> StoppedScheduler:
    """Return a reader of a stopped scheduler's journal. Raise ``nobody`` if there is no journal."""
    # Late: as a rule a scheduler runs.
    from gpuslice.daemon.stopped_scheduler import StoppedScheduler
    from gpuslice.sched_core.journal.journal import FILE

    directory = Path(nobody.directory)
    if not (directory / FILE).exists():
        raise nobody
    stopped = StoppedScheduler(directory)
    last_s = stopped.last_unix_s()
    until = "" if last_s is None else f"; its last event is of {event_line.local_time(last_s)}"
    sys.stderr.write(f"gpuslice: {nobody.message}: this is from its journal{until}\n")
    return stopped


def ps(
    globs: Sequence[str] = (),
    *,
    user: str | None = None,
    state: str | None = None,
    as_json: bool = False,
    watch: bool = False,
    wide: bool = False,
    expand: bool = False,
    state_dir: str | Path | None = None,
) -> int:
    """Print the chosen jobs, once or again every second."""
    pause = threading.Event()
    states = None if state is None else job_choice.states(state)
    fold = not (as_json or wide or expand or globs or states)
    with reading(state_dir) as client:
        while True:
            status = client.status(fold=fold)
            if globs or user is not None or states:
                status = _chosen(status, globs, user, states)
            if watch and sys.stdout.isatty():
                sys.stdout.write(_CLEAR)
            if as_json:
                print(msgspec.json.encode(msgspec.structs.asdict(status)).decode(), flush=True)
            elif wide:
                tables.show(tables.jobs(status.jobs))
            else:
                job_table.show(status.jobs, status.arrays if fold else ())
                closed = device_remarks.remarks(status.devices, time.time())
                for line in (*closed, *node_table.remarks(status.nodes, only_bad=True)):
                    print(cut(line, job_table.MOST_COLUMNS), flush=True)
            if not watch:
                return 0
            pause.wait(_REFRESH_S)


def _chosen(
    status: SchedulerStatus, globs: Sequence[str], user: str | None, states: Sequence[str] | None
) -> SchedulerStatus:
    """Return ``status`` with the jobs that ``globs`` match, of ``user``, in ``states``; None: of all."""

    def is_users(one: JobInfo | ArrayInfo) -> bool:
        return user is None or (one.tenant or job_choice.NOBODY) == user

    jobs: Sequence[JobInfo] = job_choice.matching(status.jobs, globs) if globs else status.jobs
    jobs = [job for job in jobs if is_users(job) and (states is None or job.state in states)]
    arrays = tuple(filter(is_users, status.arrays))
    if globs or states:
        arrays = tuple(one for one in arrays if any(job.array == one.id for job in jobs))
    return msgspec.structs.replace(status, jobs=tuple(jobs), arrays=arrays)


def nodes(*, as_json: bool = False, state_dir: str | Path | None = None) -> int:
    """Print all nodes."""
    with reading(state_dir) as client:
        found = client.status().nodes
    if as_json:
        print(msgspec.json.encode(found).decode(), flush=True)
    else:
        node_table.show(found)
    return 0


def show(job: str, *, as_json: bool = False, state_dir: str | Path | None = None) -> int:
    """Print everything about one job."""
    with reading(state_dir) as client:
        status = client.status()
        (found,) = job_choice.matching(status.jobs, [job])
        if as_json:
            print(msgspec.json.encode(found).decode())
            return 0
        output = {"stdout": last_lines(client, job, _SHOWN_LINES)}
        if found.state == "failed" or not output["stdout"]:
            output["stderr"] = last_lines(client, job, _SHOWN_LINES, err=True)
    print(job_details.text(found, status.now_s, output))
    return 0


def wait(
    jobs: Sequence[str],
    *,
    as_json: bool = False,
    timeout: str | None = None,
    state_dir: str | Path | None = None,
) -> int:
    """Wait until all of ``jobs`` have ended. Return their first exit code that is not 0."""
    ends_s = None if timeout is None else time.monotonic() + parse_duration(timeout)
    status = 0
    with reading(state_dir) as client:
        _check_known(client, jobs)
        for job in jobs:
            ended = client.wait(job, None if ends_s is None else max(0.0, ends_s - time.monotonic()))
            if ended is None:
                return TIMED_OUT
            if as_json:
                print(msgspec.json.encode(ended).decode(), flush=True)
            elif ended.reason:
                sys.stderr.write(f"gpuslice: {job} {ended.state}: {ended.reason}\n")
            status = status or exit_status(ended)
    return status


def _check_known(client: Client | StoppedScheduler, jobs: Sequence[str]) -> None:
    """Raise ``UsageError`` if one of several ``jobs`` does not exist, before any of them is changed."""
    if len(jobs) > 1:  # of a single one the scheduler says it
        known = {one.id for one in client.jobs()}
        for job in jobs:
            if job not in known:
                raise UsageError(f"there is no job {job!r}", "`gpuslice ps` lists them")


def exit_status(job: JobInfo) -> int:
    """Return the exit code of a job that ended, as a shell would: 128 + n for signal n."""
    if job.state == "succeeded":
        return 0
    code = job.exit_code or 1
    return code if code > 0 else 128 - code


def logs(
    job: str,
    *,
    follow: bool = False,
    stderr: bool = False,
    lines: int | None = None,
    state_dir: str | Path | None = None,
) -> int:
    """Print what a job printed, or its last ``lines`` lines, up to now or until it ends."""
    if lines is not None and lines < 0:
        raise UsageError(f"{lines} is no number of lines", "write for instance -n 20")
    with reading(state_dir) as client:
        files = client.logs(job)
        size_bytes = files.err_bytes if stderr else files.out_bytes
        read = partial(client.read_log, job, err=stderr)
        offset = 0 if lines is None else start_of_last_lines(read, size_bytes, lines)
        log = Path(files.err if stderr else files.out)
        try:
            ended = False
            while not ended:
                # Asked first: what is there after the end is all there will be.
                ended = not follow or client.wait(job, _LOG_LOOK_AGAIN_S) is not None
                while part := client.read_log(job, offset, err=stderr):
                    offset += _print(part)
            if not offset and not stderr and lines != 0:
                wrote = client.read_log(job, err=True)
                hint = f"; see `gpuslice logs --err {job}`" if wrote else "" if follow else " so far"
                sys.stderr.write(f"gpuslice: job {job} has printed nothing{hint}\n")
        except EnvironmentUnusableError:
            # What is at that path here, after a scheduler elsewhere has left, is of another one.
            if client.directory is None:
                raise
            _print(log.read_bytes()[offset:] if log.exists() else b"")
            if not _left_with_its_jobs(log):
                raise
    return 0


def _print(part: bytes) -> int:
    sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()
    return len(part)


def _left_with_its_jobs(log: Path) -> bool:
    """Return True if the job with this log had ended before its scheduler left (`down --drain`)."""
    from gpuslice.sched_core.nodes import exit_record

    found = exit_record.read(log.with_suffix(".exit"))
    return found is not None and not found.alive and found.code is not None


def log_files(job: str, *, state_dir: str | Path | None = None) -> int:
    """Print where the scheduler keeps what a job printed."""
    with reading(state_dir) as client:
        print(msgspec.json.encode(msgspec.structs.asdict(client.logs(job))).decode())
    return 0


def events(
    *,
    follow: bool = False,
    as_json: bool = False,
    wide: bool = False,
    state_dir: str | Path | None = None,
) -> int:
    """Print what happened, up to now or until Ctrl-C."""
    pause = threading.Event()
    columns = None if wide or not sys.stdout.isatty() else job_table.terminal_columns()
    newest = 0
    with reading(state_dir) as client:
        while True:
            for event in client.events(newest):
                newest = event.number
                if as_json:
                    print(msgspec.json.encode(event).decode(), flush=True)
                elif columns is None:
                    print(event_line.line(event), flush=True)
                else:
                    print(event_line.narrow(event, columns), flush=True)
            if not follow:
                return 0
            pause.wait(_EVENTS_LOOK_AGAIN_S)


def cancel(choice: Choice, *, as_json: bool = False, state_dir: str | Path | None = None) -> int:
    """End jobs."""
    return _each(choice, Client.cancel, _can_be_cancelled, as_json, state_dir)


def suspend(choice: Choice, *, as_json: bool = False, state_dir: str | Path | None = None) -> int:
    """Take jobs off their devices, and keep them off until `resume`."""
    return _each(choice, Client.suspend, lambda job: not (job.ended or job.held), as_json, state_dir)


def resume(choice: Choice, *, as_json: bool = False, state_dir: str | Path | None = None) -> int:
    """Let suspended jobs have devices again."""
    return _each(choice, Client.resume, lambda job: job.held and not job.ended, as_json, state_dir)


def requeue(
    choice: Choice, *, fresh: bool = False, as_json: bool = False, state_dir: str | Path | None = None
) -> int:
    """Give jobs that have ended another attempt."""
    ask = partial(Client.requeue, fresh=fresh)
    return _each(choice, ask, lambda job: job.ended and job.why is None, as_json, state_dir)


def _can_be_cancelled(job: JobInfo) -> bool:
    """Return True if ``job`` has not ended. One that failed may begin again while something is left of it."""
    return not job.ended or (job.state == "failed" and job.why is not None)


def _each(
    choice: Choice,
    ask: Callable[[Client, str], None],
    possible: Callable[[JobInfo], bool],
    as_json: bool,
    state_dir: str | Path | None,
) -> int:
    """Call ``ask`` for each chosen job, also after a refusal. Return 0, or the exit code of a refusal.

    A refusal of a job that was not named by its id counts only if nothing was done.
    """
    choice.check()
    refused, unexpected, done = 0, 0, 0
    with connect(state_dir) as client:
        if choice.exact:
            _check_known(client, choice.words)
            ids, left = list(choice.words), list[str]()
        else:
            ids, left = choice.of(client.jobs(), possible)
        for job in ids:
            try:
                ask(client, job)
            except UsageError as error:
                sys.stderr.write(error.lines)
                if job in choice.words:
                    refused = refused or error.exit_code
                else:
                    unexpected = error.exit_code
            else:
                done += 1
                print_done(as_json, id=job)
    if left:
        sys.stderr.write(f"gpuslice: this is not possible for {job_choice.listed(left)}\n")
    return refused or (0 if done else unexpected)


def weight(job: str, weight: str, *, as_json: bool = False, state_dir: str | Path | None = None) -> int:
    """Give a job another weight."""
    try:
        number = float(weight)
    except ValueError as error:
        raise UsageError(f"{weight!r} is not a weight", "give a positive number") from error
    with connect(state_dir) as client:
        client.weight(job, number)
    return print_done(as_json, id=job)


def down(
    *, drain: bool = False, keep: bool = False, as_json: bool = False, state_dir: str | Path | None = None
) -> int:
    """End the scheduler."""
    with connect(state_dir) as client:
        pid = client.status().pid
        try:
            client.down(drain=drain, keep=keep)
        except KeyboardInterrupt:
            if keep:
                _call_off(client)
            raise
    return print_done(as_json, pid=pid)


def _call_off(client: Client) -> None:
    """Have all jobs go on that are being kept, and say so. If all are kept already, say that."""
    try:
        client.call_off()
        told = "called off: all jobs go on"
    except NoSchedulerError:
        told = "too late: all jobs are kept, and the scheduler has left; `gpuslice up` goes on with them"
    sys.stderr.write(f"gpuslice: {told}\n")


def print_done(as_json: bool, **what: object) -> int:
    """Print ``what`` as JSON if ``as_json``. Return 0."""
    if as_json:
        print(msgspec.json.encode(what).decode())
    return 0
