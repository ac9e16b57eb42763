"""Tetris: multi-resource packing with a preference for short work (Grandl et al., SIGCOMM 2014)."""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf

from gpuslice.errors import ConfigError
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.placement.one_node import kind_of
from gpuslice.sched_core.placement.placement import Placement
from gpuslice.sched_core.policy import View

from .hosts import Hosts
from .starting import Choice, StartingPolicy


class _Alike:
    """Waiting jobs with the same demand, of which only the one with the least work left can be the best.

    What is left of a job does not change while it waits.
    """

    def __init__(self) -> None:
        #: (Work left, number, job), least first.
        self.line: list[tuple[float, int, Job]] = []
        self._finite_s = 0.0

    @property
    def work_s(self) -> float:
        """Return the remaining work of these jobs."""
        return inf if self.line and self.line[-1][0] == inf else self._finite_s

    def add(self, job: Job, left_s: float) -> None:
        insort(self.line, (left_s, job.number, job))
        self._finite_s += left_s if left_s < inf else 0.0

    def remove(self, job: Job, left_s: float) -> None:
        del self.line[bisect_left(self.line, (left_s, job.number))]
        self._finite_s = self._finite_s - (left_s if left_s < inf else 0.0) if self.line else 0.0


class Tetris(StartingPolicy):
    """Start the job with the best score a − ε·p: alignment a, remaining work p (sections 3.2 and 3.3).

    The alignment is the dot product of what the job takes of its nodes and what is free there, over
    devices, CPUs and memory, each as a share of a node. ε is the mean of a over the mean of p, times
    ``shortness``. Ties go to the job that came first.

    Parameters
    ----------
    shortness
        Weight of short remaining work against packing; 0: packing only.
    node_cpus, node_memory_gib
        What every node has; 0: not counted.
    """

    name = "tetris"
    needs_durations = True

    def __init__(
        self,
        placement: Placement | None = None,
        *,
        shortness: float = 1.0,
        node_cpus: float = 0,
        node_memory_gib: float = 0,
    ) -> None:
        super().__init__(placement)
        if not shortness >= 0:
            raise ConfigError(
                f"shortness={shortness} is negative and would prefer long jobs", "give 0 or more"
            )
        self._shortness = shortness
        self._limits = (node_cpus, node_memory_gib)

    def reset(self, view: View) -> None:
        self.hosts = Hosts(view.cluster, *self._limits)
        self._alike: dict[object, _Alike] = {}
        #: What each job asks for, and its work left.
        self._entries: dict[str, tuple[object, float]] = {}

    def came(self, job: Job, view: View) -> None:
        self.hosts.check(job)
        wish = (job.demand, kind_of(self.placement, job), *self.hosts.needs(job))
        self._entries[job.id] = (wish, view.remaining_s(job))
        self._alike.setdefault(wish, _Alike()).add(job, self._entries[job.id][1])

    def left(self, job: Job) -> None:
        wish, left_s = self._entries.pop(job.id)
        self._alike[wish].remove(job, left_s)
        if not self._alike[wish].line:
            del self._alike[wish]

    def began(self, job: Job, devices: tuple[int, ...]) -> None:
        self.hosts.take(job, devices)

    def ended(self, job: Job) -> None:
        self.hosts.take(job, job.placement, -1)

    def choose(self, view: View) -> Choice | None:
        #: Alignment and work of who is best of those that ask for the same.
        scored: list[tuple[float, float, Choice]] = []
        alignments = works = 0.0
        for job, devices in self.offers(alike.line[0][2] for alike in self._alike.values()):
            if self.hosts.fits(job, devices):
                wish, left_s = self._entries[job.id]
                alike, shares = self._alike[wish], sum(self.hosts.shares(job))
                scored.append((self._alignment(job, devices, view), left_s * shares, (job, devices)))
                alignments += scored[-1][0] * len(alike.line)
                works += alike.work_s * shares
        if not scored:
            return None
        epsilon = self._shortness * alignments / works if works > 0 else 0.0
        return max(scored, key=lambda s: (s[0] - (epsilon and epsilon * s[1]), -s[2][0].number))[2]

    def _alignment(self, job: Job, devices: tuple[int, ...], view: View) -> float:
        """Return the dot product of demand and free resources, as shares of the nodes of ``devices``."""
        nodes = view.cluster.nodes(devices)
        size = sum(view.cluster.node_sizes[node] for node in nodes)
        free = sum(len(self.free.on_node[node]) for node in nodes)
        dot = (job.demand / size) * (free / size)
        for kind, (need, capacity) in enumerate(zip(self.hosts.needs(job), self.hosts.capacity, strict=True)):
            if capacity:
                left = sum(self.hosts.left[node][kind] for node in nodes)
                dot += need / (capacity * len(nodes)) * left / (capacity * len(nodes))
        return dot
