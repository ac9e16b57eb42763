"""Copies of every n-th snapshot on another node: ``gpuslice up --ray auto --replicate-every N``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Event, Noted, Reported
from gpuslice.sched_core.nodes.transfers import Transfers
from gpuslice.wire import Suspended

_log = logging.getLogger(__name__)


class Replicas:
    """Copies snapshots when jobs have parked.

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
    """

    def __init__(self, core: Core, every: int, transfers: Transfers, note: Callable[[Noted], object]) -> None:
        self._core = core
        self._every = every
        self._note = note
        self._transfers = transfers
        #: How many snapshots were taken since the last one that was copied, by job.
        self._taken: dict[str, int] = {}

    def see(self, event: Event) -> None:
        """Copy a job's snapshot to another node if ``event`` is every n-th suspend of the job.

        One that falls due while the last is still on its way is copied instead of the next one.
        """
        if not isinstance(event, Reported) or not isinstance(event.message, Suspended):
            return
        job = self._core.jobs[event.job]
        if job.state is not JobState.SUSPENDED or not job.portable:
            return
        self._taken[job.id] = taken = self._taken.get(job.id, 0) + 1
        sources = self._core.state.nodes.named(job.nodes[: job.keepers])
        targets = [self._after(node) for node in sources]
        if taken >= self._every and targets != list(sources) and not self._transfers.under_way(job.id):
            self._taken[job.id] = 0
            done = partial(self._done, job.id, ",".join(node or "here" for node in dict.fromkeys(targets)))
            self._transfers.begin(job.id, sources, targets, done)

    def _after(self, node: str) -> str:
        """Return the living node after ``node``. Return ``node`` if there is no other."""
        names = list(dict.fromkeys(device.node for device in self._core.devices))
        start = names.index(node)
        lost = self._core.state.nodes.lost
        return next((name for name in names[start + 1 :] + names[:start] if name not in lost), node)

    def _done(self, job: str, to: str, error: str) -> None:
        if error:
            _log.warning("a snapshot of %s was not copied to %s: %s", job, to, error)
        self._note(Noted("not_replicated" if error else "replicated", job, {"to": to}))
