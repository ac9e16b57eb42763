"""The scheduler as a process of its own: what ``gpuslice up`` runs."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gpuslice import eventlog
from gpuslice.clock import ContinuedClock
from gpuslice.config import load
from gpuslice.errors import ConfigError, GpusliceError
from gpuslice.memory import available_bytes
from gpuslice.private import private_directory
from gpuslice.sched_core.core import Core
from gpuslice.sched_core.desk import Desk
from gpuslice.sched_core.events import Command, Event
from gpuslice.sched_core.journal import FILE, Journal
from gpuslice.sched_core.live import Scheduler
from gpuslice.sched_core.replay import Replay
from gpuslice.sched_core.standing import Overview
from gpuslice.scheduler_setup import Setup
from gpuslice.witness import Witness

LOG = "scheduler.log"
_READY = b"r"
#: What a job that has imported torch, and more of its own, is expected to take while it waits.
_WAITING_BYTES = 512 << 20
#: So many objects more than before are worth a collection when there is time for it.
_YOUNG = 1000


def serve(
    directory: Path,
    setup: Setup,
    ready: Callable[[Desk], None],
    *,
    tcp: tuple[str, Path] | None = None,
    metrics_port: int | None = None,
    prestart: int | None = None,
) -> None:
    """Be the scheduler of ``directory`` until it is taken down, or told by a signal to leave its jobs alone.

    Parameters
    ----------
    ready
        Called when users may come, with the desk where they do.
    tcp
        Where to listen besides, and the directory of keys for that.
    metrics_port
        Where to serve numbers for Prometheus; 0: at any port.
    prestart
        How many jobs are started beyond those that run; as a rule one a device, if memory allows.
    """

    def observe(event: Event, now: float, commands: Sequence[Command]) -> None:
        journal.append(event, now, quiet=not commands)

    def see(event: Event, now: float, commands: Sequence[Command]) -> None:
        witness.note(event, now, commands)
        witness.tell(event)
        if desk is not None:
            desk.notify()

    desk: Desk | None = None
    core = setup.make_core()
    witness = Witness(core)
    clock = ContinuedClock()
    with (
        _interruption() as (stopped, signalled),
        Scheduler(
            core,
            directory,
            clock=clock,
            environ=setup.environ(),
            tenant_ramdisk=setup.tenant_ramdisk,
            keep_jobs=True,
            observer=observe,
            witness=see,
        ) as scheduler,
        eventlog.kept_in(directory),
        _metrics(witness, core, setup, metrics_port),
        _open_journal(directory, setup) as journal,
    ):
        replay = Replay(journal, core, setup.make_core)

        def mend() -> None:
            journal.flush()
            replay.repeat()

        scheduler.mend = mend
        scheduler.take_over(_lived(replay, clock), witness.note)
        scheduler.set_aside([one.noted() for one in replay.rejected.values()])

        def limit_prestart() -> None:
            scheduler.limit_prestart(_affordable(len(setup.devices)) if prestart is None else prestart)

        limit_prestart()
        scheduler.chores.add(limit_prestart)
        scheduler.attend(signalled, lambda: None)
        scheduler.chores.add(witness.write)
        scheduler.chores.add(journal.tidy_up)
        scheduler.chores.add(_collect_garbage)
        overview = Overview(core, witness.chronicle, policy=setup.policy, pid=os.getpid())
        desk = Desk(scheduler, directory, journal, overview, tcp=tcp)
        known = {"pid": os.getpid(), "devices": list(map(str, setup.devices)), "policy": setup.policy}
        eventlog.tell("started", "the scheduler can be used", details={**known, "endpoints": desk.endpoints})
        ready(desk)
        _put_garbage_off()
        scheduler.run(lambda: desk.dismissed or bool(stopped))
        if desk.dismissed:
            _discard_snapshots(directory)
        desk.close()
        eventlog.tell("ended", "the scheduler leaves", details={"dismissed": desk.dismissed})


def _lived(replay: Replay, clock: ContinuedClock) -> Iterator[tuple[Event, float, Sequence[Command]]]:
    """What ``replay`` tells, one event after the other; then ``clock`` goes on from there."""
    last_s = 0.0
    for event, when_s, commands in replay.advance():
        last_s = max(last_s, when_s)
        yield event, when_s, commands
    clock.continue_from(last_s)


def _affordable(device_count: int) -> int:
    """How many jobs may wait for their first lease beside those that run, with the memory there is."""
    return max(0, min(device_count, available_bytes() // _WAITING_BYTES))


def _discard_snapshots(directory: Path) -> None:
    """Leave nothing in the RAM disk that none of our jobs can go on from."""
    from gpuslice.checkpoint.ramdisk import RamDisk  # late: it takes longer to import than all the rest

    try:
        RamDisk.from_settings(load()).discard(os.path.realpath(directory))
    except GpusliceError as error:
        eventlog.tell("message", f"snapshots of ended jobs stay in the RAM disk: {error}")


def _put_garbage_off() -> None:
    """Have garbage collected when nobody waits, not in the midst of a decision; it takes milliseconds."""
    gc.collect()
    gc.freeze()  # what is there by now stays
    gc.set_threshold(50 * _YOUNG, *gc.get_threshold()[1:])  # if there is no time for it, it must be taken


def _collect_garbage() -> None:
    if gc.get_count()[0] > _YOUNG:
        gc.collect(1)


@contextmanager
def _metrics(witness: Witness, core: Core, setup: Setup, port: int | None) -> Iterator[None]:
    """Count for Prometheus, if that is wanted."""
    if port is None:
        yield
        return
    from gpuslice import metrics  # late: it takes longer to import than all the rest

    witness.metrics = metrics.Metrics(core, witness.chronicle, setup.policy)
    with metrics.served(witness.metrics, port) as taken:
        url = f"http://{metrics.ADDRESS}:{taken}/metrics"
        eventlog.tell("metrics", f"metrics are served at {url}", details={"url": url})
        yield


def _open_journal(directory: Path, setup: Setup) -> Journal:
    """The journal of the last scheduler if it was set up alike, else a new one.

    Raises
    ------
    ConfigError
        If jobs of a scheduler that was set up differently have not ended.
    """
    journal = Journal(directory / FILE)
    written = journal.about()
    former = None if written is None else msgspec.json.decode(written, type=Setup)
    if former is not None and former != setup:
        unfinished = _unfinished(journal, former)
        journal.close()
        if unfinished:
            raise ConfigError(
                f"{', '.join(unfinished)} of the last scheduler in {directory} have not ended; it had "
                f"--devices {','.join(map(str, former.devices))} --policy {former.policy}",
                "start it with the same options, or choose another --state-dir",
            )
        _set_aside(directory)
        journal = Journal(directory / FILE)
    journal.introduce(msgspec.json.encode(setup))
    return journal


def _unfinished(journal: Journal, setup: Setup) -> list[str]:
    core = setup.make_core()
    for _ in Replay(journal, core, setup.make_core).advance():
        pass
    return [job.id for job in core.jobs.values() if not (job.state.ended and job.processes_gone)]


def _set_aside(directory: Path) -> None:
    """Keep what the last scheduler wrote, under other names."""
    number = 1
    while (past := directory / f"past-{number}").exists():
        number += 1
    past.mkdir()
    for name in (FILE, "logs"):
        (directory / name).rename(past / name)
    (directory / "logs").mkdir()


def start(directory: Path, words: Sequence[str]) -> int:
    """Start ``gpuslice up`` with ``words`` in the background; returns its pid when users may come.

    Raises
    ------
    SystemExit
        If it ends instead, with its exit code; its words are on stderr.
    """
    private_directory(directory, option="--state-dir", parents=True)
    with (directory / LOG).open("ab") as log:
        begins = log.tell()
        receiving, sending = os.pipe()
        with os.fdopen(receiving, "rb") as answer:
            process = subprocess.Popen(
                [sys.executable, "-m", "gpuslice", "up", *words, "--ready-fd", str(sending)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[sending],
                start_new_session=True,
            )
            os.close(sending)
            if answer.read(1) == _READY:
                return process.pid
    code = process.wait()
    with (directory / LOG).open("rb") as log_again:
        log_again.seek(begins)
        sys.stderr.write(log_again.read().decode(errors="replace"))
    raise SystemExit(code)


def tell_ready(descriptor: int) -> None:
    """Let ``start`` return."""
    os.write(descriptor, _READY)
    os.close(descriptor)


@contextmanager
def _interruption() -> Iterator[tuple[list[int], int]]:
    """SIGINT and SIGTERM, noted in a list, and a descriptor that can be read when there was one."""
    noted: list[int] = []
    receiving, sending = os.pipe()
    os.set_blocking(sending, False)
    former_fd = signal.set_wakeup_fd(sending)
    former = {
        number: signal.signal(number, lambda number, frame: noted.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield noted, receiving
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(former_fd)
        os.close(receiving)
        os.close(sending)
