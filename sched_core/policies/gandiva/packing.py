"""Packing two jobs on the same devices, by trial: keep what is faster than taking turns, undo the rest.

Source: Gandiva (OSDI 2018), sections 3.3 and 4.2. Nothing is predicted: how two jobs get along is seen from
the progress that they make. What follows from it, ``interference`` decides, as it does for a live scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gpuslice.sched_core.interference import Verdict, judge_exact
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.policy import View


class _Trial(msgspec.Struct, frozen=True):
    """A pair that shares a device on trial: progress and run time of both when it began."""

    guest_s: float
    host_s: float
    guest_executed_s: float
    host_executed_s: float


class Packing:
    """The pairs of jobs that share devices in the simulator: a guest on the devices of a host.

    Parameters
    ----------
    gain
        A pair is kept if together it makes more than ``gain`` times the progress of taking turns.
    trial_s
        Running time after which a trial is judged.
    """

    def __init__(self, gain: float, trial_s: float) -> None:
        self._gain = gain
        self._trial_s = trial_s
        #: Guest → host.
        self.host_of: dict[str, str] = {}
        self._trials: dict[str, _Trial] = {}
        self._bad: set[frozenset[str]] = set()
        #: Trials that were kept and undone.
        self.kept = 0
        self.undone = 0

    def forget(self, job: Job) -> None:
        """Remove the pair of ``job``, which ended or moved."""
        for guest, host in list(self.host_of.items()):
            if job.id in (guest, host):
                del self.host_of[guest]
                self._trials.pop(guest, None)

    def propose(self, candidates: Sequence[Job], utilization: Mapping[str, float], view: View) -> bool:
        """Start a trial with the two ``candidates`` of least utilization that may get along.

        Return True if one began.
        """
        paired = self.paired
        alone = sorted(
            (job for job in candidates if job.id not in paired),
            key=lambda job: (utilization.get(job.spec.model, 1.0), job.number),
        )
        for position, guest in enumerate(alone):
            for host in alone[position + 1 :]:
                if guest.demand == host.demand and _names(guest, host) not in self._bad:
                    self.host_of[guest.id] = host.id
                    self._trials[guest.id] = _Trial(
                        guest.progress_at(view.now_s),
                        host.progress_at(view.now_s),
                        guest.executed_at(view.now_s),
                        host.executed_at(view.now_s),
                    )
                    return True
        return False

    def judge(self, view: View) -> list[str]:
        """End trials that ran long enough. Return the guests of pairs that are undone."""
        undone: list[str] = []
        for guest_id, trial in list(self._trials.items()):
            guest, host = view.jobs[guest_id], view.jobs[self.host_of[guest_id]]
            # Each by its own time: one goes on while the other is brought back.
            elapsed_s = (
                guest.executed_at(view.now_s) - trial.guest_executed_s,
                host.executed_at(view.now_s) - trial.host_executed_s,
            )
            if min(elapsed_s) < self._trial_s:
                continue
            del self._trials[guest_id]
            made_s = (
                guest.progress_at(view.now_s) - trial.guest_s,
                host.progress_at(view.now_s) - trial.host_s,
            )
            # Progress is counted in seconds of a dedicated run: alone, a second makes one.
            rates = [made / elapsed for made, elapsed in zip(made_s, elapsed_s, strict=True)]
            found = judge_exact(rates, worth=self._gain)
            if found.verdict is Verdict.PACK:
                self.kept += 1
            else:
                self.undone += 1
                undone.append(guest_id)
                self._bad.add(_names(guest, host))
                del self.host_of[guest_id]
        return undone

    @property
    def paired(self) -> set[str]:
        """Return all jobs that are a guest or a host."""
        return {*self.host_of, *self.host_of.values()}

    @property
    def trying(self) -> bool:
        """Return True if a pair is on trial."""
        return bool(self._trials)


def _names(first: Job, second: Job) -> frozenset[str]:
    """Return the name of a pair in the results: its models if known, else its jobs."""
    if first.spec.model and second.spec.model:
        return frozenset((first.spec.model, second.spec.model, ""))
    return frozenset((first.id, second.id))
