"""The deliveries that are owed, made in threads, so that no job and no client waits for them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread, Timer

import msgspec

from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.lifecycle.events import Noted
from gpuslice.types import shortened

from . import tries
from .record import NOTIFY, ON_END, Delivery, End, EndRecord

#: The most tries of one kind at a time.
_AT_ONCE = 4
_REASON_CHARACTERS = 1000
_GIVEN_UP = "the scheduler was ended by `gpuslice down`"


class Deliveries:
    """The tries under way, and those to come.

    Its owner calls ``advance`` after events and when ``fileno`` can be read.

    Parameters
    ----------
    core
        Knows the jobs; only read.
    record
        What is owed.
    directory
        The scheduler's.
    log
        Returns the path of a job's output, by job and name.
    now, unix_s
        Return the time of the core's clock, and the Unix time of one of its moments, if it is known.
    note
        Writes a note into the journal.
    """

    def __init__(
        self,
        core: Core,
        record: EndRecord,
        directory: Path,
        log: Callable[[str, str], Path],
        now: Callable[[], float],
        unix_s: Callable[[float], float | None],
        note: Callable[[Noted], object],
    ) -> None:
        self._core, self._record, self._directory, self._log = core, record, directory, log
        self._now, self._unix_s, self._note = now, unix_s, note
        self._ready = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._outcomes: SimpleQueue[tuple[Delivery, str]] = SimpleQueue()
        #: The number of tries under way, and the deliveries that are due, by kind.
        self._tried: dict[str, int] = dict.fromkeys((ON_END, NOTIFY), 0)
        self._due: dict[str, deque[Delivery]] = {kind: deque() for kind in self._tried}
        #: The deliveries that are tried again later, the first one first; a number makes each entry unique.
        self._later: list[tuple[float, int, Delivery]] = []
        self._numbers = count()
        self._timer: Timer | None = None

    def fileno(self) -> int:
        """Return a descriptor that can be read when a try has ended or is due."""
        return self._ready

    @property
    def settled(self) -> bool:
        """True if nothing is tried now, or due."""
        return not any(self._tried.values()) and not any(self._due.values())

    def begin(self) -> None:
        """Begin what an earlier scheduler still owed."""
        self._record.fresh.clear()
        for delivery in self._record.owed.values():
            self._put_off(delivery)
        self._begin_due()

    def see(self) -> None:
        """Begin what is owed since the last event."""
        if not self._record.fresh:
            return
        for delivery in self._record.fresh:
            self._due[delivery.kind].append(delivery)
        self._record.fresh.clear()
        self._fill()

    def advance(self) -> None:
        """Note the outcomes of tries that have ended, and begin what is due."""
        try:
            os.eventfd_read(self._ready)
        except BlockingIOError:
            return
        while True:
            try:
                delivery, error = self._outcomes.get_nowait()
            except Empty:
                break
            self._tried[delivery.kind] -= 1
            self._note(delivery.outcome(error))
            if delivery.owed:
                self._put_off(delivery)
        self._begin_due()

    def give_up(self) -> None:
        """Note of all that is owed that it is not tried any more."""
        for delivery in list(self._record.owed.values()):
            self._note(delivery.outcome(delivery.error or _GIVEN_UP, last=True))

    def close(self) -> None:
        """Wake nobody any more. A command that runs goes on; the next scheduler runs it again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _put_off(self, delivery: Delivery) -> None:
        heappush(self._later, (delivery.again_s, next(self._numbers), delivery))

    def _begin_due(self) -> None:
        """Begin what is due, and have this called again when more is."""
        now = self._now()
        while self._later and self._later[0][0] <= now:
            delivery = heappop(self._later)[2]
            self._due[delivery.kind].append(delivery)
        self._fill()
        self.close()
        if self._later:
            self._timer = Timer(self._later[0][0] - now, self._wake)
            self._timer.daemon = True
            self._timer.start()

    def _fill(self) -> None:
        """Begin as many tries of each kind as there may be at a time."""
        for kind, due in self._due.items():
            while due and self._tried[kind] < _AT_ONCE:
                self._begin(due.popleft())

    def _wake(self) -> None:
        os.eventfd_write(self._ready, 1)

    def _begin(self, delivery: Delivery) -> None:
        """Try ``delivery`` in a thread."""
        self._tried[delivery.kind] += 1
        end, job = delivery.end, self._core.jobs[delivery.end.job]
        if delivery.kind == ON_END:
            environ = {**job.program.environ, **self._variables(end)}
            output = self._log(end.job, "end")
            deliver = partial(tries.run, job.spec.on_end, environ, job.program.directory, output)
        else:
            deliver = partial(tries.post, job.spec.notify, msgspec.json.encode(self._message(end)))
        try:
            Thread(target=self._try, args=(delivery, deliver), name=delivery.kind, daemon=True).start()
        except RuntimeError as error:  # there are too many threads
            self._finish(delivery, str(error))

    def _try(self, delivery: Delivery, deliver: Callable[[], str]) -> None:
        error = "it failed in an unforeseen way"
        try:
            error = deliver()
        finally:
            self._finish(delivery, error)

    def _finish(self, delivery: Delivery, error: str) -> None:
        self._outcomes.put((delivery, error))
        self._wake()

    def _variables(self, end: End) -> dict[str, str]:
        """Return the variables that tell the command of the end."""
        told = {
            "JOB": end.job,
            "STATE": end.state,
            "EXIT_CODE": "" if end.exit_code is None else str(end.exit_code),
            "REASON": shortened(end.reason.replace("\0", ""), _REASON_CHARACTERS),
            "ATTEMPT": str(end.attempt),
            "STATE_DIR": str(self._directory),
        }
        return {f"GPUSLICE_{name}": value for name, value in told.items()}

    def _message(self, end: End) -> dict[str, object]:
        """Return the message on the end (docs/json.md)."""
        return {
            "id": end.job,
            "array": end.array or None,
            "state": end.state,
            "exit_code": end.exit_code,
            "reason": shortened(end.reason, _REASON_CHARACTERS),
            "tenant": end.tenant,
            "attempt": end.attempt,
            "began_unix_s": None if end.began_s is None else self._unix_s(end.began_s),
            "ended_unix_s": self._unix_s(end.ended_s),
            "service_s": end.service_s,
        }
