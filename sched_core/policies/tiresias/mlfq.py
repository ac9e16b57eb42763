"""Multi-level feedback queues over attained service (Tiresias, section 3.2): what disciplines share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import Literal

from gpuslice.errors import ConfigError
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.placement.placement import Placement
from gpuslice.sched_core.policies.ranked import RankedPolicy
from gpuslice.sched_core.policies.ranking import Entry
from gpuslice.sched_core.policy import View

#: Which waits count towards a promotion.
PromoteWaits = Literal["all", "last"]
#: When a promotion takes place that is due already.
SOON_S = 1.0
#: A job that is suspended at a threshold may have a little less by rounding: it would be resumed at once.
_ROUNDING_S = 1e-6


class MlfqEntry(Entry):
    """A job in the queues.

    Attributes
    ----------
    level
        Its queue, 0 the most urgent.
    entered_s
        When it entered the first queue: arrival or last promotion.
    started_s
        When it first ran since then; infinite if it did not.
    base_service_s, base_executed_s
        What it had attained when it entered the first queue: its counters start there.
    waited_s
        Time waited between its runs since then.
    due_s
        When it is demoted if it keeps running, or promoted if it keeps waiting.
    """

    __slots__ = ("base_executed_s", "base_service_s", "due_s", "entered_s", "level", "started_s", "waited_s")

    def __init__(self, job: Job, kind: str) -> None:
        super().__init__(job, kind)
        self.level = 0
        self.entered_s = job.spec.submit_s
        self.started_s = inf
        self.base_service_s = 0.0
        self.base_executed_s = 0.0
        self.waited_s = 0.0
        self.due_s = inf

    def go_on_from(self, former: MlfqEntry) -> None:
        """Count waiting time and service from where ``former``, an entry of the same job, counts."""
        self.waited_s = former.waited_s
        if former.base_executed_s:
            self.entered_s, self.started_s = former.entered_s, former.started_s
            self.base_service_s, self.base_executed_s = former.base_service_s, former.base_executed_s


class Mlfq(RankedPolicy[MlfqEntry]):
    """Base of policies with queues: jobs sink as they attain service, and may rise after a long wait.

    Parameters
    ----------
    thresholds
        Attained service at which a job leaves each queue but the last, ascending.
    promote
        PromoteKnob: a job that waited ``promote`` times as long as it has run rises to the first queue and
        starts anew. Infinite: never.
    promote_waits
        Which waits count for it: ``all`` since it arrived or was promoted last, or only the ``last`` one,
        which any short run ends.
    by_devices
        Service is devices times time (2D); otherwise time alone.
    first_slice_s
        Attained service at which a job leaves one more queue, before all the others: whoever is new soon gets
        that much (Gandiva's early feedback). Where the first queue is no longer than that, and at 0, there is
        no such queue.
    """

    entry_type = MlfqEntry

    def __init__(
        self,
        placement: Placement | None = None,
        *,
        thresholds: tuple[float, ...] = (3600.0,),
        promote: float = inf,
        promote_waits: PromoteWaits = "all",
        by_devices: bool = True,
        first_slice_s: float = 0.0,
    ) -> None:
        super().__init__(placement)
        if list(thresholds) != sorted(set(thresholds)) or any(not limit > 0 for limit in thresholds):
            raise ConfigError(f"thresholds={thresholds} do not ascend from above 0")
        if not promote > 0:
            raise ConfigError(f"promote={promote} is not above 0", "leave it out to never promote")
        if not first_slice_s >= 0:
            raise ConfigError(f"first_slice_s={first_slice_s} is below 0", "leave it out for no such slice")
        #: Attained service at which a job leaves each queue but the last, that of the first slice included.
        self.limits = thresholds
        if thresholds and 0 < first_slice_s < thresholds[0]:
            self.limits = (first_slice_s, *thresholds)
        self.promote = promote
        self.promote_waits: PromoteWaits = promote_waits
        self.by_devices = by_devices
        #: (due, number, entry); stale unless the entry still has that due time.
        self._due: list[tuple[float, int, int, MlfqEntry]] = []
        #: Entries in it so far: a job that left and came back may have two of one moment.
        self._expected = 0
        #: How often each job was promoted, by its number.
        self.promotions: dict[int, int] = {}
        #: What was known before a reset, and of jobs that left after a promotion; by number.
        self._former: dict[int, MlfqEntry] = {}

    def level(self, job: str) -> int | None:
        """Return the queue of a job; 0 is the first."""
        entry = self._entries.get(job)
        return None if entry is None else entry.level

    @abstractmethod
    def requeued(self, entry: MlfqEntry, view: View) -> None:
        """Give ``entry``, whose queue has just changed, a new key."""

    def attained(self, entry: MlfqEntry, now_s: float) -> float:
        """Return the service that counts against the thresholds."""
        if self.by_devices:
            return entry.job.service_at(now_s) - entry.base_service_s
        return entry.job.executed_at(now_s) - entry.base_executed_s

    def _rebuild(self, view: View) -> None:
        # What is due is due of entries that are forgotten now; they are in no ranking any more.
        self._due.clear()
        self._former.update({entry.job.number: entry for entry in self._entries.values()})
        super()._rebuild(view)

    def admitted(self, entry: MlfqEntry, view: View) -> None:
        job, now_s = entry.job, view.now_s
        if job.first_start_s is None:
            return
        entry.started_s = job.first_start_s
        former = self._former.pop(job.number, None)
        if former is not None:
            entry.go_on_from(former)
        attained = self.attained(entry, now_s)
        entry.level = sum(attained >= limit - _ROUNDING_S for limit in self.limits)
        waits_since_s = job.since_s if view.changes.reset else now_s
        self._expect(
            entry, self._demotion_s(entry, now_s) if job.running else self._promotion_s(entry, waits_since_s)
        )

    def begun(self, entry: MlfqEntry, view: View) -> None:
        self._expect(entry, self._demotion_s(entry, view.now_s))

    def has_trained(self, entry: MlfqEntry, view: View) -> None:
        attained = self.attained(entry, view.now_s)
        entry.level = sum(attained >= limit - _ROUNDING_S for limit in self.limits)
        self._expect(entry, self._promotion_s(entry, view.now_s))
        self.requeued(entry, view)

    def update(self, view: View) -> None:
        due: list[MlfqEntry] = []
        while self._due and self._due[0][0] <= view.now_s:
            due_s, _, _, entry = heappop(self._due)
            if entry.due_s == due_s:
                entry.due_s = inf
                due.append(entry)
        due.sort(key=_by_number)
        for entry in due:
            if entry.running:
                self._demote(entry, view)
            else:
                self._promote(entry, view)

    def settled(self, started: Sequence[MlfqEntry], suspended: Sequence[MlfqEntry], view: View) -> None:
        now_s = view.now_s
        for entry in started:
            if entry.job.executed_at(now_s) > entry.base_executed_s:
                entry.waited_s += now_s - entry.job.since_s
            if entry.started_s == inf:
                entry.started_s = now_s
            self._expect(entry, self._demotion_s(entry, now_s))
        for entry in suspended:
            self._expect(entry, self._promotion_s(entry, now_s))

    def wake_at(self, view: View) -> float | None:
        # Without anybody waiting, queues need no attention: what became due is made up for at the next event.
        if not self.crowded:
            return None
        while self._due and self._due[0][3].due_s != self._due[0][0]:
            heappop(self._due)
        if not self._due:
            return None
        # A job that waited long in the first queue may be due for promotion as soon as it is suspended.
        return self._due[0][0] if self._due[0][0] > view.now_s else view.now_s + SOON_S

    def left(self, entry: MlfqEntry) -> None:
        entry.due_s = inf
        if entry.job.number in self.promotions:
            self._former[entry.job.number] = entry

    def _demote(self, entry: MlfqEntry, view: View) -> None:
        while (due_s := self._demotion_s(entry, view.now_s)) <= view.now_s:
            entry.level += 1
        self._expect(entry, due_s)
        self.requeued(entry, view)

    def _promote(self, entry: MlfqEntry, view: View) -> None:
        self.promotions[entry.job.number] = self.promotions.get(entry.job.number, 0) + 1
        entry.level = 0
        entry.entered_s = view.now_s
        entry.started_s = entry.due_s = inf
        entry.base_service_s = entry.job.service_at(view.now_s)
        entry.base_executed_s = entry.job.executed_at(view.now_s)
        entry.waited_s = 0.0
        self.requeued(entry, view)

    def _demotion_s(self, entry: MlfqEntry, now_s: float) -> float:
        """Return when a running entry reaches the end of its queue."""
        if entry.level == len(self.limits):
            return inf
        job = entry.job
        since_s = job.since_s if job.running else now_s
        if since_s == inf:  # it does not train yet; what it has by then is not known
            return inf
        left = self.limits[entry.level] - self.attained(entry, since_s)
        return since_s + (left / len(entry.devices) if self.by_devices else left)

    def _promotion_s(self, entry: MlfqEntry, now_s: float) -> float:
        """Return when an entry that waits from now on will have waited long enough for a promotion."""
        executed_s = entry.job.executed_at(now_s) - entry.base_executed_s
        if entry.level == 0 or self.promote == inf or executed_s <= 0:
            return inf
        due_s = now_s + self.promote * executed_s
        return due_s - entry.waited_s if self.promote_waits == "all" else due_s

    def _expect(self, entry: MlfqEntry, due_s: float) -> None:
        entry.due_s = due_s
        if due_s < inf:
            self._expected += 1
            heappush(self._due, (due_s, entry.job.number, self._expected, entry))


def _by_number(entry: MlfqEntry) -> int:
    return entry.job.number
