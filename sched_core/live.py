"""The live shell: a ROUTER socket, a timer and processes around the core, in one thread.

Everything the core decides is carried out here, and everything that happens becomes one of its events. A
frame that is not a message, or not one its sender may send, is answered with ``Rejected`` and reaches nobody.
"""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
import zmq

from gpuslice import config, wire
from gpuslice.clock import Clock, MonotonicClock
from gpuslice.errors import GpusliceError, IllegalTransitionError, RemoteProtocolError
from gpuslice.private import private_directory

from . import record
from .chores import Chores
from .computing import Computing
from .core import Core
from .endpoint import LOCK, bind, check_sender, lock, receive
from .events import (
    Command,
    Compute,
    Event,
    Exited,
    Kill,
    Launch,
    Noted,
    Notice,
    Owned,
    Program,
    RankGone,
    Reported,
    Submitted,
    Tell,
    WakeAt,
    Woken,
)
from .gang import Gang
from .job import JobSpec
from .processes import Processes
from .strays import kill_strays

_FRAMES_AT_ONCE = 100
#: Notices that nobody needs to worry about.
_EXPECTED = frozenset({"began", "first_step", "guaranteed", "switched", "timed", "trial_passed"})

Observer = Callable[[Event, float, Sequence[Command]], object]
_log = logging.getLogger(__name__)


def _ignore(event: Event, now: float, commands: Sequence[Command]) -> None:
    """Nobody wants to know."""


