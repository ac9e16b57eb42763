"""Other simulators' semantics on this engine: ``--peer tiresias:SCHEDULE/SCHEME`` (docs/simulate.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Literal, cast

from gpuslice.errors import UsageError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.options import nearest
from gpuslice.sched_core.placement.registry import make_placement
from gpuslice.sched_core.policies.published.gandiva import TICK_S, PublishedGandiva
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policy import Policy
from gpuslice.sched_core.traces.trace import Trace

from .engine import Progress, SimJob, Simulation
from .outcome import Outcome


class StaleCompletions(Simulation):
    """The engine with the published simulator's fault in completions.

    There, completions due at the second of the next arrival are tied to that arrival. If a wake-up comes
    first and suspends such a job, it is completed with the arrival nevertheless, its work not done.
    """

    _tied: tuple[float, list[SimJob]] = (-1.0, [])

    def _next_instant(self, arrival_s: float, wake_s: float | None) -> float:
        now_s = super()._next_instant(arrival_s, wake_s)
        if self._completions and self._completions[0][0] == arrival_s:
            # Suspended and resumed at one instant, a job is listed twice.
            ending = {job for end_s, _, job in self._completions if end_s == arrival_s == job.end_s}
            self._tied = (arrival_s, sorted(ending, key=_number))
        return now_s

    def _complete(self, now_s: float) -> None:
        if self._tied[0] == now_s:
            for job in self._tied[1]:
                self._finish(job, now_s)
            self._tied = (-1.0, [])
        super()._complete(now_s)


class Ticks(Simulation):
    """The engine that sees events only at the ticks of the published simulator's ``gandiva``.

    It looks at arrivals, and every ten seconds after them, and sees a completion at the next look; until then
    the job holds its devices. A job counts as started once it has joined a node set, and nobody as preempted.
    """

    def run(self, progress: Progress | None = None) -> Outcome:
        outcome = super().run(progress)
        for number, joined_s in cast(PublishedGandiva, self.policy).joined_s.items():
            outcome.first_start_s[number] = joined_s
        outcome.preemptions[:] = outcome.migrations[:] = 0
        return outcome

    def _next_instant(self, arrival_s: float, wake_s: float | None) -> float:
        next_s = super()._next_instant(arrival_s, wake_s)
        if next_s in (arrival_s, wake_s) or not self._completions:
            return next_s
        ticks = max(1, ceil((next_s - self._now_s) / TICK_S))
        seen_s = self._now_s + ticks * TICK_S
        return min(arrival_s, seen_s if wake_s is None else min(seen_s, wake_s))


@dataclass(frozen=True, slots=True)
class _Schedule:
    """One of the peer's schedules: our policy with options, and the schemes that work with it.

    ``places`` is what it hands to its policy as placement: the one that the scheme stands for, any devices
    whatever the scheme, or none because the policy has its own.
    """

    policy: str
    options: Mapping[str, object]
    schemes: tuple[str, ...] = ("count",)
    engine: type[Simulation] = Simulation
    places: Literal["scheme", "anywhere", "itself"] = "scheme"


def _dlas(**options: object) -> _Schedule:
    return _Schedule("published-dlas", options, ("count", "yarn"), StaleCompletions, "anywhere")


_GITTINS = _Schedule("published-gittins", {}, ("count", "yarn"), StaleCompletions, "anywhere")
_FACTORS = {"05": 0.5, **{str(factor): float(factor) for factor in (1, 2, 4, 8, 10, 100, 1000)}}
_TIRESIAS: dict[str, _Schedule] = {
    "fifo": _Schedule("fifo", {}, ("count", "yarn")),
    "fjf": _Schedule("fjf", {}, ("count", "yarn")),
    "sjf": _Schedule("smallest", {}),
    "lpjf": _Schedule("published-lpjf", {}, ("count", "yarn")),
    "shortest": _Schedule("published-shortest", {"by_devices": False}),
    "shortest-gpu": _Schedule("published-shortest", {"by_devices": True}),
    "shortest-expected": _Schedule("published-expected", {}),
    "dlas": _dlas(by_devices=False),
    "dlas-gpu": _dlas(),
    **{f"dlas-gpu-{name}": _dlas(promote=factor) for name, factor in _FACTORS.items()},
    "dlas-gpu-gittins": _GITTINS,
    # With a promotion suffix the peer forgets to sort by index.
    **{f"dlas-gpu-gittins-{name}": _dlas(promote=_FACTORS[name]) for name in ("1", "2", "4", "8")},
    "gandiva": _Schedule("published-gandiva", {}, ("gandiva",), Ticks, "itself"),
}


@dataclass(frozen=True, slots=True)
class Peer:
    """The options by which gpuslice simulates as another simulator does."""

    name: str
    policy: Callable[[], Policy]
    engine: type[Simulation]

    def prepare(self, trace: Trace, cluster: Cluster, *, keep_spans: bool = False) -> Simulation:
        """Return the simulation of ``trace`` on ``cluster``.

        Raises
        ------
        UsageError
            If the peer cannot read the trace or has no such cluster.
        """
        if len(set(cluster.node_sizes)) > 1:
            raise UsageError(
                f"{self.name} knows nodes of one size only, not {cluster}", "write NODESxDEVICES"
            )
        return self.engine(_whole_seconds(trace), cluster, self.policy(), keep_spans=keep_spans)


def parse_peer(text: str) -> Peer:
    """Parse ``tiresias:SCHEDULE/SCHEME``.

    Raises
    ------
    UsageError
        If there is no such simulator, schedule or scheme, or the peer itself cannot combine them.
    """
    peer, _, rest = text.partition(":")
    name, _, scheme = rest.partition("/")
    if peer != "tiresias":
        raise UsageError(
            f"there is no peer {peer!r}", "write tiresias:SCHEDULE/SCHEME, e.g. tiresias:fifo/yarn"
        )
    schedule = _TIRESIAS.get(name)
    if schedule is None:
        raise UsageError(f"the peer tiresias has no schedule {name!r}", nearest(name, _TIRESIAS))
    if (scheme or schedule.schemes[0]) not in schedule.schemes:
        works = " or ".join(schedule.schemes)
        raise UsageError(
            f"tiresias:{name} does not work with scheme {scheme!r}", f"use {works}; see docs/simulate.md"
        )
    placement = None
    if schedule.places != "itself":
        by_node = scheme == "yarn" and schedule.places == "scheme"
        placement = make_placement("published-yarn" if by_node else "count")
    return Peer(text, lambda: make_policy(schedule.policy, schedule.options, placement), schedule.engine)


def _whole_seconds(trace: Trace) -> Trace:
    """Return ``trace`` with durations truncated to whole seconds, as the peer reads them."""
    for name, submit_s in zip(trace.ids, trace.submit_s, strict=True):
        if not submit_s.is_integer():
            raise UsageError(
                f"job {name} of {trace.name} is submitted at {submit_s:g}; the peer reads whole seconds only",
                "round the trace's submit_time",
            )
    if all(map(float.is_integer, trace.duration_s)):
        return trace
    return trace.changed(duration_s=[float(int(duration_s)) for duration_s in trace.duration_s])


def _number(job: SimJob) -> int:
    return job.number
