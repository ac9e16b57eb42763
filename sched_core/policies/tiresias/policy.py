"""Tiresias (NSDI'19): 2D-LAS and 2D-Gittins, discretized on multi-level feedback queues."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from gpuslice.sched_core.placement.placement import Placement
from gpuslice.sched_core.policies.ranking import Key
from gpuslice.sched_core.policy import View

from .gittins import GittinsIndex, yarn_services
from .mlfq import Mlfq, MlfqEntry, PromoteWaits


class TwoDas(Mlfq):
    """2D-LAS: least attained service first, in queues (section 3.2.3).

    Within a queue, jobs go by when they first started; those that have not started follow, by arrival.
    """

    name = "2das"

    def waiting_key(self, entry: MlfqEntry, view: View) -> Key:
        if entry.started_s == inf:
            return (entry.level, 1, entry.entered_s, entry.job.number)
        return (entry.level, 0, entry.started_s, entry.job.number)

    def requeued(self, entry: MlfqEntry, view: View) -> None:
        self.ranking.rekey(entry, self.waiting_key(entry, view))

    def settled(self, started: Sequence[MlfqEntry], suspended: Sequence[MlfqEntry], view: View) -> None:
        super().settled(started, suspended, view)
        for entry in started:
            if entry.key[1]:
                self.ranking.rekey(entry, self.waiting_key(entry, view))


class TwoDGittins(TwoDas):
    """2D-Gittins: in all queues but the last, the largest index goes first (section 3.2.3).

    The index looks ahead to the end of the queue. The last queue is served by first start. Indices of running
    jobs change as they run; they are worked out anew whenever something happens. The distribution of service
    is what is known of it (``Knowledge.services``), else the sample in ``data/``.
    """

    name = "gittins"

    def __init__(
        self,
        placement: Placement | None = None,
        *,
        thresholds: tuple[float, ...] = (3600.0,),
        promote: float = inf,
        promote_waits: PromoteWaits = "all",
        first_slice_s: float = 0.0,
    ) -> None:
        super().__init__(
            placement,
            thresholds=thresholds,
            promote=promote,
            promote_waits=promote_waits,
            first_slice_s=first_slice_s,
        )
        self._index: GittinsIndex | None = None
        self._edition = 0

    def waiting_key(self, entry: MlfqEntry, view: View) -> Key:
        level, started_s, number = entry.level, entry.started_s, entry.job.number
        if level == len(self.limits):
            index = 0.0
        else:
            if self._index is None:
                self._index = self._learned(view)
            attained = entry.job.service_at(view.now_s) - entry.base_service_s
            index = self._index.within(attained, self.limits[level] - attained)
        if started_s == inf:
            return (level, -index, 1, entry.entered_s, number)
        return (level, -index, 0, started_s, number)

    def _learned(self, view: View) -> GittinsIndex:
        self._edition = view.knowledge.edition()
        return GittinsIndex(view.knowledge.services() or yarn_services())

    def update(self, view: View) -> None:
        if self._index is not None and view.knowledge.edition() != self._edition:
            self._index = self._learned(view)
            for entry in self._entries.values():
                if not entry.running:
                    self.ranking.rekey(entry, self.waiting_key(entry, view))
        super().update(view)
        if self.contended:
            self.ranking.expire(lambda entry: self.waiting_key(entry, view), before=(len(self.limits),))

    def settled(self, started: Sequence[MlfqEntry], suspended: Sequence[MlfqEntry], view: View) -> None:
        Mlfq.settled(self, started, suspended, view)
        for entry in (*started, *suspended):
            self.ranking.rekey(entry, self.waiting_key(entry, view))
