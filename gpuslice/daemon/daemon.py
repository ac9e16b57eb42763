"""The scheduler as a process of its own: what ``gpuslice up`` runs."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from gpuslice.clock import ContinuedClock
from gpuslice.config import load
from gpuslice.daemon import device_locks, event_log
from gpuslice.daemon.directory_watch import DirectoryWatch
from gpuslice.daemon.journal_recovery import changes_in, continued, former_changes, open_journal
from gpuslice.daemon.kept.snapshots import KeptSnapshots
from gpuslice.daemon.node_reports import NodeReports, Reading
from gpuslice.daemon.observer import EventObserver
from gpuslice.daemon.other_nodes import OtherNodes
from gpuslice.daemon.replicas import Replicas
from gpuslice.daemon.scheduler_setup import Setup
from gpuslice.daemon.settings.control import Control
from gpuslice.daemon.settings.present import Settings, after_all
from gpuslice.errors import EnvironmentUnusableError, GpusliceError
from gpuslice.memory import available_bytes
from gpuslice.nodes.foreign_use import Foreign, ForeignUse, watched
from gpuslice.nodes.leftovers import Leftovers, forget
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.ends.deliveries import Deliveries
from gpuslice.sched_core.job import DEFAULTS, JobDefaults
from gpuslice.sched_core.journal.journal import Journal
from gpuslice.sched_core.journal.replay import Replay
from gpuslice.sched_core.lifecycle.events import Command, Event, NoRoom
from gpuslice.sched_core.live.client_socket import ClientSocket
from gpuslice.sched_core.live.keeping import Keeping, release
from gpuslice.sched_core.live.scheduler import Scheduler
from gpuslice.sched_core.live.status import Overview
from gpuslice.sched_core.live.wait_notes import WaitNotes
from gpuslice.sched_core.nodes.remote_nodes import RemoteNodes

#: What a job that has imported torch, and more of its own, is expected to take while it waits.
_WAITING_BYTES = 512 << 20
#: Interval at which to look whether nodes have room for states.
_ROOM_S = 1.0
#: So many objects more than before are worth a collection when there is time for it.
_YOUNG = 1000


def _ignore(text: str) -> None:
    """Do nothing."""


def serve(
    directory: Path,
    setup: Setup,
    ready: Callable[[ClientSocket], None],
    *,
    tcp: tuple[str, Path] | None = None,
    metrics_port: int | None = None,
    prestart: int | None = None,
    defaults: JobDefaults = DEFAULTS,
    accept_loss: bool = False,
    others: OtherNodes | None = None,
    foreign: Foreign | None = None,
    stated: Sequence[str] = (),
    warn: Callable[[str], None] = _ignore,
) -> None:
    """Run the scheduler of ``directory`` until `down` or a signal ends it. A signal leaves the jobs alone.

    Parameters
    ----------
    ready
        Called when users may come, with the socket where they do.
    tcp
        A TCP endpoint to listen at besides, and the directory of its keys.
    metrics_port
        The port for Prometheus; 0 for any free port.
    prestart
        How many jobs are started beyond those that run; as a rule one a device, if memory allows.
    defaults
        The times of jobs that are submitted without them.
    accept_loss
        Go on with what is whole of a damaged journal.
    others
        The other nodes of its devices.
    foreign
        What is to be done about devices that others use; None: the usual.
    stated
        The settings that were stated and not left to their defaults, each KEY=VALUE as of ``gpuslice set``.
        They count over what was set while the last scheduler ran.
    warn
        Called with what whoever started this should know.

    Raises
    ------
    EnvironmentUnusableError
        If the directory cannot be used, for instance because the disk is full, or if another scheduler has
        one of the devices.
    """

    setup = continued(directory, setup)
    settings = Settings(setup, defaults, prestart)
    likely = after_all(settings, former_changes(directory))
    clock = ContinuedClock()
    remote = None if others is None else others.open(clock)
    listeners = _Listeners(setup.make_core())
    core, observer = listeners.core, listeners.observer
    kept = KeptSnapshots(directory, setup)
    reports = NodeReports() if others is None else others.reports
    with (
        _translated_os_errors(directory),
        _interruption() as (stopped, signalled),
        Scheduler(
            core,
            directory,
            clock=clock,
            environ=kept.environ,
            tenant_ramdisk=setup.tenant_ramdisk,
            keep_jobs=True,
            observer=listeners.record,
            late_observer=listeners.see,
            remote=remote,
        ) as scheduler,
        device_locks.held(directory, likely.setup.devices) as locks,
        event_log.kept_in(directory),
        _metrics(observer, core, setup, partial(reports.readings, remote), metrics_port),
        open_journal(directory, setup, accept_loss=accept_loss, warn=warn, kept=kept) as journal,
    ):
        listeners.journal = journal
        settings = after_all(settings, changes_in(journal))
        listeners.settings = control = Control(scheduler, settings, locks, kept.environ)
        _recover(scheduler, listeners, setup.make_core, clock, warn)
        control.recover()
        _add_housekeeping(scheduler, listeners, control)
        scheduler.register(signalled, lambda: None)
        overview = Overview(core, observer.job_history, policy="", pid=os.getpid())
        overview.nodes = lambda: reports.nodes(core, remote)
        if remote is not None and remote.transfers is not None:
            overview.progress = remote.transfers.progress
        keeping = Keeping(scheduler, kept)
        socket = listeners.client_socket = ClientSocket(
            scheduler, directory, journal, overview, tcp=tcp, keeping=keeping
        )
        control.start(overview, socket, stated, warn)
        held = control.present.setup
        known = {"pid": os.getpid(), "devices": list(map(str, held.devices)), "policy": held.policy}
        event_log.tell(
            "started", "the scheduler can be used", details={**known, "endpoints": socket.endpoints}
        )
        reports.own_spills = bool(setup.spill_dir)
        copies = observer.job_history.copies
        socket.admit_move = partial(reports.admit_move, core, copies)
        scheduler.housekeeping.add(_room_watch(scheduler, partial(reports.changes_of_room, core, copies)))
        use = ForeignUse(core, foreign or Foreign(), scheduler.note_users, scheduler.now, time.time)
        reports.used = use.take
        if others is not None:
            others.begin(warn, lambda note: scheduler.set_aside([note]))
            listeners.replicas = _replicas(scheduler, others, remote)
            others.keep()
        if setup.has_state:
            listeners.leftovers = _leftovers(core, directory, kept.spill_dir, remote)
        _collect_ramdisk(setup, kept.spill_dir)
        release(scheduler, kept)
        deliveries = listeners.deliveries = _deliveries(scheduler, listeners, directory)
        ready(socket)
        _defer_garbage_collection()
        with watched(scheduler, directory, use), _directory_watch(directory, scheduler) as watch:
            scheduler.run(
                lambda: (
                    ((keeping.advance() or socket.shut_down) and deliveries.settled)
                    or bool(stopped or watch.problem)
                )
            )
        if socket.shut_down:
            if not keeping.done:
                deliveries.give_up()
                _discard_snapshots(directory)
            if others is not None and remote is not None:
                others.leave()
                remote.dismiss()
                others.end(lambda text: event_log.tell("message", text))
        socket.close()
        keeping.close()
        event_log.tell(
            "ended", "the scheduler leaves", details={"dismissed": socket.shut_down, "kept": keeping.done}
        )


@contextmanager
def _directory_watch(directory: Path, scheduler: Scheduler) -> Iterator[DirectoryWatch]:
    """Watch the directory while the scheduler serves. If it is lost, end the scheduler with an error.

    The jobs stay if the journal does: another scheduler can take them over. Otherwise they are ended.
    """
    with DirectoryWatch(directory) as watch:
        if watch.descriptor >= 0:
            scheduler.register(watch.descriptor, watch.look)
        try:
            yield watch
        finally:
            if not watch.journal_is_left:
                scheduler.end_jobs_when_closed()
        if watch.problem:
            left = "they go on" if watch.journal_is_left else "they are ended, too"
            lost = f"the scheduler ends: its directory {directory} {watch.problem}; of its jobs: {left}"
            event_log.tell("message", lost)
            raise EnvironmentUnusableError(
                lost, "`gpuslice up` starts another; use `gpuslice down` before a directory is removed"
            )


class _Listeners:
    """The functions that are told of each event: first the journal, then log, metrics and others.

    Attributes
    ----------
    core
        The scheduler's.
    observer
        Keeps job histories, metrics and the log.
    journal, client_socket, replicas, leftovers, deliveries, settings
        Set once they are there.
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        self.observer = EventObserver(core)
        self.journal: Journal | None = None
        self.client_socket: ClientSocket | None = None
        self.replicas: Replicas | None = None
        self.leftovers: Leftovers | None = None
        self.deliveries: Deliveries | None = None
        self.settings: Control | None = None

    def record(self, event: Event, now: float, commands: Sequence[Command]) -> None:
        assert self.journal is not None
        self.journal.append(event, now, quiet=not commands)

    def see(self, event: Event, now: float, commands: Sequence[Command]) -> None:
        self.observer.note(event, now, commands)
        self.observer.tell(event)
        if self.settings is not None:
            self.settings.see(event)
        if self.replicas is not None:
            self.replicas.see(event)
        if self.leftovers is not None:
            self.leftovers.see(event)
            self.leftovers.tell()
        if self.deliveries is not None:
            self.deliveries.see()
        if self.client_socket is not None:
            self.client_socket.notify()


