"""Copies of every n-th snapshot on another node: ``gpuslice up --ray auto --replicate-every N``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Event, Noted, Plain, Reported
from gpuslice.sched_core.lifecycle.node_map import listed
from gpuslice.sched_core.nodes.transfers import Transfers
from gpuslice.wire import Progress, Suspended

_log = logging.getLogger(__name__)


class Replicas:
    """Copies snapshots when jobs have parked, and checkpoints while they train.

    Parameters
    ----------
    core
        Knows the jobs and their nodes.
    every
        One of so many snapshots of a job is copied.
    transfers
        What brings one to a node.
    note
        Called with what people should know.
    now
        Returns the time of the core's clock.
    """

    def __init__(
        self,
        core: Core,
        every: int,
        transfers: Transfers,
        note: Callable[[Noted], object],
        now: Callable[[], float],
    ) -> None:
        self._core = core
        self._now = now
        self._every = every
        self._note = note
        self._transfers = transfers
        #: How many snapshots were taken since the last one that was copied, by job.
        self._taken: dict[str, int] = {}
        #: The boundaries of the newest checkpoints of a job's ranks, and the one that was counted last.
        self._saved: dict[str, dict[int, int]] = {}
        self._counted: dict[str, int] = {}

    def see(self, event: Event) -> None:
        """Copy a job's snapshot to another node if ``event`` completes every n-th suspend or checkpoint.

        One that falls due while the last is still on its way is copied instead of the next one.
        """
        if not isinstance(event, Reported):
            return
        job, message = self._core.jobs[event.job], event.message
        if isinstance(message, Suspended):
            is_new = job.state is JobState.SUSPENDED and job.portable
        else:
            is_new = isinstance(message, Progress) and self._is_saved(job, event.rank, message.saved)
        if is_new and not job.state.ended:
            self._count(job)

    def _is_saved(self, job: Gang, rank: int, boundary: int) -> bool:
        """Return True if all ranks of ``job`` that keep state have the checkpoint of ``boundary`` now."""
        if not boundary or rank >= job.keepers:
            return False
        saved = self._saved.setdefault(job.id, {})
        saved[rank] = boundary
        whole = len(saved) >= job.keepers and set(saved.values()) == {boundary}
        if not whole or self._counted.get(job.id) == boundary:
            return False
        self._counted[job.id] = boundary
        return True

    def _count(self, job: Gang) -> None:
        """Count a new snapshot of ``job``, and copy it if it is the n-th."""
        self._taken[job.id] = taken = self._taken.get(job.id, 0) + 1
        sources = self._core.state.nodes.named(job.nodes[: job.keepers])
        targets = [self._after(node) for node in sources]
        if taken >= self._every and targets != list(sources) and not self._transfers.under_way(job.id):
            self._taken[job.id] = 0
            done = partial(self._done, job.id, listed(sources), listed(targets), self._now())
            self._transfers.begin(job.id, sources, targets, done)

    def _after(self, node: str) -> str:
        """Return the living node after ``node``. Return ``node`` if there is no other."""
        names = list(dict.fromkeys(device.node for device in self._core.devices))
        start = names.index(node)
        silent = self._core.state.nodes.silent
        return next((name for name in names[start + 1 :] + names[:start] if name not in silent), node)

    def _done(self, job: str, sources: str, to: str, taken_s: float, error: str) -> None:
        """Tell that the snapshot of the moment ``taken_s`` was copied, or a newer one; or that none was."""
        if error:
            _log.warning("a snapshot of %s was not copied to %s: %s", job, to, error)
            self._note(Noted("not_replicated", job, {"to": to}))
        else:
            details: dict[str, Plain] = {"from": sources, "to": to, "age_s": self._now() - taken_s}
            self._note(Noted("replicated", job, details))
