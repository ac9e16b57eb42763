"""Tetris: multi-resource packing with a preference for short work (Grandl et al., SIGCOMM 2014)."""

from __future__ import annotations

from gpuslice.errors import ConfigError
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.placement.placement import Placement
from gpuslice.sched_core.policy import View

from .hosts import Hosts
from .starting import Choice, StartingPolicy


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
            raise ConfigError(f"shortness={shortness} would prefer long jobs", "give a weight of at least 0")
        self._shortness = shortness
        self._limits = (node_cpus, node_memory_gib)

    def reset(self, view: View) -> None:
        self.hosts = Hosts(view.cluster, *self._limits)

    def came(self, job: Job) -> None:
        self.hosts.check(job)

    def began(self, job: Job, devices: tuple[int, ...]) -> None:
        self.hosts.take(job, devices)

    def ended(self, job: Job) -> None:
        self.hosts.take(job, job.placement, -1)

    def choose(self, view: View) -> Choice | None:
        scored: list[tuple[float, float, Choice]] = []
        #: Alignment and sum of shares of jobs that ask for the same; ``None``: they do not fit.
        alike: dict[object, tuple[float, float] | None] = {}
        for job, devices in self.offers(self.waiting.values()):
            wish = (job.demand, job.spec.cpus, job.spec.memory_bytes, devices)
            if wish not in alike:
                fits = self.hosts.fits(job, devices)
                shares = sum(self.hosts.shares(job))
                alike[wish] = (self._alignment(job, devices, view), shares) if fits else None
            if (found := alike[wish]) is not None:
                alignment, shares = found
                scored.append((alignment, view.remaining_s(job) * shares, (job, devices)))
        if not scored:
            return None
        alignments = sum(alignment for alignment, _, _ in scored)
        works = sum(work for _, work, _ in scored)
        epsilon = self._shortness * alignments / works if works > 0 else 0.0
        return max(scored, key=lambda s: (s[0] - epsilon * s[1], -s[2][0].number))[2]

    def _alignment(self, job: Job, devices: tuple[int, ...], view: View) -> float:
        """Dot product of demand and free, as shares of the nodes that ``devices`` lie on."""
        nodes = view.cluster.nodes(devices)
        size = sum(view.cluster.node_sizes[node] for node in nodes)
        free = sum(len(self.free.on_node[node]) for node in nodes)
        dot = (job.demand / size) * (free / size)
        for kind, (need, capacity) in enumerate(zip(self.hosts.needs(job), self.hosts.capacity, strict=True)):
            if capacity:
                left = sum(self.hosts.left[node][kind] for node in nodes)
                dot += need / (capacity * len(nodes)) * left / (capacity * len(nodes))
        return dot
