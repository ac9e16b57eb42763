"""Sees every event of a scheduler: keeps the job history, counts, and logs what changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuslice.daemon import event_log
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.lifecycle.events import ArraySubmitted, Command, Event, Submitted
from gpuslice.sched_core.live.job_history import JobHistory, Phase

if TYPE_CHECKING:
    from gpuslice.daemon.metrics import Metrics


class EventObserver:
    """An observer of the core's events: it keeps job histories, counts metrics and writes the log.

    Attributes
    ----------
    job_history
        The histories of all jobs.
    metrics
        The metrics to update; None if none are served.
    """

    def __init__(self, core: Core) -> None:
        self.job_history = JobHistory(core)
        self.metrics: Metrics | None = None
        self._core = core
        self._ended: list[Phase] = []
        #: What is to be logged when there is time for it: event, message, job, details.
        self._lines: list[tuple[str, str, str, dict[str, object]]] = []

    def note(self, event: Event, now: float, commands: Sequence[Command]) -> None:
        """Add an event, replayed or new, to the job histories and the metrics."""
        self._ended = self.job_history.note(event, now, commands)
        if self.metrics is not None:
            self.metrics.note(event, now, self._ended)

    def tell(self, event: Event) -> None:
        """Prepare the log lines on what the newest noted event has changed."""
        if isinstance(event, Submitted | ArraySubmitted):
            spec = event.spec
            details = {"devices": spec.devices, "tenant": spec.tenant, "weight": spec.weight}
            said = f"job {spec.id} was submitted"
            if isinstance(event, ArraySubmitted):
                said = f"array {spec.id} of {len(event.points)} jobs was submitted"
            self._lines.append(("submitted", said, spec.id, details))
        for phase in self._ended:
            self._tell(phase)

    def write(self) -> None:
        """Write the prepared log lines. To be called after the event's commands have left."""
        lines, self._lines = self._lines, []
        for event, message, job, details in lines:
            event_log.tell(event, message, job=job, details=details)

    def _tell(self, phase: Phase) -> None:
        present = self.job_history.accounts[phase.job].phase
        if present.state is phase.state:
            return
        job = self._core.jobs[phase.job]
        details: dict[str, object] = {
            "from": phase.state.value,
            "to": present.state.value,
            "after_s": present.since_s - phase.since_s,
            "devices": [str(self._core.devices[device]) for device in present.devices],
            "epoch": present.epoch,
            "steps": job.steps,
            "reason": job.verdict.reason if present.state.ended else "",
            **phase.details,
        }
        message = f"job {phase.job}: {phase.state.value} -> {present.state.value}"
        self._lines.append(("state", message, phase.job, details))
