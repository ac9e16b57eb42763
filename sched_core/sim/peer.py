"""Other simulators' semantics on this engine: ``--peer tiresias:SCHEDULE/SCHEME`` (docs/peers.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpuslice.errors import UsageError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.lookup import nearest
from gpuslice.sched_core.placement.registry import make_placement
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policy import Policy
from gpuslice.sched_core.traces.trace import Trace

from .engine import SimJob, Simulation


class StaleCompletions(Simulation):
    """The engine with a fault of the published simulator.

    There, completions due at the second of the next arrival are tied to that arrival. If a wake-up comes
    first and suspends such a job, it is completed with the arrival nevertheless, its work not done.
    """

    _tied: tuple[float, list[SimJob]] = (-1.0, [])

    def _next_instant(self, arrival_s: float, wake_s: float | None) -> float:
        now_s = super()._next_instant(arrival_s, wake_s)
        if self._completions and self._completions[0][0] == arrival_s:
            ending = (job for end_s, _, job in self._completions if end_s == arrival_s == job.end_s)
            self._tied = (arrival_s, sorted(ending, key=_number))
        return now_s

    def _complete(self, now_s: float) -> None:
        if self._tied[0] == now_s:
            for job in self._tied[1]:
                self._finish(job, now_s)
            self._tied = (-1.0, [])
        super()._complete(now_s)


@dataclass(frozen=True, slots=True)
class _Schedule:
    """One of the peer's schedules: our policy with options, and the schemes that work with it."""

    policy: str
    options: Mapping[str, object]
    schemes: tuple[str, ...] = ("count",)
    engine: type[Simulation] = Simulation


def _dlas(**options: object) -> _Schedule:
    return _Schedule("published-dlas", options, engine=StaleCompletions)


_GITTINS = _Schedule("published-gittins", {}, engine=StaleCompletions)
_FACTORS = {"05": 0.5, **{str(factor): float(factor) for factor in (1, 2, 4, 8, 10, 100, 1000)}}
_TIRESIAS: dict[str, _Schedule] = {
    "fifo": _Schedule("fifo", {}, ("count", "yarn")),
    "fjf": _Schedule("fjf", {}, ("count", "yarn")),
    "sjf": _Schedule("smallest", {}),
    "lpjf": _Schedule("published-lpjf", {}),
    "shortest": _Schedule("published-shortest", {"by_devices": False}),
    "shortest-gpu": _Schedule("published-shortest", {"by_devices": True}),
    "shortest-expected": _Schedule("published-expected", {}),
    "dlas": _dlas(by_devices=False),
    "dlas-gpu": _dlas(),
    **{f"dlas-gpu-{name}": _dlas(promote=factor) for name, factor in _FACTORS.items()},
    "dlas-gpu-gittins": _GITTINS,
    # With a promotion suffix the peer forgets to sort by index.
    **{f"dlas-gpu-gittins-{name}": _dlas(promote=_FACTORS[name]) for name in ("1", "2", "4", "8")},
}


@dataclass(frozen=True, slots=True)
class Peer:
    """How to simulate as another simulator does."""

    name: str
    policy: Callable[[], Policy]
    engine: type[Simulation]

    def prepare(self, trace: Trace, cluster: Cluster, *, keep_spans: bool = False) -> Simulation:
        """The simulation of ``trace`` on ``cluster``."""
        return self.engine(trace, cluster, self.policy(), keep_spans=keep_spans)


def parse_peer(text: str) -> Peer:
    """Read ``tiresias:SCHEDULE/SCHEME``.

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
    if (scheme or "count") not in schedule.schemes:
        works = " or ".join(schedule.schemes)
        raise UsageError(
            f"tiresias:{name} does not work with scheme {scheme!r}", f"use {works}; see docs/peers.md"
        )
    placement = make_placement("published-yarn" if scheme == "yarn" else "count")
    return Peer(text, lambda: make_policy(schedule.policy, schedule.options, placement), schedule.engine)


def _number(job: SimJob) -> int:
    return job.number