def _recover(
    scheduler: Scheduler,
    listeners: _Listeners,
    make_core: Callable[[], Core],
    clock: ContinuedClock,
    warn: Callable[[str], None],
) -> None:
    """Replay the journal into the core: at the start, and whenever the core fails at an event."""
    journal = listeners.journal
    assert journal is not None
    replay = Replay(journal, listeners.core, make_core)

    def restore_core() -> None:
        journal.flush()
        replay.repeat()

    scheduler.restore_core = restore_core
    scheduler.take_over(_replayed(replay, clock), listeners.observer.note)
    scheduler.set_aside([one.noted() for one in replay.rejected.values()])
    if replay.rejected:
        warn(_rejected_summary(replay))


def _add_housekeeping(scheduler: Scheduler, listeners: _Listeners, control: Control) -> None:
    """Add the tasks that are done while nobody waits."""
    assert listeners.journal is not None

    def limit_prestart() -> None:
        present, settings = listeners.core.allocation.prestart.limit, control.present
        affordable = _affordable(len(settings.setup.devices), present)
        scheduler.limit_prestart(affordable if settings.prestart is None else settings.prestart)

    metrics = listeners.observer.metrics
    looked = () if metrics is None else (metrics.waiting,)
    notes = WaitNotes(listeners.core, scheduler.now, lambda note: scheduler.set_aside([note]), *looked)
    limit_prestart()
    for task in (
        limit_prestart,
        notes.look,
        listeners.observer.write,
        listeners.journal.tidy_up,
        _collect_garbage,
    ):
        scheduler.housekeeping.add(task)