class Scheduler:
    """A running scheduler; a context manager that leaves no process behind.

    Parameters
    ----------
    core
        Who decides.
    directory
        For the socket, the lock and the jobs' output; made with mode 0700 if need be.
    clock
        What time it is.
    environ
        Variables that every job gets, over its own.
    tenant_ramdisk
        What the jobs of a tenant are told that their snapshots may take together, ``8G`` style.
    keep_jobs
        Whether jobs outlive this scheduler, for another to take them over.
    observer
        Called with every event, when it happened, and the commands that followed from it, before they leave.
    witness
        Called likewise when what ranks are told has left, so that nobody waits for it.

    Attributes
    ----------
    chores
        What is done when nobody waits for this scheduler.

    Raises
    ------
    EnvironmentUnusableError
        If the directory is not private or belongs to another scheduler, or its path is too long.
    """

    def __init__(
        self,
        core: Core,
        directory: Path,
        *,
        clock: Clock | None = None,
        environ: Mapping[str, str] | None = None,
        tenant_ramdisk: Mapping[str, str] | None = None,
        keep_jobs: bool = False,
        observer: Observer = _ignore,
        witness: Observer = _ignore,
    ) -> None:
        self.core = core
        self._environ = dict(environ or {})
        self._tenant_ramdisk = dict(tenant_ramdisk or {})
        self._keep_jobs = keep_jobs
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._observer = observer
        self._witness = witness
        self._wake_s: float | None = None
        self._routes: dict[tuple[str, int], bytes] = {}
        self._peers: dict[bytes, tuple[str, int]] = {}
        private_directory(directory, option="--state-dir", parents=True)
        self._lock = lock(directory / LOCK)
        (directory / "logs").mkdir(exist_ok=True)
        self.processes = Processes(directory / "logs")
        self.endpoint = f"ipc://{directory / 'scheduler.sock'}"
        self.context = zmq.Context()
        self._poller = zmq.Poller()
        #: Every process of every job; one descriptor for the poller, however many they are.
        self._watched = select.epoll()
        try:
            self._socket = bind(self.context, self.endpoint)
        except BaseException:
            self.context.destroy()
            self._watched.close()
            os.close(self._lock)
            raise
        self.chores = Chores()
        self._computing = Computing()
        self._attended: dict[zmq.Socket[bytes] | int, Callable[[], None]] = {}
        self.attend(self._socket, self._receive)
        self._poller.register(self._watched.fileno(), zmq.POLLIN)

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process of every job, unless they are kept, and give the socket back; also twice."""
        if self.context.closed:
            return
        self._computing.close()
        if not self._keep_jobs:
            self.processes.end_all(self._clock)
        self.context.destroy(linger=0)
        self._watched.close()
        os.close(self._lock)

    def attend(self, source: zmq.Socket[bytes] | int, deal: Callable[[], None]) -> None:
        """Call ``deal`` whenever ``source``, a socket or descriptor, can be read."""
        self._attended[source] = deal
        self._poller.register(source, zmq.POLLIN)

    def now(self) -> float:
        """What time it is for the core."""
        return self._clock.now()

    def submit(self, spec: JobSpec, program: Program) -> None:
        """Accept a job and start its processes; it trains when its turn comes."""
        self._handle(Submitted(spec, program))

    def obey(self, wish: Owned) -> None:
        """Do what the owner of a job wants."""
        self._handle(wish)

    def take_over(self, past: Iterable[tuple[Event, float]], note: Observer = _ignore) -> None:
        """Become the scheduler that lived through ``past``, and see what became of its jobs.

        ``note`` is called with each event of the past.

        Their ranks greet every new scheduler; what was on its way to or from them is made up for then.
        """
        for event, when_s in past:
            commands = self.core.handle(event, when_s)
            note(event, when_s, commands)
            for command in commands:
                if isinstance(command, WakeAt):
                    self._wake_s = command.when_s
        # Listed before the first of them: what became of one may have others started.
        for job in [job for job in self.core.jobs.values() if not job.processes_gone]:
            self._find(job)
        if (left := self.core.planning.deliberation.unanswered) is not None:
            self._perform(left)

    def _find(self, job: Gang) -> None:
        found = self.processes.find(job.id, job.attempt) if job.exit_code is None else None
        if isinstance(found, int):
            self._watched.register(found, select.EPOLLIN)
        elif found is not None:
            self._exited(found)
        elif job.exit_code is None and job.state.ended:
            self._handle(Exited(job.id, record.KILLED))  # cancelled before it was started
        elif job.exit_code is None:
            self._launch(Launch(job.id, job.program, job.attempt))
        mark = os.fsencode(f"{config.variable('job')}={job.id}")
        for rank in job.there():
            descriptor = self.processes.find_rank(job.id, rank.number, rank.pid, mark)
            if descriptor is None:
                self._handle(RankGone(job.id, rank.number, unseen=True))
            else:
                self._watched.register(descriptor, select.EPOLLIN)
        if job.state.ended:
            self.processes.end(job.id, self.now())

    def run(self, until: Callable[[], bool], *, timeout_s: float | None = None) -> bool:
        """Serve until ``until()`` is true; ``False`` if that took longer than ``timeout_s``."""
        ends_s = None if timeout_s is None else self._clock.now() + timeout_s
        try:
            while not until():
                if ends_s is not None and self._clock.now() >= ends_s:
                    return False
                self._serve(ends_s)
            return True
        finally:
            self.chores.do()

    def _serve(self, ends_s: float | None) -> None:
        """Wait for the next thing to happen, then deal with all that has."""
        ready = dict(self._poller.poll(self._pause_ms(ends_s)))
        for source in ready.keys() & self._attended.keys():
            self._attended[source]()
        # After the sockets: what a process said last comes before its end.
        if self._watched.fileno() in ready:
            self._reap()
        now = self._clock.now()
        for job in self.processes.enforce(now):
            self._kill_strays(job)
        if self._wake_s is not None and now >= self._wake_s:
            self._wake_s = None
            self._handle(Woken())
        else:
            self.chores.look(now, quiet=not ready)

    def _pause_ms(self, ends_s: float | None) -> int | None:
        """How long nothing needs to be done unless something happens; ``None``: for ever."""
        now = self._clock.now()
        moments = (ends_s, self._wake_s, self.processes.next_deadline_s)
        # Rounded up, or the last fraction of a millisecond would be spent polling without a pause.
        pauses_ms = [int(max(0.0, when_s - now) * 1000.0) + 1 for when_s in moments if when_s is not None]
        if (chores_ms := self.chores.pause_ms) is not None:
            pauses_ms.append(chores_ms)
        return min(pauses_ms, default=None)

    def _handle(self, event: Event) -> None:
        now = self._clock.now()
        commands = self.core.handle(event, now)
        self._observer(event, now, commands)
        for command in commands:
            if isinstance(command, Tell):
                self._tell(command)
        self._witness(event, now, commands)
        self.chores.happened(now)
        for command in commands:
            self._perform(command)

    def _perform(self, command: Command) -> None:
        match command:
            case Tell():
                pass  # has been sent
            case Launch():
                self._launch(command)
            case Kill():
                self.processes.end(command.job, self._clock.now())
            case WakeAt():
                self._wake_s = command.when_s
            case Compute():
                self._watched.register(self._computing.begin(command), select.EPOLLIN)
            case Notice():
                level = logging.DEBUG if command.what in _EXPECTED else logging.WARNING
                _log.log(level, "%s %s %s", command.job, command.what, command.details)
                self._handle(Noted(command.what, command.job, command.details))

    def _tell(self, command: Tell) -> None:
        identity = self._routes.get((command.job, command.rank))
        if identity is not None:  # else it has not greeted us yet, and hears of it then
            self._send(identity, command.message)

    def _launch(self, command: Launch) -> None:
        tenant = self.core.jobs[command.job].spec.tenant
        own = {
            "socket": self.endpoint,
            "job": command.job,
            "tenant": tenant,
            "tenant_ramdisk": self._tenant_ramdisk.get(tenant, ""),
        }
        environ = self._environ | {config.variable(name): value for name, value in own.items()}
        try:
            descriptor = self.processes.launch(command.job, command.program, environ, attempt=command.attempt)
        except OSError as error:
            # The shell's convention for a command that cannot be executed.
            self.processes.log(command.job, "err").write_text(f"gpuslice: cannot start: {error}\n")
            self._handle(Exited(command.job, 127))
            return
        self._watched.register(descriptor, select.EPOLLIN)

    def _reap(self) -> None:
        ready = {descriptor for descriptor, _ in self._watched.poll(0)}
        for _, event in self.processes.reap(ready):
            if isinstance(event, Exited):
                self._exited(event)
            else:
                self._handle(event)
        for answer in self._computing.reap(ready):
            if answer.error:
                _log.warning("%s", answer.error)
            self._handle(answer)

    def _exited(self, event: Exited) -> None:
        """A command has ended; if it was killed, what it had started goes, too."""
        if event.code == record.KILLED:
            self._kill_strays(event.job)
        self._handle(event)

    def _kill_strays(self, job: str) -> None:
        """Kill what is left of ``job``, in whichever sessions."""
        own = {config.variable("socket"): self.endpoint, config.variable("job"): job}
        killed = kill_strays([os.fsencode(f"{name}={value}") for name, value in own.items()])
        if killed:
            _log.info("killed %d processes that job %s left behind", killed, job)

    # The socket.

    def _receive(self) -> None:
        """Deal with what is there, but not with so much of it that timers and processes would wait."""
        for _ in range(_FRAMES_AT_ONCE):
            if (message := receive(self._socket)) is None:
                return
            identity, frames = message
            try:
                self._take(identity, frames)
            except (RemoteProtocolError, IllegalTransitionError) as error:
                _log.info("rejected a message of %s: %s", self._peers.get(identity, "a stranger"), error)
                self._send(identity, wire.Rejected(error=error.message, remedy=error.remedy))

    def _take(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        if len(frames) != 1:
            raise RemoteProtocolError(f"a message of {len(frames)} frames", "send one frame")
        pid = check_sender(frames[0])
        message = wire.decode_from_agent(frames[0].bytes)
        if isinstance(message, wire.Hello):
            self._welcome(identity, message, pid)
            return
        peer = self._peers.get(identity)
        if peer is None:
            raise RemoteProtocolError(f"{type(message).__name__} of an unknown rank", "say Hello first")
        self._handle(Reported(*peer, message))

    def _welcome(self, identity: bytes, hello: wire.Hello, pid: int) -> None:
        if hello.version != wire.PROTOCOL_VERSION:
            raise RemoteProtocolError(
                f"protocol version {hello.version} is not {wire.PROTOCOL_VERSION}",
                "run the same gpuslice on both sides",
            )
        peer = (hello.job, hello.rank)
        # Known before the core answers, because the answer may already be a lease.
        former, self._routes[peer] = self._routes.get(peer), identity
        self._send(identity, wire.Welcome(version=wire.PROTOCOL_VERSION))
        try:
            self._handle(Reported(*peer, msgspec.structs.replace(hello, pid=pid)))
        except GpusliceError:
            del self._routes[peer]
            if former is not None:
                self._routes[peer] = former
            raise
        self._peers[identity] = peer
        try:
            descriptor = self.processes.watch_rank(*peer, pid)
        except ProcessLookupError:
            # It died between its Hello and now; there is nothing to watch, so this is how we learn of it.
            self._handle(RankGone(*peer))
            return
        if descriptor is not None:
            self._watched.register(descriptor, select.EPOLLIN)
        if self.core.jobs[hello.job].state.ended:
            self.processes.end(hello.job, self.now())  # its end was before it could be told

    def _send(self, identity: bytes, message: wire.ToAgent) -> None:
        try:
            self._socket.send_multipart([identity, wire.encode(message)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # Unreachable: its process is ending, which the pidfd reports. Full: it does not read, which is
            # the same as not answering.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            _log.warning("%s could not be sent: %s", type(message).__name__, error)
