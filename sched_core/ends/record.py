"""What is to be done about the ends of jobs, what has been done, and what is tried again.

A job with ``--on-end`` or ``--notify`` owes a delivery for each end that is for good. The outcome of each try
is a note in the journal. So the next scheduler knows from the events what is still owed, and a delivery is
made at least once: twice if a scheduler was killed in the midst of a try.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.lifecycle.events import Event, Noted, Plain

#: The kinds of deliveries, which are names of options and of notes in the journal, too.
ON_END, NOTIFY = "on_end", "notify"
MOST_TRIES = 5
#: The pause after the first try that failed. It is four times as long after each further one.
_FIRST_PAUSE_S = 2.0


class End(NamedTuple):
    """An end of a job for good, on the scheduler's clock. The job may be started again since.

    ``began_s`` is when it had devices first. None: it never had.
    """

    job: str
    array: str
    state: str
    exit_code: int | None
    reason: str
    tenant: str
    attempt: int
    began_s: float | None
    ended_s: float
    service_s: float


@dataclass(slots=True)
class Delivery:
    """A delivery that is owed, or was made or given up.

    Attributes
    ----------
    kind
        ``on_end`` or ``notify``.
    tries, again_s
        How often it was tried, and when it is tried next.
    error
        Why the last try failed. Empty: there was none, or it was made.
    owed
        True if it is still to be made.
    """

    kind: str
    end: End
    tries: int = 0
    again_s: float = 0.0
    error: str = ""
    owed: bool = True

    def outcome(self, error: str, *, last: bool = False) -> Noted:
        """Return the note on a try that has ended with ``error``; empty: it was made.

        ``last`` is True if it is not tried again, whatever the number of its tries is.
        """
        tries = self.tries + 1
        again_in_s: float | None = None
        if error and tries < MOST_TRIES and not last:
            again_in_s = _FIRST_PAUSE_S * 4**self.tries
        details: dict[str, Plain] = {
            "attempt": self.end.attempt,
            "try": tries,
            "error": error,
            "again_in_s": again_in_s,
        }
        return Noted(self.kind, self.end.job, details)


class EndRecord:
    """The deliveries of all jobs, as the events tell of them.

    Attributes
    ----------
    owed
        The deliveries that are to be made, the oldest first.
    fresh
        Those that were added since the list was cleared.
    """

    def __init__(self) -> None:
        #: By job, attempt and kind.
        self._all: dict[tuple[str, int, str], Delivery] = {}
        self.owed: dict[tuple[str, int, str], Delivery] = {}
        self.fresh: list[Delivery] = []

    def look_at(self, job: Gang) -> None:
        """Take down what is owed if ``job`` has ended for good."""
        spec = job.spec
        if not (spec.on_end or spec.notify) or not job.over:
            return
        for kind, wanted in ((ON_END, spec.on_end), (NOTIFY, spec.notify)):
            key = (job.id, job.attempt + 1, kind)
            if wanted and key not in self._all:
                self._all[key] = self.owed[key] = delivery = Delivery(kind, _end(job))
                self.fresh.append(delivery)

    def note(self, event: Event, now: float) -> None:
        """Take in the outcome of a try, if ``event`` is one."""
        if not isinstance(event, Noted) or event.what not in (ON_END, NOTIFY):
            return
        attempt, again_in_s = event.details.get("attempt"), event.details.get("again_in_s")
        key = (event.job, attempt if isinstance(attempt, int) else 0, event.what)
        if (delivery := self.owed.get(key)) is None:
            return
        delivery.tries += 1
        delivery.error = str(event.details.get("error", ""))
        if isinstance(again_in_s, float):
            delivery.again_s = now + again_in_s
        else:
            delivery.owed = False
            del self.owed[key]

    def newest(self, job: Gang) -> list[Delivery]:
        """Return the deliveries of the newest end of ``job``. Return none if it has not ended."""
        found = (self._all.get((job.id, job.attempt + 1, kind)) for kind in (ON_END, NOTIFY))
        return [one for one in found if one is not None]


def _end(job: Gang) -> End:
    ended_s = job.verdict.ended_s
    assert ended_s is not None
    return End(
        job.id,
        job.spec.array,
        job.state.value,
        job.command.exit_code,
        job.verdict.reason,
        job.spec.tenant,
        job.attempt + 1,
        job.first_start_s,
        ended_s,
        job.service_at(ended_s),
    )