def _room_watch(scheduler: Scheduler, changes: Callable[[], Iterable[NoRoom]]) -> Callable[[], None]:
    """Return a task that tells the core, once a second, which nodes have no room for states of jobs."""
    next_s = 0.0

    def look() -> None:
        nonlocal next_s
        if scheduler.now() >= next_s:
            next_s = scheduler.now() + _ROOM_S
            for change in changes():
                scheduler.note_room(change)

    return look


def _leftovers(core: Core, directory: Path, spill_dir: str, remote: RemoteNodes | None) -> Leftovers:
    """Return the object that has snapshots of ended jobs removed."""
    own = partial(forget, directory, spill_dir=spill_dir)
    return Leftovers(core, own, {} if remote is None else remote.nodes)


def _deliveries(scheduler: Scheduler, listeners: _Listeners, directory: Path) -> Deliveries:
    """Return the object that runs commands and sends messages when jobs have ended."""
    journal = listeners.journal
    assert journal is not None
    deliveries = Deliveries(
        listeners.core,
        listeners.observer.job_history.ends,
        directory,
        scheduler.local.processes.log,
        scheduler.now,
        lambda at_s: journal.wall_clock().unix_s(at_s),
        lambda note: scheduler.set_aside([note]),
    )
    scheduler.register(deliveries.fileno(), deliveries.advance)
    deliveries.begin()
    return deliveries


def _replicas(scheduler: Scheduler, others: OtherNodes, remote: RemoteNodes | None) -> Replicas | None:
    """Return the object that copies snapshots to other nodes; None if none are to be copied."""
    if not others.replicate_every or remote is None or remote.transfers is None:
        return None
    return Replicas(
        scheduler.core,
        others.replicate_every,
        remote.transfers,
        lambda note: scheduler.set_aside([note]),
        scheduler.now,
    )


def _replayed(replay: Replay, clock: ContinuedClock) -> Iterator[tuple[Event, float, Sequence[Command]]]:
    """Yield the events of ``replay``, then let ``clock`` go on from the last of them."""
    last_s = 0.0
    for event, when_s, commands in replay.advance():
        last_s = max(last_s, when_s)
        yield event, when_s, commands
    clock.continue_from(last_s)


def _rejected_summary(replay: Replay) -> str:
    """Return one line about the events that were set aside."""
    first = next(iter(replay.rejected.values()))
    about = " ".join(filter(None, (first.event, first.job)))
    return (
        f"{len(replay.rejected)} of the journal's events were set aside, the first is number {first.number} "
        f"({about}): {first.reason}; `gpuslice events` shows them"
    )


@contextmanager
def _translated_os_errors(directory: Path) -> Iterator[None]:
    """Turn an ``OSError`` within the context into an ``EnvironmentUnusableError``."""
    try:
        yield
    except OSError as error:
        path = directory if error.filename is None else error.filename
        raise EnvironmentUnusableError(
            f"cannot use {path}: {error.strerror or error}",
            "make room or see to its permissions, or choose another --state-dir",
        ) from error


def _affordable(device_count: int, present: int | None) -> int:
    """Return how many jobs may be started beyond those that run, by the free memory.

    More than at ``present`` only with half as much again to spare, or it would change all the time.
    """
    available = available_bytes()
    found = min(device_count, available // _WAITING_BYTES)
    if present is not None and found > present:
        found = max(present, min(device_count, (available - _WAITING_BYTES // 2) // _WAITING_BYTES))
    return max(0, found)


def _collect_ramdisk(setup: Setup, spill_dir: str) -> None:
    """Remove what dead processes have left in the RAM disk, like ``gpuslice ramdisk gc``."""
    if not setup.has_state:
        return
    from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk  # late, as below

    try:
        removed = RamDisk.from_settings(load(spill_dir=spill_dir or None)).collect()
    except GpusliceError as error:
        event_log.tell("message", f"what dead processes left stays in the RAM disk: {error}")
        return
    if removed:
        names = ", ".join(sorted(Path(one.directory).name for one in removed))
        event_log.tell("message", f"removed from the RAM disk, as nobody can go on from them: {names}")


def _discard_snapshots(directory: Path) -> None:
    """Remove the snapshots that none of the scheduler's jobs can go on from."""
    from gpuslice.checkpoint.ramdisk.ramdisk import (
        RamDisk,  # late: it takes longer to import than all the rest
    )

    try:
        RamDisk.from_settings(load()).discard(os.path.realpath(directory))
    except GpusliceError as error:
        event_log.tell("message", f"snapshots of ended jobs stay in the RAM disk: {error}")


def _defer_garbage_collection() -> None:
    """Make automatic garbage collection rare: it would add milliseconds to a decision."""
    gc.collect()
    gc.freeze()  # what is there by now stays
    gc.set_threshold(50 * _YOUNG, *gc.get_threshold()[1:])  # if there is no time for it, it must be taken


def _collect_garbage() -> None:
    if gc.get_count()[0] > _YOUNG:
        gc.collect(1)


@contextmanager
def _metrics(
    observer: EventObserver, core: Core, setup: Setup, nodes: Callable[[], list[Reading]], port: int | None
) -> Iterator[None]:
    """Serve metrics for Prometheus within the context, if a port is given."""
    if port is None:
        yield
        return
    from gpuslice.daemon import metrics  # late: it takes longer to import than all the rest

    observer.metrics = metrics.Metrics(core, observer.job_history, setup.policy, nodes)
    with metrics.served(observer.metrics, port) as taken:
        url = f"http://{metrics.ADDRESS}:{taken}/metrics"
        event_log.tell("metrics", f"metrics are served at {url}", details={"url": url})
        yield


@contextmanager
def _interruption() -> Iterator[tuple[list[int], int]]:
    """Yield a list of the signals SIGINT and SIGTERM that came, and a descriptor that is readable then."""
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
